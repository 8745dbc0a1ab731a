"""Model cassettes: the answers of a bank's trials, kept so that a candidate that asks the same pays nothing.

    evals/NAME/baseline/REF.tape.jsonl     exchanges (`exchanges.py`): each message once, then each trial's answers

An answer is found by everything that decides it (`request_key`), within one trial of one task: K trials stay K
different answers, whatever their seeds. Conversations go along with the recorded one up to the first difference, and
are the policy's own from there. This is a coupling of the candidate with one banked trial, so four things hold it up:

- The comparison is with that same trial alone, whether it played to its end or diverged: a gate of one banked trial a
  visit. To compare those that diverge with others of the bank is biased: they are the ones that go another way.
- A divergence goes on from where it happened. To start the episode anew would drop the prefixes that diverge.
- The identity stands for the answers' distribution. A name behind which weights or code change is no identity, so a
  tape is played for the same contents alone (`taped.refusal`).
- What ran is judged. Equal requests do not prove equal ends: the last action's result is in no request. Nothing has to
  run only where task, version and environment are as they were (`PolicyRecording.covers`).

Sandboxes are not recorded here (`sandboxes.py`): where tools run, a result that differs is a difference of the next
request. Neither is what only training needs. A conversation that goes live sees marks where answers had secrets.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any, Literal

import orjson
from pydantic import Field, ValidationError

from agentloop.errors import ConfigError, UpstreamUnavailable
from agentloop.output_files import write_text
from agentloop.protocols import Policy
from agentloop.recordings.exchanges import Exchange, Replies, read_exchanges
from agentloop.recordings.traces import difference
from agentloop.store.redact import Redactor
from agentloop.types import Completion, Frozen, Message, ToolSpec, content_hash
from agentloop.version import __version__

SUFFIX = ".tape.jsonl"
MESSAGE = "message"
SETTING = "setting"
ANSWER = "answer"
"""Kinds of exchanges: a message of conversations, what a trial ran under, an answer in it."""
UNKEPT = {"message", "prompt_token_ids", "logprobs"}
"""Of a completion: said elsewhere, or of use to training only."""


class Mode(StrEnum):
    """Who answers."""

    live = "live"
    """The policy."""
    record = "record"
    """The policy, and its answers are kept."""
    replay = "replay"
    """The tape alone; nothing is ever asked of the policy."""
    auto = "auto"
    """The tape up to the first difference, then the policy to the episode's end."""


class Diverged(UpstreamUnavailable):
    """A request that the tape has no answer to, where nobody else may be asked."""


class RecordedAnswer(Frozen):
    """One answer, and the request that it was given to."""

    request: str
    """Its key."""
    heard: tuple[str, ...]
    """Ids of the request's messages."""
    answered: str
    """Id of the answer's message."""
    completion: Completion


class RecordedAttempt(Frozen):
    """One finished episode's answers, in the order in which they were given."""

    setting: str
    """Hash of everything that decides the episode; see `setting_hash`."""
    answers: tuple[RecordedAnswer, ...] = Field(min_length=1)


@dataclass
class PolicyRecording:
    """The answers of one policy to the trials of a suite."""

    messages: dict[str, Message] = field(default_factory=dict)
    """By id; as they were, or as they were redacted."""
    trials: dict[tuple[str, int], RecordedAttempt] = field(default_factory=dict)
    """By (task id, number of the trial in the bank)."""

    def covers(self, task_id: str, trial: int, setting: str) -> bool:
        """Whether the trial need not be run: it is on the tape, and all that decides it is as it was."""
        attempt = self.trials.get((task_id, trial))
        return attempt is not None and attempt.setting == setting

    def keep(self, taped: RecordingPolicy, setting: str) -> None:
        """Take over what a finished episode recorded, in place of what the trial had. One that broke is not kept."""
        if taped.recorded:
            self.messages |= taped.heard
            self.trials[taped.task_id, taped.trial] = RecordedAttempt(setting=setting, answers=tuple(taped.recorded))


