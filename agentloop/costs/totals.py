"""What experience cost: tokens, money, GPU-seconds and joules, by policy version, task, episode or model.

A price is said in one place, the tables `[[prices]]` of the settings; policies, the gateway and `agentloop costs` read
it there. What nobody knows is None and never 0: one answer of unknown price makes its episode's cost unknown, and one
such episode its group's. Energy was measured for whole stages of a loop (`energy.py`), training between their episodes
included; an episode has the share of it that it has of the episodes' wall time. List prices: `policies/litellm.py`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

from agentloop.config.sections import PriceSection
from agentloop.errors import ConfigError
from agentloop.types import Completion, Trace, Verdict

Price = Callable[[Completion], float | None]
"""An answer -> what it cost in USD; None where that is not known."""


def nobody_knows(completion: Completion) -> None:
    """The price where none is said."""
    return


def free(answer: object) -> float:
    """Of what costs nothing."""
    return 0.0


def price(own: Sequence[PriceSection], listed: Price = nobody_knows) -> Price:
    """The first known price of: the user's own tables, the cost recorded with the answer, `listed`."""

    def cost(completion: Completion) -> float | None:
        if is_refused(completion):
            return 0.0
        table = next((each for each in own if fnmatchcase(completion.model or "", each.model)), None)
        if table is not None:
            return by_table(table, completion)
        if completion.cost_usd is not None:
            return completion.cost_usd
        return listed(completion)

    return cost


def priced(completion: Completion, model: str, price: Price) -> Completion:
    """The completion with its cost, by the model's name in the answer or else in the request."""
    cost = price(completion)
    if cost is None:
        cost = price(completion.model_copy(update={"model": model}))
    return completion.model_copy(update={"cost_usd": cost})


def is_refused(completion: Completion) -> bool:
    """Whether the model had no room for the conversation, which costs nothing."""
    return completion.finish_reason == "context" and not completion.n_prompt_tokens + completion.n_completion_tokens


def unpriced(model: str | None) -> ConfigError:
    """The error of a run with a cost limit whose policy has no price."""
    return ConfigError(
        f"max_cost_usd is set, but the price of {model or 'the policy'!r} is unknown; add a table [[prices]] to "
        f'agentloop.toml, with model = "{model or "*"}", input = 0.5 and output = 1.5 (USD per million tokens; a local '
        "model's may be 0), or remove the limit"
    )


def by_table(table: PriceSection, completion: Completion) -> float | None:
    """USD; None for an answer without counts of tokens."""
    if not completion.n_prompt_tokens + completion.n_completion_tokens:
        return None
    cached = min(completion.n_cached_tokens, completion.n_prompt_tokens)
    cached_rate = table.cached
    if cached_rate is None:
        cached_rate = table.input
    fresh = (completion.n_prompt_tokens - cached) * table.input
    return (fresh + cached * cached_rate + completion.n_completion_tokens * table.output) / 1e6


def completions(trace: Trace) -> Iterator[Completion]:
    """Every answer that was asked for in a trace and below it: copied turns were paid for elsewhere.

    A call that failed is one only where somebody counted its tokens.
    """
    for step in trace.steps:
        completion = step.completion
        if not step.copied and not (step.is_broken and not completion.n_prompt_tokens + completion.n_completion_tokens):
            yield completion
    for child in trace.children:
        yield from completions(child.trace)


@dataclass(frozen=True)
class EpisodeCost:
    """What one episode took; None is unknown."""

    version: int | None
    task: str | None
    is_solved: bool
    answers: tuple[Completion, ...]
    judging_usd: float | None
    """Of judge models; 0 where none was asked."""
    gpu_s: float | None = None
    joules: float | None = None
    episode: str | None = None


def spent(trace: Trace, verdict: Verdict, energy: Mapping[str, float] = {}) -> EpisodeCost:
    """energy: `gpu_s` and `joules` of this episode, as far as they are known."""
    judging = [score.cost_usd for score in verdict.scores if score.n_prompt_tokens + score.n_completion_tokens]
    return EpisodeCost(
        version=trace.policy_version,
        task=trace.task_id,
        is_solved=verdict.reward == 1.0,
        answers=tuple(completions(trace)),
        judging_usd=total(judging),
        gpu_s=energy.get("gpu_s"),
        joules=energy.get("joules"),
        episode=trace.episode_id,
    )


@dataclass
class Sum:
    """The episodes of one version, task or model. For a model, only its own answers count."""

    n_episodes: int = 0
    n_solved: int = 0
    n_prompt_tokens: int = 0
    n_cached_tokens: int = 0
    n_completion_tokens: int = 0
    _costs: dict[str, list[float | None]] = field(default_factory=lambda: defaultdict(list))

    def add(self, episode: EpisodeCost, answers: Sequence[Completion], price: Price) -> None:
        """Add an episode. answers: those of its answers that count here."""
        self.n_episodes += 1
        self.n_solved += episode.is_solved
        self.n_prompt_tokens += sum(answer.n_prompt_tokens for answer in answers)
        self.n_cached_tokens += sum(answer.n_cached_tokens for answer in answers)
        self.n_completion_tokens += sum(answer.n_completion_tokens for answer in answers)
        usd = None
        if answers:
            usd = total(price(answer) for answer in answers)
        self._costs["usd"].append(usd)
        for name in ("judging_usd", "gpu_s", "joules"):
            self._costs[name].append(getattr(episode, name))

    def row(self) -> dict[str, Any]:
        """Figures by name."""
        totals = {name: total(self._costs[name]) for name in ("usd", "judging_usd", "gpu_s", "joules")}
        return {
            "episodes": self.n_episodes,
            "solved": self.n_solved,
            "prompt_tokens": self.n_prompt_tokens,
            "cached_tokens": self.n_cached_tokens,
            "completion_tokens": self.n_completion_tokens,
            **totals,
            "usd_per_episode": each(totals["usd"], self.n_episodes),
            "usd_per_solved": each(totals["usd"], self.n_solved),
            "joules_per_solved": each(totals["joules"], self.n_solved),
        }


def tabulate(episodes: Iterable[EpisodeCost], by: str, price: Price) -> dict[str, dict[str, Any]]:
    """Figures by `version`, `task`, `episode` or `model`, in order; `-` has those without. One episode in memory."""
    sums: dict[Any, Sum] = defaultdict(Sum)
    for episode in episodes:
        if by == "model":
            models = {answer.model for answer in episode.answers} or {None}
            parts = {name: [answer for answer in episode.answers if answer.model == name] for name in models}
        else:
            parts = {getattr(episode, by): list(episode.answers)}
        for name, answers in parts.items():
            sums[name].add(episode, answers, price)
    rows = {str(name): sums[name].row() for name in sorted(name for name in sums if name is not None)}
    if None in sums:
        rows["-"] = sums[None].row()
    return rows


def shares(stage: Mapping[str, float], n_episodes: int, duration_s: float, all_s: float) -> dict[str, float]:
    """An episode's part of its stage's measurements.

    duration_s, all_s: of the episode, and of all episodes of the stage; without times, all parts are equal.
    """
    part = 1 / n_episodes
    if all_s > 0:
        part = duration_s / all_s
    return {name: stage[name] * part for name in ("gpu_s", "joules") if name in stage}


def total(values: Iterable[float | None]) -> float | None:
    """The sum; None where one is unknown."""
    sum_: float = 0
    for value in values:
        if value is None:
            return None
        sum_ += value
    return sum_


def each(value: float | None, n: int) -> float | None:
    """The value for each of `n`; None for an unknown value or n = 0."""
    if value is None or not n:
        return None
    return value / n
