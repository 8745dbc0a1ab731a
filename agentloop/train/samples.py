"""Trace -> Sample: which tokens were sampled, with what probability, and what came of them.

A row is made only from what was stored at capture time. What cannot be trained is counted by its
reason, never dropped in silence: the caller gets the counts and shows them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from itertools import pairwise

from agentloop.types import Attempt, RewardState, Sample, Split, Task, Trace, Verdict


def build_samples(attempts: Iterable[Attempt], *, temperature: float) -> tuple[list[Sample], Counter[str]]:
    """(trainable rows, why the others were left out -> how many).

    Raises nothing for a bad row. A held-out or validation task is refused whatever it scored.
    """
    samples: list[Sample] = []
    dropped: Counter[str] = Counter()
    for attempt in attempts:
        reason = _unfit(attempt.task, attempt.trace, attempt.verdict)
        if reason:
            dropped[reason] += 1
        else:
            samples.append(_row(attempt, temperature))
    return samples, dropped


def _unfit(task: Task, trace: Trace, verdict: Verdict) -> str | None:
    if task.split is not Split.train:
        return f"split_{task.split}"
    if verdict.state is not RewardState.scored:
        return str(verdict.state)
    steps = trace.answered
    if not steps:
        return "no_steps"
    for before, after in pairwise(steps):
        seen = before.completion.prompt_token_ids + before.completion.message.token_ids
        if after.completion.prompt_token_ids[: len(seen)] != seen:
            return "tokens_diverge"
    if any(len(s.completion.logprobs) != len(s.completion.message.token_ids) for s in steps):
        return "no_logprobs"
    if not any(s.completion.message.token_ids for s in steps):
        return "no_token_ids"
    return None


def _row(attempt: Attempt, temperature: float) -> Sample:
    """The last prompt extends all earlier ones (checked above), so one row holds the whole episode."""
    episode = attempt.episode
    trace = attempt.trace
    last = trace.answered[-1].completion
    ids = [*last.prompt_token_ids, *last.message.token_ids]
    mask = [0] * len(ids)
    logprobs = [0.0] * len(ids)
    for step in trace.answered:
        start = len(step.completion.prompt_token_ids)
        for offset, logprob in enumerate(step.completion.logprobs):
            mask[start + offset] = 1
            logprobs[start + offset] = logprob
    return Sample(
        episode_id=episode.id,
        group=episode.group,
        pool=attempt.task.pool,
        policy_version=episode.policy_version,
        token_ids=tuple(ids),
        action_mask=tuple(mask),
        logprobs=tuple(logprobs),
        temperature=temperature,
        reward=attempt.verdict.reward or 0.0,
    )
