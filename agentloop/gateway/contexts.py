"""Which run a call belongs to: what it continues, what was shortened, and who is a sub-agent.

Agents say nothing of that: each call repeats its whole conversation. So a conversation is known by a digest of
what was said in it, kept after each answer, and a call belongs where the longest beginning of it was left. Where
none is known, a tool call that it answers tells (its context was shortened), and of an episode the rest goes to the
first run, or to a sub-agent when it has other instructions. What is remembered is bounded; what was forgotten begins
a run of its own, in the same trace if the call names its episode.
"""

from __future__ import annotations

import hashlib
import secrets
from array import array
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import orjson

from agentloop.gateway.dialects.completion import table_of
from agentloop.types import content_hash

MAX_CONTEXTS, MAX_EPISODES, MAX_RUNS = 10_000, 5_000, 64
"""Answers, episodes, and runs of one episode that are remembered."""
UNIQUE = 16
"""Characters from which the id of a tool call is taken for one that no other call has."""
INSTRUCTIONS = ("system", "developer")
"""Roles that are left out of a digest: what they say may tell the time."""
Digest = bytes


class Run:
    """One agent's conversation within a trace."""

    __slots__ = ("_begun", "instructions", "is_told", "last", "parent", "span_id", "started_ns", "task", "trace_id")

    def __init__(self, trace_id: str, instructions: Digest, parent: Run | None = None) -> None:
        self.trace_id, self.instructions, self.parent = trace_id, instructions, parent
        self.task: str | None = parent.task if parent else None
        """What the run is an attempt at, as its first call named it."""
        self._begun = parent is not None
        self.span_id = secrets.token_hex(8)
        """Of the agent's own span, which there is only where there are sub-agents."""
        self.is_told = False
        """Whether that span was recorded."""
        self.started_ns = 0
        self.last: tuple[int, Digest] | None = None
        """How many tokens the last answer ended with that told them, and their digest."""

    def begin(self, task: str | None) -> None:
        """A call goes to its upstream. The first one names the task, so that no run chooses it by how it went."""
        if not self._begun:
            self.task, self._begun = task, True


@dataclass(slots=True)
class _Left:
    """How a conversation was left: its run, and its tokens where they are known."""

    run: Run
    n_tokens: int
    tokens: Digest | None
    is_continued: bool = False
    """Whether an answer was given to something that went on from here."""


class Place(NamedTuple):
    """Where a call belongs."""

    run: Run
    digest: Digest
    """Of all that the policy was told."""
    left: _Left | None
    """The conversation that it continues exactly; None for one that begins, or was shortened."""


