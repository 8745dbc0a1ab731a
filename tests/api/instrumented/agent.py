"""A program as its users write them: an agent that asks a model over the client of its maker, and runs its tools.

    python -m tests.api.instrumented.agent '{"library": ..., "traces": url, "runs": [{"dialect": ..., "model": url}]}'

Prints the ids of its traces, one for each run.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any

from tests.api.instrumented import clients, libraries

SYSTEM = "You count animals with your tools."
QUESTION = "How many penguins and owls are there?"
COUNTS = {"penguin": "7", "owl": '{"n": 2, "where": ["barn", "tower"]}'}


def main(options: dict[str, Any]) -> None:
    library = libraries.LIBRARIES[options["library"]](options["traces"])
    for run in options["runs"]:
        one(library, **run)
        print(library.trace_id)
    library.stop()


def one(library: libraries.Library, dialect: str, model: str, *, stream: bool = False, patient: bool = False) -> None:
    """One run of the agent. patient: a call of the model that failed is made again."""
    client = clients.DIALECTS[dialect](model, stream=stream)

    @library.tool("count")
    def count(animal: str) -> str:
        if animal not in COUNTS:
            raise KeyError(f"no {animal} here")
        return COUNTS[animal]

    @library.agent("expert")
    def expert(question: str) -> str:
        return str(client.ask([client.user(question)])[0])

    @library.tool("ask_expert")
    def ask_expert(question: str) -> str:
        return expert(question)

    tools: dict[str, Callable[..., str]] = {"count": count, "ask_expert": ask_expert}

    @library.agent("counter")
    def counter(question: str) -> str:
        messages = [client.system(SYSTEM), client.user(question)]
        for _ in range(10):
            text, calls, said = client.patient(messages) if patient else client.ask(messages)
            messages += said
            if not calls:
                return str(text)
            messages += client.results([(call, _run(tools, library, call)) for call in calls])
        raise RuntimeError("no end of it")

    try:
        library.main(counter)(QUESTION)
    except clients.Failed as failed:
        print(failed, file=sys.stderr)


def _run(tools: dict[str, Callable[..., str]], library: libraries.Library, call: clients.Call) -> str:
    try:
        return library.call(tools[call.name], call)
    except KeyError as error:
        return f"error: {error.args[0]}"


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
