"""A detector: what it finds, how sure it claims to be, and how a finding becomes a labelled failure.

A function yields `Finding`; the decorator gives it a name, a version and the precision below which it is
not worth having. A finding of confidence 1.0 is the detector's word; below that it is a candidate,
which a known success refutes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import NamedTuple

from agentloop.failures.evidence import around, quote, quote_at
from agentloop.failures.reading import Reading
from agentloop.types import Failure, FailureType

LIKELY = 0.5
"""Confidence of a finding whose evidence fits other causes too."""
MIN_PRECISION = 0.9
"""What most detectors promise of their labels."""


class Finding(NamedTuple):
    """One finding: where, and the texts of which the first that says something is quoted."""

    step: int | None
    texts: tuple[str | None, ...] = ()
    confidence: float = 1.0
    at: int = -1
    """Place in the first text around which it is quoted; -1 quotes the beginning."""
    type: FailureType | None = None
    """When the detector decides between several."""
    flavour: str = ""
    """Part of the detector's name, where it tells kinds of one type apart."""


Find = Callable[[Reading], Iterable[Finding]]


@dataclass(frozen=True, slots=True)
class Detector:
    """Callable as `Reading -> failures`."""

    find: Find
    name: str
    version: str
    types: tuple[FailureType, ...]
    """What it can find; the first unless a finding says otherwise."""
    min_precision: float
    """Of its labels on traces of known outcome; where it is measured lower, the detector is off by default."""

    @property
    def id(self) -> str:
        """As in a label: `rules.malformed@2`."""
        return f"rules.{self.name}@{self.version}"

    def __call__(self, reading: Reading) -> list[Failure]:
        """The failures, with quotes. A success refutes an uncertain finding."""
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
    """Makes a Detector of a function."""
    return lambda find: Detector(find, name, version, types, min_precision)
