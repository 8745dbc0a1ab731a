"""Which tapes a gate plays and a bank records: `--tape`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from secrets import token_bytes
from typing import Any, Literal

from agentloop.config import known_secrets
from agentloop.errors import ConfigError
from agentloop.gate.bank import Bank, Runner, bank_path
from agentloop.gate.cassette import SUFFIX, Mode, Tape, read_tape, write_tape
from agentloop.gate.outcomes import Outcome, Settings, Side
from agentloop.gate.taped import TapedTrials
from agentloop.gate.trials import PAUSES_S, Actor
from agentloop.protocols import Policy
from agentloop.store.redact import Redactor


class Tapes(StrEnum):
    """What a difference from the tape does; `off` plays none."""

    live = "live"
    stop = "stop"
    off = "off"


@dataclass(frozen=True)
class Taped:
    """The tape of one suite, and the side whose trials it is."""

    tape: Tape
    side: Side
    mode: Mode
    bank: Sequence[Outcome] = ()
    on_divergence: Literal["live", "stop"] = "live"

    def around(self, make: Callable[..., Runner], acting: Mapping[Side, Actor], suite_hash: str) -> Runner:
        """make: trials of who acts, by side; `pauses_s` is how often they try again."""
        actor = acting[self.side]

        def asking(policy: Policy) -> Runner:
            return make({self.side: replace(actor, policy=policy)}, pauses_s=())

        return TapedTrials(
            asking,
            actor.policy,
            self.tape,
            self.mode,
            identity=actor.identity,
            suite_hash=suite_hash,
            price=actor.price,
            bank=self.bank,
            on_divergence=self.on_divergence,
            pauses_s=PAUSES_S,
        )


def tape_path(bank: Path) -> Path:
    """Beside the bank."""
    return bank.with_suffix(SUFFIX)


def playing(
    found: Sequence[Any], banks: Sequence[Bank], candidates: Mapping[str, Actor], baseline: str, tapes: Tapes
) -> dict[str, Taped]:
    """Suite -> its tape, where every suite has one and the candidate is the very policy and agent that it is of.

    All or none: a visit that plays is compared with one banked trial (`cassette.py`), which is a setting of the gate.
    Whoever has changed asks other things from the first request on, and would only lose the larger bank.
    """
    paths = [tape_path(bank_path(one.evals, baseline)) for one in found]
    same = all(candidates[bank.head.suite].identity == bank.head.identity for bank in banks)
    if tapes is Tapes.off or not same or not all(path.is_file() for path in paths):
        return {}
    return {
        one.evals.name: Taped(
            read_tape(path),
            Side.candidate,
            Mode.auto,
            bank.outcomes,
            "stop" if tapes is Tapes.stop else "live",
        )
        for one, bank, path in zip(found, banks, paths, strict=True)
    }


@contextmanager
def recording(found: Any, bank: Path, project: Path, wanted: bool) -> Iterator[dict[str, Taped]]:
    """What `rolling` records while a bank is filled, and the tape on disk at the end, also of a run that was cut."""
    if not wanted:
        yield {}
        return
    if found.suite is None:
        raise ConfigError("--tape records suites of our own; Harbor tasks have none, so leave it out")
    path = tape_path(bank)
    tape = read_tape(path) if path.is_file() else Tape()
    try:
        yield {found.evals.name: Taped(tape, Side.baseline, Mode.record)}
    finally:
        write_tape(path, tape, Redactor(token_bytes(32), known_secrets(project)))


def one_a_visit(settings: Settings) -> Settings:
    """Of a gate that plays a tape. Raises ConfigError for what cannot be had with one."""
    if settings.sampling == "importance" or settings.per_visit not in (None, 1):
        raise ConfigError(
            "a tape compares each trial with the banked one of its number, so --sampling importance and --per-visit "
            "do not go with it; leave them out, or add --tape off"
        )
    return settings.model_copy(update={"per_visit": 1})
