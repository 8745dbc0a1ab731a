"""Traces from elsewhere judged: by what their source said of them, and by what is said of them later."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from agentloop.judge.rejudge import Account, rejudge
from agentloop.judge.settle import resolve
from agentloop.store.store import Store
from agentloop.types import (
    Completion,
    Imported,
    Message,
    Score,
    Step,
    StopReason,
    ToolCall,
    ToolResult,
    Trace,
)

PAID = ToolCall(id="c", name="pay_order", arguments='{"order": "7"}')
ENDED = Step(
    index=0,
    completion=Completion(message=Message(role="assistant", tool_calls=(PAID,)), finish_reason="stop"),
    results=(ToolResult(call_id="c", name="pay_order", content="paid", ok=True),),
)
ASKED = Message(role="user", content="Cancel 7.")
RUN = Trace(id="t", source="tau", messages=(ASKED,), steps=(ENDED,), stop_reason=StopReason.no_tool_call)
EXPECTED = {"task": {"actions": [{"name": "cancel_order", "kwargs": {"order": "7"}}]}}


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    made = Store(tmp_path / "store.db")
    yield made
    made.close()


def put(store: Store, reward: float | None, **changed: object) -> None:
    scores = () if reward is None else (Score(verifier="tau:reward", version="1", value=reward),)
    store.put_imported(
        "default", [Imported(trace=RUN.model_copy(update=changed), scores=scores, raw={"info": EXPECTED})]
    )


def again(store: Store) -> Account:
    return asyncio.run(rejudge(store, {}))


def known(store: Store) -> tuple[str, float | None, str | None]:
    row = store.row("default", "t")
    return row.reward_state, row.reward, row.failure


def test_what_its_source_said_decides_and_explains(store: Store) -> None:
    """It expected another call, which only the source knows; a plain reading of the steps would not find that."""
    put(store, 0.0)
    account = again(store)
    assert (account.n, account.n_relabelled, account.changed) == (1, 1, {"unscored -> scored": 1})
    assert known(store) == ("scored", 0.0, "call.wrong_arguments")
    [failure] = store.verdict("default", "t").failures
    assert (failure.detector, failure.evidence, failure.critical) == (
        "rules.expected.unexpected_tool@1", PAID.arguments, True,
    )  # fmt: skip
    assert again(store).n_same == 1


def test_a_success_and_one_that_nobody_scored_have_no_failure(store: Store) -> None:
    put(store, 1.0)
    again(store)
    assert known(store) == ("scored", 1.0, None)
    put(store, None, id="u")
    again(store)
    assert (store.row("default", "u").reward_state, store.row("default", "u").failure) == ("unscored", None)


def test_a_number_that_comes_later_counts_and_a_person_stands_above_it(store: Store) -> None:
    put(store, None)
    again(store)
    store.put_score("default", "t", Score(verifier="tau:reward", version="1", value=0.0))
    assert again(store).n_same == 0
    assert known(store) == ("scored", 0.0, "call.wrong_arguments")
    resolve(store, "default", "t", 1.0, by="ann", why="it was paid already")
    again(store)
    assert known(store) == ("scored", 1.0, None)
    verdict = resolve(store, "default", "t", 0.0, by="ann", why="it was not")
    assert verdict.critical is not None
    assert verdict.critical.detector == "rules.expected.unexpected_tool@1"


def test_one_that_names_an_episode_is_no_episode_of_ours(store: Store) -> None:
    put(store, 0.0, episode_id="e-7")
    assert again(store).n == 1
    assert known(store)[:2] == ("scored", 0.0)
