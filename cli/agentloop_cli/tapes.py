"""Which tapes a gate plays and a bank records: `--tape`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from secrets import token_bytes
from typing import Any, Literal

from agentloop.config.settings import known_secrets
from agentloop.errors import ConfigError
from agentloop.gate.bank import Bank, Runner, bank_path
from agentloop.gate.environment import Environment
from agentloop.gate.outcomes import Outcome, Settings, Side
from agentloop.gate.taped import TapedTrials, refusal
from agentloop.gate.trials import PAUSES_S
from agentloop.protocols import Policy
from agentloop.recordings.answers import SUFFIX, Mode, Tape, read_tape, write_tape
from agentloop.rollout.actors import Actor
from agentloop.store.redact import Redactor
from agentloop_cli.render import stderr


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
    environment: Environment | None = None
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
            identity=actor.identity.hash,
            suite_hash=suite_hash,
            price=actor.price,
            environment=self.environment,
            bank=self.bank,
            on_divergence=self.on_divergence,
            pauses_s=PAUSES_S,
        )


def tape_path(bank: Path) -> Path:
    """Beside the bank."""
    return bank.with_suffix(SUFFIX)


def playing(
    found: Sequence[Any],
    banks: Sequence[Bank],
    candidates: Mapping[str, Actor],
    environments: Mapping[str, Environment],
    baseline: str,
    tapes: Tapes,
) -> dict[str, Taped]:
    """Suite -> its tape, where every suite has one that may be played for the candidate; says why where it may not.

    All or none: a visit that plays is compared with one banked trial (`cassette.py`), which is a setting of the gate.
    A changed candidate asks other things from the first request on, and would only lose the larger bank.
    """
    paths = [tape_path(bank_path(one.evals, baseline)) for one in found]
    if tapes is Tapes.off or not all(path.is_file() for path in paths):
        return {}
    for bank, path in zip(banks, paths, strict=True):
        acting = candidates[bank.head.suite].identity
        why = refusal(bank.head, acting)
        if why is None and (changed := bank.head.difference(acting)) is not None:
            why = f"the candidate is another version than was recorded (changed: {changed})"
        if why is not None:
            stderr.print(f"note: {path} is not played: {why}", markup=False, soft_wrap=True)
            return {}
    return {
        one.evals.name: Taped(
            read_tape(path),
            Side.candidate,
            Mode.auto,
            environments[one.evals.name],
            bank.outcomes,
            "stop" if tapes is Tapes.stop else "live",
        )
        for one, bank, path in zip(found, banks, paths, strict=True)
    }


@contextmanager
def recording(
    found: Any, bank: Path, project: Path, wanted: bool, actor: Actor, environment: Environment
) -> Iterator[dict[str, Taped]]:
    """What `rolling` records while a bank is filled, and the tape on disk at the end, also of a run that was cut."""
    if not wanted:
        yield {}
        return
    if found.suite is None:
        raise ConfigError("--tape records suites of our own; Harbor tasks have none, so leave it out")
    if actor.identity.unhashed:
        raise ConfigError(
            f"--tape: a recording is played only where every part has a content hash, and {actor.identity.unhashed[0]} "
            "has none; leave --tape out"
        )
    path = tape_path(bank)
    tape = read_tape(path) if path.is_file() else Tape()
    try:
        yield {found.evals.name: Taped(tape, Side.baseline, Mode.record, environment)}
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
