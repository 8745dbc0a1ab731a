"""Traces of a demonstrator as rows: the ids that the policy would have seen, actions masked in."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest

from agentloop.errors import TrainingError
from agentloop.policies.chat import ChatTemplate, train_tokenizer
from agentloop.policies.scripted import call_message
from agentloop.train.demonstrations import demonstration, texts
from agentloop.types import Completion, Message, Split, Step, Task, ToolResult, Trace

TASK = Task(id="t", instruction="how many?", pool="count")
CHAT = ChatTemplate(train_tokenizer(["how many? ls", "7 files"]))


def step(index: int, message: Message, *shown: str) -> Step:
    return Step(
        index=index,
        completion=Completion(message=message, finish_reason="stop"),
        results=tuple(ToolResult(call_id="call_0", name="shell", content=text, ok=True) for text in shown),
    )


def trace(*steps: Step) -> Trace:
    return Trace(
        id="tr",
        episode_id="e",
        task_id="t",
        policy_version=0,
        isolation="none",
        messages=(Message(role="user", content="how many?"),),
        steps=steps,
        started_at=datetime(2026, 1, 1, tzinfo=UTC),
    )


def mark(role: str) -> int:
    found: int | None = CHAT.tokenizer.token_to_id(f"<|{role}|>")
    assert found is not None
    return found


def test_ids_and_mask_by_hand() -> None:
    look, say = call_message("shell", command="ls"), call_message("submit", answer="7")
    sample = demonstration(TASK, trace(step(0, look, "a", "b"), step(1, say)), CHAT)
    looked = '<tool_call>{"name": "shell", "arguments": {"command": "ls"}}</tool_call>'
    said = '<tool_call>{"name": "submit", "arguments": {"answer": "7"}}</tool_call>'
    pieces = [
        ([mark("user"), *CHAT.encode("how many?"), CHAT.end, mark("assistant")], 0),
        ([*CHAT.encode(looked), CHAT.end], 1),
        ([mark("tool"), *CHAT.encode("a"), CHAT.end, mark("tool"), *CHAT.encode("b"), CHAT.end, mark("assistant")], 0),
        ([*CHAT.encode(said), CHAT.end], 1),
    ]
    assert list(sample.token_ids) == [i for ids, _ in pieces for i in ids]
    assert list(sample.action_mask) == [m for ids, m in pieces for _ in ids]
    assert sample.logprobs == (0.0,) * len(sample.token_ids)
    assert (sample.episode_id, sample.group, sample.pool, sample.policy_version) == ("e", "t", "count", 0)


def test_it_is_what_the_policy_would_be_prompted_with() -> None:
    look, say = call_message("shell", command="ls"), call_message("submit", answer="7")
    shown = trace(step(0, look, "7 files"), step(1, say))
    prompt = CHAT.prompt_ids([*shown.messages, look, Message(role="tool", content="7 files")])
    assert list(demonstration(TASK, shown, CHAT).token_ids[: len(prompt)]) == prompt


def test_sampled_tokens_are_used_as_they_were_and_last_results_left_out() -> None:
    odd = Message(role="assistant", content="ls", token_ids=(99, 98))
    sample = demonstration(TASK, trace(step(0, odd, "never read again")), CHAT)
    assert sample.token_ids[-2:] == (99, 98)
    assert sum(sample.action_mask) == 2


@pytest.mark.parametrize("split", [Split.validation, Split.heldout])
def test_a_task_that_is_not_for_training_is_refused(split: Split) -> None:
    task = TASK.model_copy(update={"split": split})
    with pytest.raises(TrainingError, match=f"task t is of split {split}; only train tasks"):
        demonstration(task, trace(step(0, call_message("submit", answer="7"))), CHAT)


def test_texts_are_everything_that_was_said() -> None:
    look = call_message("shell", command="ls")
    assert texts([trace(step(0, look, "a", "b")), trace()]) == [
        "how many?",
        '<tool_call>{"name": "shell", "arguments": {"command": "ls"}}</tool_call>',
        "a",
        "b",
        "how many?",
    ]