class RecordingPolicy:
    """A policy for one episode: one trial of one task. See `protocols.Policy`."""

    def __init__(
        self,
        policy: Policy,
        recording: PolicyRecording,
        task_id: str,
        trial: int,
        *,
        identity: str,
        mode: Mode,
        on_divergence: Literal["live", "stop"] = "live",
    ) -> None:
        """identity: hash of whatever decides the policy's answers: weights or model, endpoint, sampling, source.

        on_divergence: what a difference does in the mode `auto`.
        """
        self.name = policy.name
        self.task_id = task_id
        self.trial = trial
        self.mode = mode
        self.diverged: str | None = None
        """The first difference from the tape, for a person; None while there is none."""
        self.played: list[Completion] = []
        """As they were recorded, tokens and price included: an agent's own limits must bite where they did."""
        self.n_live = 0
        self.recorded: list[RecordedAnswer] = []
        self.heard: dict[str, Message] = {}
        self._policy = policy
        self._identity = identity
        self._recording = recording
        self.stops = mode is Mode.replay or (mode is Mode.auto and on_divergence == "stop")
        """Whether a difference ends the episode."""
        self._ids: dict[str, str] = {}
        """Id of an answer as it was played -> as it was recorded: they differ where a secret was redacted."""
        self._seen: dict[int, tuple[Message, str]] = {}
        self._answers: tuple[RecordedAnswer, ...] = ()
        if mode in (Mode.replay, Mode.auto) and (attempt := recording.trials.get((task_id, trial))):
            self._answers = attempt.answers
        self._replies = Replies((answer.request, answer) for answer in self._answers)

    @property
    def whole(self) -> bool:
        """Whether every answer came from the tape, and all of the tape's were asked for."""
        return bool(self.played) and self.diverged is None and self.n_live == 0 and self._replies.is_used_up

    async def complete(
        self, messages: Sequence[Message], tools: Sequence[ToolSpec], *, max_tokens: int, seed: int
    ) -> Completion:
        """See `protocols.Policy`. Raises Diverged where nobody else may be asked."""
        ids = [self._id(message) for message in messages]
        key = request_key(self._identity, ids, tools, max_tokens)
        if self.mode in (Mode.replay, Mode.auto):
            answer = self._replies.next(key) if self.diverged is None else None
            if answer is not None:
                return self._play(answer)
            self.diverged = self.diverged or self._why(key, ids, messages)
            if self.stops:
                raise Diverged(
                    f"task {self.task_id!r}, trial {self.trial}: {self.diverged}; ask the policy from there "
                    "(mode 'auto'), or record the bank again"
                )
        self.n_live += 1
        done = await self._policy.complete(messages, tools, max_tokens=max_tokens, seed=seed)
        if self.mode is Mode.record:
            answered = message_id(done.message)
            self.heard |= {**dict(zip(ids, messages, strict=True)), answered: done.message}
            self.recorded.append(RecordedAnswer(request=key, heard=tuple(ids), answered=answered, completion=done))
        return done

    def _play(self, answer: RecordedAnswer) -> Completion:
        self.played.append(answer.completion)
        self._ids[message_id(answer.completion.message)] = answer.answered
        return answer.completion

    def _id(self, message: Message) -> str:
        """As it was recorded. Agents hand the same messages over turn after turn, and hashing them takes its time."""
        entry = self._seen.get(id(message))
        if entry is None or entry[0] is not message:
            content_id = message_id(message)
            entry = self._seen[id(message)] = (message, self._ids.get(content_id, content_id))
        return entry[1]

    def _why(self, key: str, heard: Sequence[str], messages: Sequence[Message]) -> str:
        if not self._answers:
            return "the tape has no such trial"
        if self._replies.n_recorded(key):
            return "the same request was asked more often than it was recorded"
        messages_by_id = self._recording.messages
        if any(answer.heard == tuple(heard) for answer in self._answers):
            return "the same conversation, and another policy, other settings or other tools"
        conversations = [[messages_by_id[i] for i in (*answer.heard, answer.answered)] for answer in self._answers]
        return difference(sorted(conversations, key=len, reverse=True), messages)  # of equally near ones, what went on


def message_id(message: Message) -> str:
    """32 hex digits of the whole message, with what was thought and sampled: policies may read those, too."""
    return hashlib.sha256(message.model_dump_json().encode()).hexdigest()[:32]


def request_key(identity: str, heard: Sequence[str], tools: Sequence[ToolSpec], max_tokens: int) -> str:
    """32 hex digits of everything that decides the distribution of an answer; no seed is among it.

    heard: ids of the messages, before any redaction.
    """
    offered = [tool.model_dump(mode="json") for tool in tools]
    return content_hash([identity, list(heard), offered, max_tokens])[:32]


