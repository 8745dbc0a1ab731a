"""Every built-in part keeps the laws that authors of parts are given; sandboxes: `test_sandboxes.py`."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import pytest
from store.rows import judged

from agentloop.agents.callable import PythonAgent
from agentloop.agents.command import Command
from agentloop.agents.tool_loop import ToolLoop
from agentloop.failures.detectors.rules import ALL
from agentloop.failures.reading import Reading
from agentloop.formats.export import load_exporter
from agentloop.formats.importing import load_formats
from agentloop.formats.source import SourceFile
from agentloop.judge.artifacts import Artifacts, fresh_boxes
from agentloop.judge.verifiers.actions import Actions
from agentloop.judge.verifiers.command import CommandVerifier
from agentloop.judge.verifiers.delayed import Delayed
from agentloop.judge.verifiers.env_return import EnvReturn
from agentloop.judge.verifiers.exact import Exact
from agentloop.judge.verifiers.files import FilesVerifier
from agentloop.judge.verifiers.human import Human
from agentloop.judge.verifiers.json import Json
from agentloop.judge.verifiers.numeric import Numeric
from agentloop.judge.verifiers.regex import Regex
from agentloop.otel.stored import read_each
from agentloop.policies.openai import OpenAIPolicy
from agentloop.policies.scripted import ScriptedPolicy, call_message
from agentloop.protocols import Agent, Sandbox, Stored
from agentloop.sandbox.absent import AbsentSandbox
from agentloop.sandbox.bubblewrap import BubblewrapBackend
from agentloop.sandbox.pool import SandboxPool
from agentloop.store.store import Store
from agentloop.testing import opened
from agentloop.testing.agents import AGENT_LAWS, AgentLaw
from agentloop.testing.detectors import it_has_an_id, it_reads_a_trace_with_nothing_in_it
from agentloop.testing.formats import EXPORTER_LAWS, FORMAT_LAWS, ExporterLaw, FormatLaw
from agentloop.testing.policies import POLICY_LAWS, PolicyLaw
from agentloop.testing.verifiers import VERIFIER_LAWS, VerifierCase, VerifierLaw, answered
from agentloop.types import Message, SandboxSpec, Step, Task, Trace
from tests.gateway.upstream import model_server

PROGRAM = """
import json, os, urllib.request

def ask(text):
    body = json.dumps({"model": "m", "messages": [{"role": "user", "content": text}]}).encode()
    request = urllib.request.Request(
        os.environ["OPENAI_BASE_URL"] + "/chat/completions", body, {"content-type": "application/json"}
    )
    return json.load(urllib.request.urlopen(request))["choices"][0]["message"]

def run(task):
    text = task if isinstance(task, str) else task.instruction
    for _ in range(5):
        calls = ask(text).get("tool_calls") or []
        if any(call["function"]["name"] == "submit" for call in calls):
            return "done"

if __name__ == "__main__":
    run(os.environ["AGENTLOOP_INSTRUCTION"])
