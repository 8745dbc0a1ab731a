"""Traces to rows: tokens in, tokens out, and a reason for everything that is left out."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest

from agentloop.train.advantages import with_advantages
from agentloop.train.samples import build_samples
from agentloop.types import (
    Attempt,
    Completion,
    Episode,
    Message,
    Purpose,
    RewardState,
    Split,
    Step,
    Task,
    Trace,
    Verdict,
)

Turn = tuple[tuple[int, ...], tuple[int, ...], tuple[float, ...]]
"""(prompt ids, sampled ids, log-probabilities) of one step."""

TURNS: list[Turn] = [
    ((1, 2, 3), (10, 11), (-0.1, -0.2)),
    ((1, 2, 3, 10, 11, 4, 5), (12,), (-0.3,)),
    ((1, 2, 3, 10, 11, 4, 5, 12, 6), (13, 14, 15), (-0.4, -0.5, -0.6)),
]


def judged(
    turns: list[Turn] | None = None,
    *,
    reward: float | None = 1.0,
    state: RewardState = RewardState.scored,
    split: Split = Split.train,
    group: str = "g",
) -> Attempt:
    """One judged episode of these turns."""
    steps = tuple(
        Step(
            index=index,
            completion=Completion(
                message=Message(role="assistant", token_ids=ids),
                finish_reason="stop",
                prompt_token_ids=prompt,
                logprobs=logprobs,
            ),
        )
        for index, (prompt, ids, logprobs) in enumerate(TURNS if turns is None else turns)
    )
    task = Task(id="t", instruction="", split=split, pool="sums")
    episode = Episode(id="e", task_id="t", group=group, purpose=Purpose.train, policy_version=7, seed=0)
    trace = Trace(
        id="tr",
        episode_id="e",
        task_id="t",
        policy_version=7,
        isolation="none",
        messages=(),
        steps=steps,
        started_at=datetime(2026, 1, 1, tzinfo=UTC),
    )
    verdict = Verdict(trace_id="tr", state=state, reward=reward)
    return Attempt(task=task, episode=episode, trace=trace, verdict=verdict)


def test_one_row_holds_the_whole_episode_as_it_was_sampled() -> None:
    (sample,), dropped = build_samples([judged(reward=0.75)], temperature=0.7)
    assert not dropped
    assert sample.token_ids == (1, 2, 3, 10, 11, 4, 5, 12, 6, 13, 14, 15)
    assert sample.action_mask == (0, 0, 0, 1, 1, 0, 0, 1, 0, 1, 1, 1)
    assert sample.logprobs == (0.0, 0.0, 0.0, -0.1, -0.2, 0.0, 0.0, -0.3, 0.0, -0.4, -0.5, -0.6)
    assert (sample.episode_id, sample.group, sample.pool, sample.policy_version) == ("e", "g", "sums", 7)
    assert (sample.temperature, sample.reward, sample.advantage) == (0.7, 0.75, 0.0)


DIVERGED: list[list[Turn]] = [
    # A prompt token, a sampled token, and the prompt's length changed between two turns.
    [TURNS[0], ((1, 9, 3, 10, 11, 4, 5), (12,), (-0.3,))],
    [TURNS[0], ((1, 2, 3, 10, 99, 4, 5), (12,), (-0.3,))],
    [TURNS[0], ((1, 2, 3, 10), (12,), (-0.3,))],
    [*TURNS[:2], ((1, 2, 3, 10, 11, 4, 5, 99, 6), (13,), (-0.4,))],
]


@pytest.mark.parametrize("turns", DIVERGED)
def test_a_conversation_that_was_tokenised_anew_is_left_out(turns: list[Turn]) -> None:
    assert build_samples([judged(turns)], temperature=1.0) == ([], {"tokens_diverge": 1})


@pytest.mark.parametrize(
    ("turns", "reason"),
    [
        ([], "no_steps"),
        ([((1,), (2, 3), ())], "no_logprobs"),
        ([((1,), (2, 3), (-0.1,))], "no_logprobs"),
        ([((), (), ())], "no_token_ids"),
    ],
)
def test_what_cannot_be_trained_is_counted_by_its_reason(turns: list[Turn], reason: str) -> None:
    assert build_samples([judged(turns)], temperature=1.0) == ([], {reason: 1})


@pytest.mark.parametrize("split", [Split.validation, Split.heldout])
def test_only_train_tasks_train(split: Split) -> None:
    samples, dropped = build_samples([judged(split=split), judged()], temperature=1.0)
    assert len(samples) == 1
    assert dropped == {f"split_{split.value}": 1}


@pytest.mark.parametrize("state", [s for s in RewardState if s is not RewardState.scored])
def test_only_scored_rewards_train(state: RewardState) -> None:
    assert build_samples([judged(state=state, reward=None)], temperature=1.0) == ([], {state.value: 1})


def test_an_infrastructure_failure_is_in_neither_batch_nor_baseline() -> None:
    broken = judged(state=RewardState.infra_failed, reward=None)
    samples, dropped = build_samples(
        [judged(reward=1.0), broken, judged(reward=0.0), broken, judged(reward=0.0)], temperature=1.0
    )
    assert dropped == {"infra_failed": 2}
    useful, flat = with_advantages(samples)
    assert not flat
    # Mean 1/3 of three rewards; with two zeros for the failures it would be 1/5.
    spread = 3**-0.5 + 1e-4
    assert [s.advantage for s in useful] == pytest.approx([2 / 3 / spread, -1 / 3 / spread, -1 / 3 / spread])


def test_an_empty_last_turn_keeps_the_actions_before_it() -> None:
    full = ((1, 2, 3, 10, 11, 4), (), ())
    (sample,), dropped = build_samples([judged([TURNS[0], full])], temperature=1.0)
    assert not dropped
    assert sample.token_ids == (1, 2, 3, 10, 11, 4)
    assert sample.action_mask == (0, 0, 0, 1, 1, 0)


def of_steps(attempt: Attempt, *steps: Step) -> Attempt:
    return attempt.model_copy(update={"trace": attempt.trace.model_copy(update={"steps": steps})})


def test_a_call_that_broke_off_is_left_out() -> None:
    """The row is the one without it; a run of nothing else has no row."""
    whole = judged([*TURNS, (TURNS[2][0], (21, 22), (-0.7, -0.8))])
    *steps, last = whole.trace.steps
    broken = last.model_copy(update={"completion": last.completion.model_copy(update={"finish_reason": "broken"})})
    cut = of_steps(whole, *steps, broken)
    assert build_samples([cut], temperature=1.0) == build_samples([judged()], temperature=1.0)
    alone = of_steps(whole, broken)
    assert build_samples([alone], temperature=1.0) == ([], {"no_steps": 1})
