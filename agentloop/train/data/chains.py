"""A trace with its sub-agents -> rows: its turns, cut into chains in which each prompt begins with the ids before it.

Only recorded ids are used. Where a prompt does not go on from any answer (the template dropped reasoning, the context
was compacted, a sub-agent began), a new row begins; the ids of earlier answers in its prompt are context there, because
another row trains them. Traces without ids are a matter of `text_rows.py`.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from agentloop.train.data.admission import Admission, has_mark
from agentloop.train.data.exclusions import Exclusion
from agentloop.train.data.row import Ids, Row, Turn
from agentloop.types import Completion, Judged, Step, Trace

ANYTHING = Admission()


class Cut(NamedTuple):
    """Rows, and the count of what is in none of them."""

    rows: list[Row]
    excluded: Counter[str]
    """`Exclusion` -> trajectories that are refused whole, and turns that are refused within others."""
    tokens: Counter[str]
    """`Exclusion` -> sampled tokens of those: with the masked ones of the rows, all that the traces have."""


class _Answer(NamedTuple):
    trace: str
    step: int
    version: int | None
    done: Completion
    temperature: float
    prompt: bytes
    """Ids of the prompt, as int32."""
    ids: bytes
    """Those of prompt and answer."""


def rows_of(judged: Judged, admission: Admission = ANYTHING) -> Cut:
    """The rows of one trajectory, in the order of their first turns, and what could not be trained.

    A sampled token is masked in exactly one row. A chain is cut where the temperature changes, because a row has one.
    """
    cut = Cut([], Counter(), Counter())
    reason = admission.refusal(judged)
    steps = list(steps_of(judged.trace))
    if reason is None and not steps:
        reason = Exclusion.no_turns
    if reason is None and not any(step.completion.message.token_ids or is_redacted for _, step, is_redacted in steps):
        reason = Exclusion.no_token_ids
    if reason is not None:
        cut.excluded[reason] += 1
        cut.tokens[reason] += sum(n_sampled(step) for _, step, _ in steps)
        return cut
    answers = list(_admitted(steps, admission, judged.trace.policy_version, cut))
    cut.rows.extend(_row(judged, chain, admission) for chain in _chains(answers))
    return cut


def rows_of_all(traces: Iterable[Judged], admission: Admission = ANYTHING) -> Cut:
    """The rows of many trajectories."""
    whole = Cut([], Counter(), Counter())
    for judged in traces:
        cut = rows_of(judged, admission)
        whole.rows.extend(cut.rows)
        whole.excluded.update(cut.excluded)
        whole.tokens.update(cut.tokens)
    return whole


def steps_of(trace: Trace) -> Iterator[tuple[Trace, Step, bool]]:
    """(trace, step, whether the policy had read redacted text by then) of a trace, then of its sub-agents."""
    is_redacted = has_mark(trace.messages)
    for step in trace.steps:
        # The results come after the answer, so they concern the steps that follow.
        is_redacted = is_redacted or has_mark((*step.context, *step.heard, step.completion.message))
        yield trace, step, is_redacted
        is_redacted = is_redacted or has_mark((), step)
    for child in trace.children:
        yield from steps_of(child.trace)


def n_sampled(step: Step) -> int:
    """Tokens of a step's answer: its ids, or as many as the endpoint counted."""
    return len(step.completion.message.token_ids) or step.completion.n_completion_tokens


def _admitted(
    steps: Iterable[tuple[Trace, Step, bool]], admission: Admission, version: int | None, cut: Cut
) -> Iterator[_Answer]:
    """The answers that train; the others are counted in `cut`."""
    for trace, step, is_redacted in steps:
        done = step.completion
        reason = admission.refusal_of_turn(step)
        if reason is None and is_redacted:
            reason = Exclusion.redacted
        reason = reason or admission.refusal_of_tokens(done)
        if reason is not None:
            cut.excluded[reason] += 1
            cut.tokens[reason] += n_sampled(step)
            continue
        prompt = np.array(done.prompt_token_ids, np.int32).tobytes()
        ids = prompt + np.array(done.message.token_ids, np.int32).tobytes()
        number = version if trace.policy_version is None else trace.policy_version
        yield _Answer(trace.id, step.index, number, done, admission.temperature_of(done), prompt, ids)


def _chains(answers: Sequence[_Answer]) -> list[list[_Answer]]:
    """Each answer in one chain. It goes on from the answer with the most ids that its prompt begins with.

    Interleaved conversations keep apart, because any earlier answer may be the one, and not the last alone. Where two
    prompts go on from one answer, the first of them has its chain.
    """
    by_length: defaultdict[int, list[int]] = defaultdict(list)
    for n, answer in enumerate(answers):
        by_length[len(answer.ids)].append(n)
    lengths = sorted(by_length, reverse=True)
    following: dict[int, int] = {}
    first: list[int] = []
    for n, answer in enumerate(answers):
        before = _before(answer, answers, by_length, lengths)
        open_ends = [m for m in before if m not in following and answers[m].temperature == answer.temperature]
        if open_ends:
            following[open_ends[0]] = n
        else:
            first.append(n)
    return [[answers[n] for n in _followed(start, following)] for start in first]


def _before(
    answer: _Answer, answers: Sequence[_Answer], by_length: dict[int, list[int]], lengths: Sequence[int]
) -> list[int]:
    """The answers with the most ids that this one's prompt begins with: several where they are equal."""
    for length in lengths:
        if length <= len(answer.prompt):
            before = [n for n in by_length[length] if answer.prompt.startswith(answers[n].ids)]
            if before:
                return before
    return []


def _followed(start: int, following: dict[int, int]) -> Iterator[int]:
    at: int | None = start
    while at is not None:
        yield at
        at = following.get(at)


def _row(judged: Judged, chain: Sequence[_Answer], admission: Admission) -> Row:
    """The last prompt begins with all that came before it, so it holds the whole chain."""
    ids: Ids = np.frombuffer(chain[-1].ids, np.int32)
    mask = np.zeros(len(ids), np.bool_)
    logprobs = np.zeros(len(ids), np.float32)
    turns = []
    for answer in chain:
        start = len(answer.done.prompt_token_ids)
        end = start + len(answer.done.message.token_ids)
        mask[start:end] = True
        if admission.logprobs:
            logprobs[start:end] = answer.done.logprobs
        turns.append(Turn(start, end, answer.trace, answer.step, answer.version))
    return Row(
        trajectory=judged.trace.id,
        group=judged.group,
        task=judged.task.id if judged.task is not None else judged.trace.task_id,
        pool=judged.pool,
        token_ids=ids,
        action_mask=mask,
        logprobs=logprobs if admission.logprobs else None,
        temperature=chain[0].temperature,
        turns=tuple(turns),
        reward=judged.verdict.reward,
    )
