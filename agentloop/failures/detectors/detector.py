"""A detector: what it finds, how reliable it claims to be, and how a finding becomes a labelled failure.

A function yields `Finding`s. The decorator adds a name, a version and the minimum precision. A finding of confidence
1.0 is certain. A finding below 1.0 is a candidate, which a known success refutes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import NamedTuple

from agentloop.failures.evidence import around, quote, quote_at
from agentloop.failures.reading import Reading
from agentloop.types import Failure, FailureType

LIKELY = 0.5
"""Confidence of a finding whose evidence also fits other causes."""
MIN_PRECISION = 0.9
"""Precision that most detectors guarantee for their labels."""


class Finding(NamedTuple):
    """One finding: its step, and the texts to quote. The first text that is not blank is quoted."""

    step: int | None
    texts: tuple[str | None, ...] = ()
    confidence: float = 1.0
    at: int = -1
    """Position in the first text around which to quote; -1 quotes the beginning."""
    type: FailureType | None = None
    """The failure type, if the detector distinguishes several."""
    flavour: str = ""
    """Suffix of the detector's name that distinguishes kinds of one type."""


Find = Callable[[Reading], Iterable[Finding]]


@dataclass(frozen=True, slots=True)
class Detector:
    """A callable `Reading -> failures`."""

    find: Find
    name: str
    version: str
    types: tuple[FailureType, ...]
    """The types that it can find. A finding without a type has the first one."""
    min_precision: float
    """Guaranteed precision on traces of known outcome. A detector that was measured below it is off by default."""

    @property
    def id(self) -> str:
        """The id in labels: `rules.malformed@2`."""
        return f"rules.{self.name}@{self.version}"

    def __call__(self, reading: Reading) -> list[Failure]:
        """The failures with their quotes. A success refutes uncertain findings."""
        won = reading.won
        return [
            self._failure(reading, finding) for finding in self.find(reading) if not (won and finding.confidence < 1.0)
        ]

    def _failure(self, reading: Reading, finding: Finding) -> Failure:
        words = ""
        if finding.at >= 0 and (first := next(iter(finding.texts), None)):
            words = around(first, finding.at)
        step, evidence = quote_at(reading.trace, finding.step, quote(words, *finding.texts))
        return Failure(
            type=finding.type or self.types[0],
            step=step,
            evidence=evidence,
            detector=f"rules.{self.name}{finding.flavour}@{self.version}",
            confidence=finding.confidence,
        )


def detector(
    name: str, *types: FailureType, version: str = "2", min_precision: float = MIN_PRECISION
) -> Callable[[Find], Detector]:
    """Turns a function into a Detector."""
    return lambda find: Detector(find, name, version, types, min_precision)