"""


def says(messages: Sequence[Message], rng: object) -> Message:
    return call_message("submit", answer="x")


@pytest.mark.parametrize("law", POLICY_LAWS, ids=lambda law: law.__name__)
def test_scripted_policy_keeps(law: PolicyLaw) -> None:
    asyncio.run(law(ScriptedPolicy(says)))


@pytest.mark.parametrize("law", POLICY_LAWS, ids=lambda law: law.__name__)
def test_openai_policy_keeps(law: PolicyLaw) -> None:
    with model_server() as model:
        asyncio.run(law(OpenAIPolicy(model.url, "scripted-1")))


@asynccontextmanager
async def absent() -> AsyncIterator[Sandbox]:
    yield AbsentSandbox()


@pytest.mark.parametrize("law", AGENT_LAWS, ids=lambda law: law.__name__)
@pytest.mark.parametrize(
    "kind", ["tool_loop", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("command", "python"))]
)
def test_agent_keeps(law: AgentLaw, kind: str, bubblewrap: BubblewrapBackend, tmp_path: Path) -> None:
    (tmp_path / "run.py").write_text(PROGRAM)
    tmp_path.chmod(0o755)
    spec, agent = SandboxSpec(), ToolLoop()
    agents: dict[str, Agent] = {
        "tool_loop": agent,
        "command": Command("python3 /agent/run.py", files=tmp_path),
        "python": PythonAgent("run.py:run", project=tmp_path),
    }
    if kind == "command":
        spec = SandboxSpec(agent_files=tmp_path)
    asyncio.run(law(agents[kind], absent if kind == "python" else partial(opened, bubblewrap, spec)))


def returned(value: float) -> Trace:
    """As an environment leaves it."""
    played = json.dumps({"observation": 0, "reward": value, "terminated": True, "truncated": False, "return": value})
    step = Step.model_validate(
        {
            "index": 0,
            "completion": {"message": {"role": "assistant", "content": ""}, "finish_reason": "stop"},
            "results": [{"call_id": "c", "name": "step", "content": played, "ok": True}],
        }
    )
    return answered(None).model_copy(update={"steps": (step,)})


def called(name: str) -> Trace:
    message = call_message(name).model_dump()
    step = Step.model_validate({"index": 0, "completion": {"message": message, "finish_reason": "stop"}})
    return answered("done").model_copy(update={"steps": (step,)})


CASES = {
    "actions": VerifierCase(Actions([{"name": "look"}]), called("look"), called("jump")),
    "delayed": VerifierCase(Delayed("clicks"), answered("a"), answered("b")),
    "env_return": VerifierCase(EnvReturn(threshold=1.0), returned(1.0), returned(0.0)),
    "exact": VerifierCase(Exact("yes"), answered("yes"), answered("no")),
    "human": VerifierCase(Human(), answered("a"), answered("b")),
    "json": VerifierCase(Json(subset={"a": 1}), answered('{"a": 1}'), answered('{"a": 2}')),
    "numeric": VerifierCase(Numeric(3, 0.5), answered("3.2"), answered("4")),
    "regex": VerifierCase(Regex("y.s"), answered("yes"), answered("no")),
}


@pytest.mark.parametrize("law", VERIFIER_LAWS, ids=lambda law: law.__name__)
@pytest.mark.parametrize("kind", CASES)
def test_verifier_keeps(law: VerifierLaw, kind: str) -> None:
    asyncio.run(law(CASES[kind]))


@pytest.mark.parametrize("law", VERIFIER_LAWS, ids=lambda law: law.__name__)
@pytest.mark.parametrize("kind", ["files", "command"])
def test_verifier_of_files_keeps(law: VerifierLaw, kind: str, bubblewrap: BubblewrapBackend, tmp_path: Path) -> None:
    """What is right and wrong stands in the artifacts, so each trace has its own fresh sandbox."""
    verifiers = {
        "files": FilesVerifier({"out": {"content": "right"}}),
        "command": CommandVerifier("grep -q right /work/out", ["/work/out"]),
    }
    for name in ("right", "wrong"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "out").write_text(name)

    async def go() -> None:
        pool, task = SandboxPool(bubblewrap, min_idle=0), Task(id="t", instruction="x")
        right, wrong = (
            fresh_boxes(task, pool, Artifacts(files={"/work/out": tmp_path / name / "out"}), name)
            for name in ("right", "wrong")
        )
        try:
            await law(VerifierCase(verifiers[kind], answered("right"), answered("wrong"), right, wrong))
        finally:
            await pool.close()

    asyncio.run(go())


CHAT = {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]}


@pytest.fixture
def stored(tmp_path: Path) -> Iterator[list[Stored]]:
    store = Store(tmp_path / "store.db")
    try:
        store.put_attempts("s", [judged(f"{n}" * 32) for n in range(1, 4)])
        yield list(read_each(store, store.every("")))
    finally:
        store.close()


@pytest.mark.parametrize("law", FORMAT_LAWS, ids=lambda law: law.__name__)
@pytest.mark.parametrize("kind", ["chat", "agentloop"])
def test_format_keeps(law: FormatLaw, kind: str, stored: list[Stored], tmp_path: Path) -> None:
    sample, folder = tmp_path / "sample.jsonl", tmp_path / "folder"
    folder.mkdir()
    if kind == "chat":
        sample.write_text("".join(json.dumps({**CHAT, "id": n}) + "\n" for n in range(3)))
    else:
        sample.write_bytes(b"".join(load_exporter("jsonl").write(stored)))
    format_ = load_formats(kind)[kind]
    assert format_.recognises(SourceFile(sample))
    law(format_, sample, folder)


@pytest.mark.parametrize("law", EXPORTER_LAWS, ids=lambda law: law.__name__)
@pytest.mark.parametrize("kind", ["jsonl", "otlp", "atif", "parquet"])
def test_exporter_keeps(law: ExporterLaw, kind: str, stored: list[Stored]) -> None:
    law(load_exporter(kind), stored)


@pytest.mark.parametrize("detector", ALL, ids=lambda detector: str(detector.name))
def test_detector_keeps(detector: object) -> None:
    """What each finds is tested beside it, on traces that have its failure."""
    empty = Reading(Task(id="t", instruction=""), answered(None), None)
    for law in (it_has_an_id, it_reads_a_trace_with_nothing_in_it):
        asyncio.run(law(detector, empty))  # type: ignore[arg-type]
