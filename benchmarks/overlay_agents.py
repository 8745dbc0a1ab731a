"""Three agents with SDKs, not a line of them changed, before and after an overlay that the trainer `gepa` makes.

    python benchmarks/overlay_agents.py [--tasks 100]

Each agent of `benchmarks/sdk_agents` calls `zoo-model` at the gateway; the gateway asks a scripted model that does what
the instructions and the tool's description say, and slips in 5% of its answers. 40% of the questions need no more than
the agent's own text; 20% each need another style, a rule in the description of the tool, and a rule for pairs.

For each agent: its traffic on train questions is recorded by the gateway and judged. `gepa` learns from these traces,
which also show what the agent's texts are, and tries candidates by letting the agent answer train and validation
questions through the gateway. Its rewriter is a script that can name a rule only where the request quotes evidence of
it, and is wrong one time in five. Then both versions answer other questions.

Missed where an agent is below 85% with the overlay or above 45% without, where a trace lacks the text that the model
received, where a file of an agent changed, and where an agent cannot be run: LangGraph has an environment of its own,
which is installed once. The last line is JSON; the exit code is 1 where something is missed.
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
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

import uvicorn

from agentloop.api.app import make_app
from agentloop.api.connection import Connection
from agentloop.gateway.prices import unknown
from agentloop.gateway.routes import Routes, ServedVersion, Serving, Upstream
from agentloop.judge.score import judge
from agentloop.otel.stored_trace import StoredTrace
from agentloop.policies.scripted import ScriptedPolicy
from agentloop.protocols import Policy
from agentloop.rollout.plan import plan
from agentloop.store.store import Store
from agentloop.testing.experience import MemoryDraft, MemoryExperience
from agentloop.train.trainers.components import read_overlay
from agentloop.train.trainers.gepa import Gepa
from agentloop.types import (
    Attempt,
    Completion,
    Judged,
    Message,
    Overlay,
    Part,
    PolicyVersion,
    Purpose,
    Split,
    Task,
    ToolCall,
    ToolSpec,
    Trace,
    VersionKind,
)

ROOT = Path(__file__).resolve().parents[1]
AGENTS = Path(__file__).resolve().with_name("sdk_agents")
P_SLIP = 0.05
P_WRONG = 0.2
"""Of a sentence of the rewriter."""
MIN_AFTER, MAX_BEFORE = 0.85, 0.45
N_TASKS, N_TRAIN, N_VALIDATION = 100, 30, 20
MAX_ATTEMPTS = 200
SEED = 1
RULES = (
    (
        re.compile(r"There are \d+ of them"),
        "Answer with the number alone.",
        "Answer with the number in words.",
    ),
    (
        re.compile(r"no kind '[A-Z]\w+s'"),
        "Name the kind by its singular, in lower case.",
        "Name the kind by its plural.",
    ),
    (
        re.compile(r"how many \w+ pairs are here"),
        "A pair is two animals: divide the count by two.",
        "A pair is two animals: multiply the count by two.",
    ),
)
"""(evidence, the rule that it shows, a wrong one)."""
PARENT = PolicyVersion(
    number=1,
    parent=None,
    kind=VersionKind.settings,
    artifact=None,
    sha256="0" * 64,
    config_hash="",
    created_at=datetime.now(UTC),
)


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
        system = [message.content for message in messages if message.role == "system"]
        read = "\n".join([*system, *(tool.description for tool in tools)])
        question = next(message.content for message in messages if message.role == "user")
        last = messages[-1]
        if last.role != "tool":
            animal = re.findall(r"[A-Za-z]+(?= pairs| are|\?)", question)[0]
            if "singular" in read:
                animal = animal.lower().removesuffix("s") if animal != "ibis" else animal
            call = ToolCall(id=f"call_{_number(question)}", name="count", arguments=json.dumps({"animal": animal}))
            message = Message(role="assistant", tool_calls=(call,))
        else:
            message = Message(role="assistant", content=self._answer(read, question, last.content))
        n_tokens = sum(len(each.content) for each in messages) // 4
        return Completion(message=message, finish_reason="stop", n_prompt_tokens=n_tokens, n_completion_tokens=9)

    def _answer(self, read: str, question: str, result: str) -> str:
        if not result.isdigit() or _number(read + question) % 1000 < 1000 * P_SLIP:
            return "I do not know."
        n = int(result)
        if "pairs" in question and "divide the count by two" in read:
            n //= 2
        is_short = "number alone" in read or "just the number" in question
        return str(n) if is_short else f"There are {n} of them!"


def _number(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4])


def questions(n: int, first: int = 0) -> list[Question]:
    """`n` questions from number `first` on: two fifths plain, a fifth each for the style, the tool and the pairs."""
    sys.path.insert(0, str(AGENTS))
    from zoo import ANIMALS

    rng = random.Random(first)
    asked = []
    for i in range(first, first + n):
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
        asked.append(Question(words, str(number)))
    return asked


class ZooRewriter:
    """Writes down the rules that the request quotes evidence of; of each sentence, one in five is wrong."""

    name = "zoo-rewriter"

    async def complete(
        self, messages: Sequence[Message], tools: Sequence[ToolSpec], *, max_tokens: int, seed: int
    ) -> Completion:
        """See `agentloop.protocols.Policy`."""
        request = messages[-1].content
        rng = random.Random(f"{seed}/{request}")
        before = re.search(r"^```[^\n]*\n(.*?)\n?^```", request, re.DOTALL | re.MULTILINE)
        assert before is not None, request
        text = before[1]
        for evidence, rule, wrong in RULES:
            if evidence.search(request[before.end() :]):
                for sentence in (rule, wrong):
                    text = text.replace(sentence, "").strip()
                text = f"{text}\n\n{wrong if rng.random() < P_WRONG else rule}"
        return Completion(message=Message(role="assistant", content=f"```\n{text}\n```"), finish_reason="stop")


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


class Traffic(NamedTuple):
    """What an agent did with some questions."""

    traces: list[Trace]
    """By question, as the gateway recorded them."""
    n_without_text: int
    """Traces that lack a text that the model received, or that name another version."""


def drive(agent: str, python: str, asked: Sequence[Question], overlay: Overlay | None = None) -> Traffic:
    """Let an agent answer questions through the gateway: as version 1, or as version 2 with `overlay`."""
    version = 1 if overlay is None else 2
    versions = {1: ServedVersion(1, "zoo-1"), 2: ServedVersion(2, "zoo-1", overlay=overlay)}
    names = [f"run-{n}" for n in range(len(asked))]
    texts = original_texts() if overlay is None else [each.text for each in overlay.components]
    with tempfile.TemporaryDirectory() as folder:
        store = Store(Path(folder, "store.db"))
        with gateway(store, Serving(versions, live=version)) as url:
            program = [python, str(AGENTS / "drive.py"), agent, url]
            episodes = json.dumps([(name, each.words) for name, each in zip(names, asked, strict=True)])
            done = subprocess.run(program, input=episodes, capture_output=True, text=True, timeout=900, check=False)
        if done.returncode or done.stderr:
            print(done.stderr[-500:], file=sys.stderr)
        answers = dict(zip(names, json.loads(done.stdout), strict=True))
        traces: dict[str, Trace] = {}
        n_without_text = 0
        for row in store.every("source:gateway"):
            trace = StoredTrace(store, row).trace
            assert row.episode_id is not None
            traces[row.episode_id] = trace.model_copy(update={"answer": answers[row.episode_id].strip()})
            bodies = b"".join(b"".join(span.bodies) for span in store.spans("default", row.id).spans).decode()
            has_texts = all(json.dumps(text)[1:-1] in bodies or text in bodies for text in texts)
            n_without_text += row.policy_version != version or not has_texts
        store.close()
    return Traffic([traces[name] for name in names], n_without_text)


def original_texts() -> list[str]:
    """Two texts that the agents have of their own."""
    sys.path.insert(0, str(AGENTS))
    from zoo import DESCRIPTION, SYSTEM

    return [DESCRIPTION, SYSTEM.rpartition("\n\n")[2]]


def success(traffic: Traffic, asked: Sequence[Question]) -> float:
    """Share of right answers."""
    right = sum(trace.answer == each.answer for trace, each in zip(traffic.traces, asked, strict=True))
    return right / len(asked)


class GatewayExperience(MemoryExperience):
    """Experience whose attempts are an agent's episodes at the gateway."""

    texts = None  # type: ignore[assignment]  # only the traces show them
    fork = None  # type: ignore[assignment]  # an agent cannot go on from the middle of an episode

    def __init__(self, agent: str, python: str) -> None:
        self._asked = {f"train-{n}": each for n, each in enumerate(questions(N_TRAIN, 1000))}
        self._asked |= {f"validation-{n}": each for n, each in enumerate(questions(N_VALIDATION, 2000))}
        tasks = [task_of(id, each) for id, each in self._asked.items()]
        train = [task for task in tasks if task.id.startswith("train")]
        self._program = agent, python
        self.n_runs = 0
        recorded = drive(agent, python, [self._asked[task.id] for task in train])
        self.n_without_text = recorded.n_without_text
        stored = [
            Judged(trace, asyncio.run(judge(task, trace)), task)
            for task, trace in zip(train, recorded.traces, strict=True)
        ]
        super().__init__(
            train,
            [task for task in tasks if task not in train],
            None,  # type: ignore[arg-type]  # `make` has its own
            ScriptedPolicy(lambda *_: "", "none"),  # type: ignore[arg-type, return-value]
            stored=stored,
        )

    async def make(
        self, tasks: Sequence[Task], policy: Policy | None, overlay: Overlay | None, stage: str, group_size: int = 1
    ) -> list[Attempt]:
        """See `MemoryExperience`."""
        planned = plan(tasks, run="zoo", stage=stage, purpose=Purpose.train, policy_version=1, group_size=group_size)
        new = [(task, episode) for task, episode in planned if episode.id not in self.done]
        if new:
            asked = [self._asked[task.id] for task, _ in new]
            traffic = await asyncio.to_thread(drive, *self._program, asked, overlay or Overlay())
            self.n_runs += len(new)
            self.n_without_text += traffic.n_without_text
            for (task, episode), trace in zip(new, traffic.traces, strict=True):
                verdict = await judge(task, trace)
                self.done[episode.id] = Attempt(task=task, episode=episode, trace=trace, verdict=verdict)
        return [self.done[episode.id] for _, episode in planned]


