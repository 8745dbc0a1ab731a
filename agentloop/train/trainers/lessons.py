"""Lessons: short notes from a failure that a later attempt at the same task fixed.

Each is tried on the validation tasks, one after another, and stays where what it gains there pays for its tokens.
Which few of them a conversation gets is decided by text (`overlays.LessonIndex`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean

from agentloop.train.trainers.evaluations import BudgetSpent, Evaluations
from agentloop.train.trainers.feedback import MAX_WORDS, evidence_of, transcript
from agentloop.train.trainers.rewriting import LESSON, Rewriter
from agentloop.types import Attempt, Lesson

REWARD_PER_TOKEN = 1e-4
"""Mean reward that a token in every conversation must bring: a hundred tokens cost a point."""
CHARACTERS_PER_TOKEN = 4
MIN_TASKS = 2
"""Validation tasks, wins less losses, that a lesson must bring: one may be luck."""


async def learn_lessons(
    evaluations: Evaluations, rewriter: Rewriter, texts: Mapping[str, str], indices: Sequence[int], n: int
) -> tuple[list[Lesson], int]:
    """(lessons that pay for their tokens, how many others were tried). n: lessons tried at most.

    texts: of the version that gets them. indices: validation tasks. Ends early where the budget does.
    """
    lessons: list[Lesson] = []
    n_dropped = 0
    best = fmean(await evaluations.validate(evaluations.overlay(texts), indices))
    try:
        for failed, fixed in _pairs(evaluations.attempts)[:n]:
            if best >= 1 or rewriter.is_silent:
                break
            answer = await rewriter.lesson(_request(failed, fixed))
            evaluations.note_rewriting(rewriter.spent_usd)
            if answer is None:
                continue
            lesson = Lesson(applies_to=answer[0], text=answer[1], traces=(failed.trace.id, fixed.trace.id))
            mean = fmean(await evaluations.validate(evaluations.overlay(texts, [*lessons, lesson]), indices))
            price = REWARD_PER_TOKEN * len(lesson.text) / CHARACTERS_PER_TOKEN
            if mean - best > price and (mean - best) * len(indices) > MIN_TASKS - 0.5:
                lessons.append(lesson)
                best = mean
            else:
                n_dropped += 1
    except BudgetSpent:
        pass  # the lessons so far are tried ones
    return lessons, n_dropped


def _pairs(attempts: Sequence[Attempt]) -> list[tuple[Attempt, Attempt]]:
    """(a failed attempt, a later one at its task that succeeded), one of each kind of failure."""
    failed: dict[str, Attempt] = {}
    pairs: dict[tuple[str, str], tuple[Attempt, Attempt]] = {}
    for attempt in attempts:
        reward = attempt.verdict.reward
        before = failed.get(attempt.task.id)
        if reward is not None and reward < 1:
            failed.setdefault(attempt.task.id, attempt)
        elif before is not None:
            evidence = evidence_of(before, {})
            pairs.setdefault((evidence[0].type, evidence[0].quotes[0]), (before, attempt))
    return list(pairs.values())


def _request(failed: Attempt, fixed: Attempt) -> str:
    instruction = f"| {failed.task.instruction[:MAX_WORDS]}"
    return LESSON.format(instruction=instruction, failed=transcript(failed), fixed=transcript(fixed))
