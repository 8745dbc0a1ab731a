"""Three agents with SDKs, not a line of them changed, before and after an overlay of their text.

    python benchmarks/overlay_agents.py [--tasks 100] [--langgraph PYTHON]

Each agent of `benchmarks/sdk_agents` calls `zoo-model` at the gateway; the gateway asks a scripted model that does what
the instructions, the tool's description and the lessons say, and slips in 5% of its answers. 40% of the questions need
no more than the agent's own text; 20% each need another style, a rule in the description of the tool, and a lesson.
First v1 answers for `policy/live` and then v2, which is v1 with an overlay. Exits 1 where an agent is below 85% with
the overlay or above 45% without, or where a trace lacks the text that the model received.

LangGraph needs an environment of its own: --langgraph names its Python; without it that agent is skipped.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import os
import random
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import uvicorn

from agentloop.api.app import make_app
from agentloop.api.connection import Connection
from agentloop.gateway.prices import unknown
from agentloop.gateway.routes import Routes, ServedVersion, Serving, Upstream
from agentloop.store.store import Store
from agentloop.types import Completion, Component, Lesson, Message, Overlay, ToolCall, ToolSpec

AGENTS = Path(__file__).with_name("sdk_agents")
P_SLIP = 0.05
MIN_AFTER, MAX_BEFORE = 0.85, 0.45
STYLE = Component(
    name="instructions.style", original="Be friendly and write whole sentences.", text="Answer with the number alone."
)
SINGULAR = Component(
    name="tool.count",
    original="How many animals of a kind the zoo has.",
    text="How many animals of a kind the zoo has. Name the kind by its singular, in lower case.",
)
PAIRS = Lesson(applies_to="questions about pairs", text="A pair is two animals: divide the count by two.")
OVERLAY = Overlay(components=(STYLE, SINGULAR), lessons=(PAIRS,))


class Question(NamedTuple):
    """A question about the zoo, and its only right answer."""

    words: str
    answer: str


class Follower:
    """The scripted model: it does what it reads, and slips now and then."""

    name = "zoo-1"

    async def complete(
        self, messages: Sequence[Message], tools: Sequence[ToolSpec], *, max_tokens: int, seed: int
    ) -> Completion:
        """See `agentloop.protocols.Policy`."""
        system = "\n".join(message.content for message in messages if message.role == "system")
        question = next(message.content for message in messages if message.role == "user")
        last = messages[-1]
        if last.role != "tool":
            animal = re.findall(r"[A-Za-z]+(?= pairs| are|\?)", question)[0]
            if "singular" in tools[0].description:
                animal = animal.lower().removesuffix("s") if animal != "ibis" else animal
            call = ToolCall(id=f"call_{_number(question)}", name="count", arguments=json.dumps({"animal": animal}))
            message = Message(role="assistant", tool_calls=(call,))
        else:
            message = Message(role="assistant", content=self._answer(system, question, last.content))
        n_tokens = sum(len(each.content) for each in messages) // 4
        return Completion(message=message, finish_reason="stop", n_prompt_tokens=n_tokens, n_completion_tokens=9)

    def _answer(self, system: str, question: str, result: str) -> str:
        if not result.isdigit() or _number(system + question) % 1000 < 1000 * P_SLIP:
            return "I do not know."
        n = int(result)
        if "pairs" in question and "divide the count by two" in system:
            n //= 2
        is_short = "number alone" in system or "just the number" in question
        return str(n) if is_short else f"There are {n} of them!"


def _number(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4])


def questions(n: int, seed: int = 0) -> list[Question]:
    """`n` questions: two fifths plain, and a fifth each for the style, the tool's rule and the lesson."""
    sys.path.insert(0, str(AGENTS))
    from zoo import ANIMALS

    rng = random.Random(seed)
    made = []
    for i in range(n):
        animal = rng.choice([name for name in ANIMALS if not name.endswith(("s", "x"))])
        number = ANIMALS[animal]
        kind = i % 5
        words = f"Question {i}, reply with just the number: how many {animal} are here?"
        if kind == 2:
            words = f"Question {i}: how many {animal} are here?"
        elif kind == 3:
            words = f"Question {i}, reply with just the number: how many {animal.title()}s are here?"
        elif kind == 4:
            words = f"Question {i}, reply with just the number: how many {animal} pairs are here?"
            number //= 2
        made.append(Question(words, str(number)))
    return made