def task_of(id: str, question: Question) -> Task:
    """A question as a task."""
    verifier = Part(kind="exact", options={"expected": question.answer})
    return Task(id=id, instruction=question.words, split=Split.train, verifiers=(verifier,))


def improved(experience: GatewayExperience) -> Overlay:
    """What `gepa` makes of an agent's traces."""
    with tempfile.TemporaryDirectory() as folder:
        draft = MemoryDraft(Path(folder) / "v0002", seed=SEED)
        rewriter = {"kind": f"{Path(__file__).resolve()}:ZooRewriter"}
        trainer = Gepa(rewriter, max_attempts=MAX_ATTEMPTS, lessons=0)
        asyncio.run(trainer.improve(PARENT, draft, experience))
        return read_overlay(draft.folder)


def digests() -> dict[str, str]:
    """SHA-256 of each file of the agents."""
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(AGENTS.glob("*.py"))}


def langgraph() -> str | None:
    """An interpreter with LangGraph; None, having said why, where it cannot be installed."""
    sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
    from environments import python_with

    from tests.gateway.test_clients import LANGGRAPH

    try:
        return str(python_with(LANGGRAPH))
    except BaseException as error:  # a skip of pytest among them
        print(f"LangGraph: {error}", file=sys.stderr)
        return None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", type=int, default=N_TASKS)
    options = parser.parse_args()
    load = [round(os.getloadavg()[0], 2)]
    files = digests()
    pythons = {"openai_chat": sys.executable, "anthropic_messages": sys.executable, "langgraph_graph": langgraph()}
    asked = questions(options.tasks)
    heads = ("agent", "v1", "v2, overlay", "texts", "episodes of the search", "traces without the text")
    print("{:22}{:>6}{:>13}{:>7}{:>24}{:>25}".format(*heads))
    figures: dict[str, object] = {"tasks": options.tasks}
    missed = []
    for agent, python in pythons.items():
        if python is None:
            missed.append(f"{agent}: no environment")
            continue
        experience = GatewayExperience(agent, python)
        overlay = improved(experience)
        plain = drive(agent, python, asked)
        overlaid = drive(agent, python, asked, overlay)
        before = success(plain, asked)
        after = success(overlaid, asked)
        n_without_text = experience.n_without_text + plain.n_without_text + overlaid.n_without_text
        names = [component.name for component in overlay.components]
        row = f"{agent:22}{before:>6.0%}{after:>13.0%}{len(names):>7}{experience.n_runs:>24}{n_without_text:>25}"
        print(row, flush=True)
        figures[agent] = {
            "before": before,
            "after": after,
            "texts": names,
            "search_episodes": experience.n_runs,
            "traces_without_text": n_without_text,
        }
        if after < MIN_AFTER or before > MAX_BEFORE or n_without_text or not names:
            missed.append(agent)
    changed = [name for name, digest in digests().items() if files.get(name) != digest]
    missed += [f"{name} changed" for name in changed]
    if options.tasks < N_TASKS:
        missed.append(f"{options.tasks} tasks are too few for the goals, which need {N_TASKS}")
    figures |= {
        "changed_files": changed,
        "goals": {"before": MAX_BEFORE, "after": MIN_AFTER, "traces_without_text": 0, "changed_files": 0},
        "load": [*load, round(os.getloadavg()[0], 2)],
        "missed": missed,
    }
    print(json.dumps(figures))
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
