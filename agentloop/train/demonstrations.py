"""Stored traces -> rows to imitate, in the tokens of the policy that learns from them.

A demonstrator has no tokens of its own (it is a program, or another model), so its words are
encoded here, once. Rows that a policy sampled itself are made in `samples.py` from their own ids.
"""

from __future__ import annotations

from collections.abc import Iterable

from agentloop.errors import TrainingError
from agentloop.policies.chat import ChatTemplate, render
from agentloop.types import Message, Sample, Split, Task, Trace


def demonstration(task: Task, trace: Trace, chat: ChatTemplate) -> Sample:
    """One row: the conversation as `chat` would have shown it, actions masked in.

    Raises TrainingError for a validation or held-out task, whatever was shown.
    """
    if task.split is not Split.train:
        raise TrainingError(f"task {task.id} is of split {task.split}; only train tasks may be demonstrated")
    ids = chat.prompt_ids(trace.messages)
    mask = [0] * len(ids)
    for step, following in zip(trace.answered, [*trace.answered[1:], None], strict=True):
        action = chat.message_ids(step.completion.message)
        ids += action
        mask += [1] * len(action)
        if following:
            seen = chat.prompt_ids([Message(role="tool", content=r.content) for r in step.results])
            ids += seen
            mask += [0] * len(seen)
    return Sample(
        episode_id=trace.episode_id or trace.id,
        group=task.id,
        pool=task.pool,
        policy_version=trace.policy_version or 0,
        token_ids=tuple(ids),
        action_mask=tuple(mask),
        logprobs=(0.0,) * len(ids),
        temperature=1.0,
        reward=0.0,
    )


def texts(traces: Iterable[Trace]) -> list[str]:
    """Everything said in `traces`: what a tokenizer is made from."""
    contents: list[str] = []
    for trace in traces:
        contents += [message.content for message in trace.messages]
        for step in trace.steps:
            contents.append(render(step.completion.message))
            contents += [result.content for result in step.results]
    return contents