class Contexts:
    """What is remembered of conversations; for one event loop."""

    def __init__(self) -> None:
        self._left: OrderedDict[Digest, _Left] = OrderedDict()
        self._episodes: OrderedDict[tuple[str, str], list[Run]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._left)

    def place(self, project: str, episode: str | None, messages: Sequence[Any]) -> Place:
        """Where a call belongs that sends these messages (chat completions)."""
        seed = f"{project}\0{episode or ''}".encode()
        digests = _digests(seed, messages)
        digest = digests[-1] if digests else _digest(seed)
        left = next((found for each in reversed(digests) if (found := self._get(each))), None)
        if left is None:
            answered = (m.get("tool_call_id") for m in reversed(messages) if isinstance(m, dict))
            if episode is None:  # nothing else keeps apart agents whose model counts its calls from 0
                answered = (each for each in answered if len(str(each)) >= UNIQUE)
            found = next((found for each in answered if each and (found := self._get(_call(seed, str(each))))), None)
            run = found.run if found else self._begun(project, episode, messages)
        else:
            run = left.run
        return Place(run, digest, left)

    def answered(
        self, place: Place, project: str, episode: str | None, message: dict[str, Any], tokens: Sequence[int]
    ) -> bool | None:
        """Remember how the policy went on. tokens: ids of prompt and answer, () where they are unknown.

        Whether they begin with those of the conversation that was continued, which nobody had continued before, or of
        the run's last answer where the client said none again as it was; None where there is nothing to compare.
        """
        left, extends = place.left, None
        before = place.run.last if left is None else (left.n_tokens, left.tokens) if left.tokens is not None else None
        if before is not None and tokens:
            extends = len(tokens) >= before[0] and _packed(tokens[: before[0]]) == before[1]
            extends = extends and not (left and left.is_continued)
        if left is not None:
            left.is_continued = True
        if tokens:
            place.run.last = len(tokens), _packed(tokens)
        self._left.pop(place.digest, None)  # the next that begins so is another conversation
        self.remember(place, project, episode, message, tokens)
        return extends

    def remember(
        self, place: Place, project: str, episode: str | None, message: dict[str, Any], tokens: Sequence[int]
    ) -> None:
        """That a conversation may go on from `message`. tokens: as of `answered`."""
        now = _Left(place.run, len(tokens), _packed(tokens) if tokens else None)
        self._put(_next(place.digest, message), now)
        seed = f"{project}\0{episode or ''}".encode()
        for call in _calls(message):
            self._put(_call(seed, str(call.get("id"))), now)

    def failed(self, place: Place) -> None:
        """Remember that nothing was answered: what says the same next is the same call, tried again."""
        if place.left is None:
            self._put(place.digest, _Left(place.run, 0, None))

    def _begun(self, project: str, episode: str | None, messages: Sequence[Any]) -> Run:
        said = [m.get("content") for m in messages if isinstance(m, dict) and m.get("role") in INSTRUCTIONS]
        instructions = _digest(orjson.dumps(said))
        if episode is None:
            return Run(secrets.token_hex(16), instructions)
        runs = self._episodes.setdefault((project, episode), [])
        self._episodes.move_to_end((project, episode))
        if len(self._episodes) > MAX_EPISODES:
            self._episodes.popitem(last=False)
        known = next((run for run in runs if run.instructions == instructions), None)
        if known is not None and known is runs[0]:
            return known
        made = Run(trace_id_of(project, episode), instructions, runs[0] if runs else None)
        if len(runs) < MAX_RUNS:
            runs.append(made)
        return made

    def _get(self, digest: Digest) -> _Left | None:
        found = self._left.get(digest)
        if found is not None:
            self._left.move_to_end(digest)
        return found

    def _put(self, digest: Digest, left: _Left) -> None:
        self._left[digest] = left
        self._left.move_to_end(digest)
        if len(self._left) > MAX_CONTEXTS:
            self._left.popitem(last=False)


def trace_id_of(project: str, episode: str) -> str:
    """Of an episode that is named."""
    return content_hash(["gateway", project, episode])[:32]


def _digests(seed: bytes, messages: Sequence[Any]) -> list[Digest]:
    """One for each beginning of the conversation."""
    made, digest = [], _digest(seed)
    for message in messages:
        if isinstance(message, dict) and message.get("role") not in INSTRUCTIONS:
            digest = _next(digest, message)
            made.append(digest)
    return made


def _next(digest: Digest, message: dict[str, Any]) -> Digest:
    """However a client writes the same message down again."""
    functions = [(call.get("id"), table_of(call, "function")) for call in _calls(message)]
    calls = [[call_id, function.get("name"), _value(function.get("arguments"))] for call_id, function in functions]
    said = [message.get("role"), _text(message.get("content")), calls, message.get("tool_call_id")]
    return _digest(digest + orjson.dumps(said, option=orjson.OPT_SORT_KEYS))


def _calls(message: dict[str, Any]) -> list[dict[str, Any]]:
    found = message.get("tool_calls")
    return [call for call in found if isinstance(call, dict)] if isinstance(found, list) else []


def _text(content: Any) -> Any:
    if isinstance(content, list):
        found = [part.get("text") for part in content if isinstance(part, dict)]
        texts = [text for text in found if isinstance(text, str)]
        content = "".join(texts) if len(texts) == len(content) else content
    return content.strip() if isinstance(content, str) else content or ""  # blanks go lost, tokens tell of that


def _value(arguments: Any) -> Any:
    try:
        return orjson.dumps(orjson.loads(arguments), option=orjson.OPT_SORT_KEYS).decode()
    except (orjson.JSONDecodeError, TypeError):  # of a wrong type, or of more levels than are written
        return arguments


def _call(seed: bytes, call_id: str) -> Digest:
    return _digest(seed + b"\0call\0" + call_id.encode(errors="replace"))


def _packed(tokens: Sequence[int]) -> Digest:
    return _digest(array("q", tokens).tobytes())


def _digest(data: bytes) -> Digest:
    return hashlib.blake2b(data, digest_size=16).digest()
