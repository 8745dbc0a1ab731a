"""A project with traces of its gateway alone: no task can be run, a candidate is unproven, a canary is its way."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from agentloop.errors import ConfigError, StateError
from agentloop.loop.making import train_once
from agentloop.loop.opening import loop_backend, open_project
from agentloop.loop.trainers import make_trainer
from agentloop.progress import Silent
from agentloop.registry.moves import moves_in
from agentloop.store.feedback import TraceFeedback
from agentloop.types import Completion, Imported, Message, PolicyState, Step, StopReason, Trace
from agentloop.views.policies import version_lines

SETTINGS = """[policy]
kind = "scripted"
[train]
kind = "gepa"
[train.options]
rewriter = { kind = "scripted" }
"""


class Writer:
    """A rewriter with one text."""

    name = "writer"

    async def complete(self, messages: object, tools: object, *, max_tokens: int, seed: int) -> Completion:
        """See `protocols.Policy`."""
        text = "```\nYou keep a shop. Prices are in euros.\n```"
        return Completion(message=Message(role="assistant", content=text), finish_reason="stop")


def call(n: int) -> Imported:
    """A call of an agent behind the gateway."""
    answer = Message(role="assistant", content="It costs 5 dollars.")
    trace = Trace(
        id=f"call-{n}",
        source="gateway",
        messages=(
            Message(role="system", content="You keep a shop."),
            Message(role="user", content=f"What does {n} cost?"),
        ),
        steps=(Step(index=0, completion=Completion(message=answer, finish_reason="stop")),),
        answer=answer.content,
        stop_reason=StopReason.no_tool_call,
    )
    return Imported(trace=trace)


def test_traces_of_the_gateway_alone_give_an_unproven_candidate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "agentloop.toml").write_text(SETTINGS)
    monkeypatch.setattr("agentloop.train.trainers.gepa.rewriter_of", lambda *_: Writer())
    backend = loop_backend(tmp_path, None)
    with open_project(tmp_path, backend, Silent(), is_gated=False) as project:
        store = project.store
        store.put_imported(store.project, [call(n) for n in range(4)])
        wrong = TraceFeedback("local", 0.0, "The shop is in France.", is_self_reported=False)
        for n in range(4):
            store.put_feedback(store.project, f"call-{n}", wrong)
        version = asyncio.run(train_once(project, make_trainer(project), "source:gateway"))
        assert version is not None
        assert (version.number, version.state) == (2, PolicyState.candidate)
        assert [line.made_of.endswith("unproven") for line in version_lines(project.registry)] == [False, True]
        moves = moves_in(tmp_path, store)
        with pytest.raises(StateError, match=r"v2 is unproven: .* `agentloop policies canary v2 --share 0.1`"):
            moves.promote(2)
        moves.start_canary(2, 0.1)
        canary = project.registry.canary()
        assert canary is not None
        assert canary.number == 2
    with (
        pytest.raises(ConfigError, match=r"has no suite; .* every candidate is unproven"),
        open_project(tmp_path, backend, Silent()),
    ):
        pass