def setting_hash(*parts: object) -> str:
    """Of what decides a whole episode beside chance: the task with its files, the identity, the environment.

    parts: each as JSON can say it. The version of agentloop, whose agent and verifiers they are, is added.
    """
    return content_hash([__version__, *parts])


# ------------------------------------------------------------------------------------ the file


def read_tape(path: Path) -> PolicyRecording:
    """The tape at `path`. Raises ConfigError: one line with file, line and the next move."""
    if not path.is_file():
        raise ConfigError(f"{path}: no such tape; record one, or ask the policy: --agentloop-mode=live")
    recording = PolicyRecording()
    settings: dict[tuple[str, int], str] = {}
    answers: dict[tuple[str, int], list[RecordedAnswer]] = {}
    for exchange in read_exchanges(path, ConfigError):
        try:
            if exchange.op == MESSAGE:
                recording.messages[exchange.asks] = Message.model_validate(exchange.result)
                continue
            task_id, trial = exchange.scope
            key = (str(task_id), int(trial))
            if exchange.op == SETTING:
                settings[key] = exchange.asks
            else:
                earlier = answers.setdefault(key, [])
                earlier.append(_answer(exchange, earlier, recording.messages))
        except (KeyError, TypeError, ValueError, ValidationError) as error:
            why = " ".join(str(error).split())[:200]
            raise ConfigError(
                f"{path}: no answer of a tape ({type(error).__name__}: {why}); restore the file, or record it again"
            ) from None
    for key, recorded in answers.items():
        recording.trials[key] = RecordedAttempt(setting=settings.get(key, ""), answers=tuple(recorded))
    return recording


def write_tape(path: Path, recording: PolicyRecording, redactor: Redactor) -> None:
    """Put `recording` at `path`, whole or not at all, with secrets redacted and messages that no trial has left out."""
    write_text(path, "".join(exchange.line() for exchange in _exchanges(recording, redactor)))


def _exchanges(recording: PolicyRecording, redactor: Redactor) -> Iterator[Exchange]:
    written: dict[str, int] = {}
    for (task_id, trial), attempt in sorted(recording.trials.items()):
        scope = (task_id, trial)
        yield Exchange(scope, 0, SETTING, attempt.setting)
        before: tuple[str, ...] = ()
        for seq, answer in enumerate(attempt.answers, 1):
            for id in (*answer.heard, answer.answered):
                if id not in written:
                    written[id] = len(written)
                    message = _redacted(recording.messages[id], redactor)
                    yield Exchange((), written[id], MESSAGE, id, result=message)
            n_shared = _n_shared(before, answer.heard)
            request = {"shared": n_shared, "heard": list(answer.heard[n_shared:])}
            rest = answer.completion.model_dump(mode="json", exclude=UNKEPT, exclude_defaults=True)
            yield Exchange(scope, seq, ANSWER, answer.request, request, {"message": answer.answered, **rest})
            before = (*answer.heard, answer.answered)


def _answer(exchange: Exchange, earlier: list[RecordedAnswer], messages: dict[str, Message]) -> RecordedAnswer:
    """Of a request are in the file how many messages it shares with the conversation before, and the others' ids."""
    before = (*earlier[-1].heard, earlier[-1].answered) if earlier else ()
    heard = (*before[: exchange.request["shared"]], *exchange.request["heard"])
    answered = exchange.result["message"]
    missing = [id for id in (*heard, answered) if id not in messages]
    if missing:
        raise ValueError(f"no message {missing[0]}")
    completion = Completion(**{**exchange.result, "message": messages[answered]})
    return RecordedAnswer(request=exchange.asks, heard=heard, answered=answered, completion=completion)


def _n_shared(before: Sequence[str], heard: Sequence[str]) -> int:
    pairs = enumerate(zip(before, heard, strict=False))
    return next((n for n, (a, b) in pairs if a != b), min(len(before), len(heard)))


def _redacted(message: Message, redactor: Redactor) -> dict[str, Any]:
    """Without secrets; sampled tokens spell them, so they go with them."""
    row = message.model_dump(mode="json", exclude_defaults=True)
    spelt = {key: value for key, value in row.items() if key != "token_ids"}
    clean: dict[str, Any] = orjson.loads(redactor.json(orjson.dumps(spelt)))
    return row if clean == spelt else clean