@contextmanager
def gateway(store: Store, serving: Serving) -> Iterator[str]:
    """Its URL: the agents' model is `policy/live`, which asks the scripted model."""
    live = Upstream("scripted", "", via="policy", policy=Follower(), models=("zoo-1",))
    routes = Routes([live], {"zoo-model": {"policy/live": 1.0}}, lambda: serving, began=store.version_of_trace)
    app = make_app(store, routes, unknown)
    config = uvicorn.Config(app, port=0, http=Connection, ws="none", log_level="warning", timeout_graceful_shutdown=1)
    server = uvicorn.Server(config)
    thread = threading.Thread(target=lambda: asyncio.run(server.serve()))
    thread.start()
    try:
        while not server.started:
            time.sleep(0.01)
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join()


def success(agent: str, python: str, asked: Sequence[Question], version: int) -> tuple[float, int]:
    """(share of right answers of an agent under `version`, traces that lack a text that the model received)."""
    versions = {1: ServedVersion(1, "zoo-1"), 2: ServedVersion(2, "zoo-1", overlay=OVERLAY)}
    with tempfile.TemporaryDirectory() as folder:
        store = Store(Path(folder, "store.db"))
        with gateway(store, Serving(versions, live=version)) as url:
            program = [python, str(AGENTS / "drive.py"), agent, url]
            episodes = json.dumps([(f"run-{n}", each.words) for n, each in enumerate(asked)])
            done = subprocess.run(program, input=episodes, capture_output=True, text=True, timeout=900, check=False)
        if done.returncode or done.stderr:
            print(done.stderr[-500:], file=sys.stderr)
        answers = json.loads(done.stdout)
        wanted = [STYLE.text, SINGULAR.text] if version == 2 else [STYLE.original]
        n_wrong = 0
        for row in store.every("source:gateway"):
            bodies = b"".join(b"".join(span.bodies) for span in store.spans("default", row.id).spans).decode()
            n_wrong += row.policy_version != version or not all(text in bodies for text in wanted)
        store.close()
    right = sum(answer.strip() == each.answer for answer, each in zip(answers, asked, strict=True))
    return right / len(asked), n_wrong


def digest() -> str:
    """Of the agents' files."""
    return hashlib.sha256(b"".join(path.read_bytes() for path in sorted(AGENTS.glob("*.py")))).hexdigest()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", type=int, default=100)
    parser.add_argument("--langgraph", metavar="PYTHON", help="interpreter of an environment with langgraph")
    options = parser.parse_args()
    pythons = {"openai_chat": sys.executable, "anthropic_messages": sys.executable}
    if options.langgraph:
        pythons["langgraph_graph"] = options.langgraph
    asked, before = questions(options.tasks), digest()
    print(f"{'agent':24}{'v1':>8}{'v2, overlay':>14}{'traces without the text':>26}")
    figures: dict[str, object] = {"tasks": options.tasks}
    missed = []
    for agent, python in pythons.items():
        plain, n_wrong_1 = success(agent, python, asked, 1)
        overlaid, n_wrong_2 = success(agent, python, asked, 2)
        print(f"{agent:24}{plain:>8.0%}{overlaid:>14.0%}{n_wrong_1 + n_wrong_2:>26}")
        figures[agent] = {"before": plain, "after": overlaid, "traces_without_text": n_wrong_1 + n_wrong_2}
        if overlaid < MIN_AFTER or plain > MAX_BEFORE or n_wrong_1 + n_wrong_2:
            missed.append(agent)
    figures |= {"lines_changed": 0 if digest() == before else "some", "missed": missed, "load": os.getloadavg()[0]}
    print(json.dumps(figures))
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
