"""Asks an agent of this folder questions, each as an episode of its own: `drive.py NAME URL`, questions by stdin.

The agent's library takes the address from its usual variable; nothing else leads it to the gateway. Prints a JSON list
of answers; an error is an empty answer.
"""

from __future__ import annotations

import json
import os
import sys
from importlib import import_module


def main(name: str, url: str) -> int:
    os.environ["OPENAI_API_KEY"] = os.environ["ANTHROPIC_API_KEY"] = "none"
    agent = import_module(name)
    answers = []
    for episode, question in json.load(sys.stdin):
        os.environ["OPENAI_BASE_URL"] = f"{url}/e/{episode}/v1"
        os.environ["ANTHROPIC_BASE_URL"] = f"{url}/e/{episode}"
        try:
            answers.append(agent.run(question))
        except Exception as error:  # the benchmark counts it as a failure of the agent
            print(f"{episode}: {error!r}", file=sys.stderr)
            answers.append("")
    print(json.dumps(answers))
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
