"""What a learned scorer sees of a trace: one row of plain numbers for each step.

Nothing of a task, a model or a framework is named here, so that a scorer fitted on one kind of run can
be asked about another. A row looks at its step, at what came before it, and at how the environment and
others answered; a trace without contents has its rows, too. Time and memory grow with the trace's length.
"""

from __future__ import annotations

import math
import re
from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

from agentloop.types import Step, Trace

MAX_TEXT = 2_000
"""Characters looked at of one text, half from its beginning and half from its end."""
N_COMPARED = 4
"""Earlier turns that a turn is compared with: a loop of that length is seen, and the time stays linear."""
N_NAMES = 50
"""Agents whose names are looked for in what others say."""
MAX_ANSWER, N_TRACED = 400, 20
"""Characters at the end of a run that are taken for its answer, and words of it that are traced back."""

_HARD_HINT = ("rror", "xception", "xecution failed", "xit code", "xitcode", "Traceback")
HARD = re.compile(
    r"exit ?code:? ?-?[1-9]|execution failed|Traceback \(most recent|^[ \t]*(?:[A-Z]\w*)?Error\b|(?:Error|Exception):",
    re.MULTILINE,
)
# Parts of words in lower case: looking for one is many times cheaper than a pattern, and a column need not be exact.
SOFT = (
    "not found", "no results", "no code", "denied", "forbidden", "captcha", "blocked", "timed out", "timeout",
    "unavailable", "failed to", "could not", "couldn't", "unable to", "invalid", "not valid", "not possible",
    "not available", "not supported", "went wrong",
)  # fmt: skip
WORDS = {
    "refuses": ("sorry", "apolog", "unfortunately", "cannot", "can't", "unable", "not able", "don't have", "no access"),
    "assumes": ("assum", "hypothe", "suppos", "simulat", "typical", "likely", "probably", "might", "approximat",
                "estimat", "example"),
    "claims": ("successful", "confirmed", "verified", "therefore", "thus", "the answer", "final", "the result",
               "correct", "based on"),
    "checks": ("verif", "validat", "double-check", "double check", "re-check", "recheck", "confirm", "ensure",
               "review"),
    "plans": ("let's", "let us", " will ", "plan", " step", "first", "next", "should", "please", "need to", "going to"),
    "ends": ("terminate", "###stop###", "final answer", "conclude", "that's all", "have a great day"),
    "asks": ("?",),
    "code": ("```", "def ", "import "),
    "barred": ("not a robot", "captcha", "cloudflare", "access denied", "content management", "content filter",
               "policyviolation", "paywall"),
    "hands_over": ("transfer", "human agent", "another agent", "escalat"),
}  # fmt: skip
OBJECTS = ("no,", "wait", "actually", "instead", "wrong", "incorrect", "not what", "isn't", "but ", "however",
           "mistake", "are you sure")  # fmt: skip
READS = re.compile(
    r"^(?:get|list|find|search|read|view|show|look|calculate|think|fetch|query|check|describe|open|cat|ls|transfer)",
    re.I,
)
FACT = re.compile(r"\d[\w.:/-]*")
"""A number, a date, or an id from its first digit on."""

FEATURES: tuple[str, ...] = (
    *("start", "end", "relative", "first", "second", "third", "last", "n_steps"),
    *("n_speakers", "share", "turn", "opens", "closes", "frequent", "again", "new", "leaves", "directs", "worker"),
    *("length", "longest", "silent", "thought"),
    *WORDS,
    *("facts", "new_facts", "echo", "echo_self"),
    *("calls", "writes", "repeats_call", "new_arguments", "failed"),
    *("hard", "soft", "told_hard", "told_soft", "objected", "user_next", "user_before"),
    *("first_hard", "last_hard", "no_hard", "before_hard", "since_hard", "n_hard"),
    *("first_soft", "n_soft", "first_barred"),
    *("first_write", "last_write", "n_writes"),
    *("answers_first", "answers", "unanswered"),
)
"""Names of the columns, in order."""


@dataclass(frozen=True, slots=True)
class Turn:
    """A step as the features see it."""

    speaker: str
    said: str
    told: str
    """What it answered to: words of others, and what the tools of the step before gave."""
    back: str
    """What its own tools gave, and what a terminal said next."""
    answered: str
    """What a person or another agent that is no step said next."""


def turns(trace: Trace) -> list[Turn]:
    """The steps with what was said around them."""
    steps, found = trace.steps, []
    for place, step in enumerate(steps):
        following = steps[place + 1].heard if place + 1 < len(steps) else ()
        heard = step.heard if place else trace.messages
        given = steps[place - 1].results if place else ()
        found.append(
            Turn(
                speaker=speaker(step),
                said=spoken(step),
                told=_cut([*(m.content for m in heard if m.role != "system"), *(r.content for r in given)]),
                back=_cut([*(r.content for r in step.results), *(m.content for m in following if m.role == "tool")]),
                answered=_cut([m.content for m in following if m.role != "tool"]),
            )
        )
    return found


def speaker(step: Step) -> str:
    """The agent whose turn it is; `assistant` where no name was kept."""
    return step.completion.message.name or step.completion.message.role


def spoken(step: Step) -> str:
    """What it said, thought and called, cut to MAX_TEXT."""
    message = step.completion.message
    return _cut([message.content, message.reasoning, *(call.arguments for call in message.tool_calls)])


def rows(trace: Trace) -> list[list[float]]:
    """One row for each step, in the order of FEATURES; every value is finite."""
    said = turns(trace)
    if not said:
        return []
    errors = {text: _errors(text) for turn in said for text in (turn.told, turn.back)}
    table = [_of_step(trace, said, place, errors) for place in range(len(said))]
    _of_speakers(said, table)
    _of_novelty(trace, said, table)
    _of_calls(trace, table)
    _of_errors(table)
    _of_answer(trace, said, table)
    return [[float(row.get(name, 0.0)) for name in FEATURES] for row in table]


Row = dict[str, float]


def _of_step(trace: Trace, said: Sequence[Turn], place: int, errors: Mapping[str, tuple[bool, bool]]) -> Row:
    """What stands in the step itself and beside it."""
    n, turn, message = len(said), said[place], trace.steps[place].completion.message
    heard = trace.steps[place].heard if place else trace.messages
    failed = any(not result.ok for result in trace.steps[place].results)
    (hard, soft), (told_hard, told_soft) = errors[turn.back], errors[turn.told]
    row: Row = {
        "start": math.log1p(place),
        "end": math.log1p(n - 1 - place),
        "relative": place / max(1, n - 1),
        "first": place == 0,
        "second": place == 1,
        "third": place == 2,
        "last": place == n - 1,
        "n_steps": math.log1p(n),
        "length": math.log1p(len(turn.said)),
        "silent": not turn.said.strip(),
        "thought": bool(message.reasoning) and not message.content,
        "hard": hard or failed,
        "soft": soft,
        "told_hard": told_hard,
        "told_soft": told_soft,
        "objected": _has(turn.answered.lower(), OBJECTS),
        "user_next": bool(turn.answered),
        "user_before": any(m.role == "user" for m in heard),
        "failed": failed,
    }
    low = turn.said.lower()
    has = low.__contains__
    for name, parts in WORDS.items():
        row[name] = any(map(has, parts))
    return row


def _of_speakers(said: Sequence[Turn], table: Sequence[Row]) -> None:
    """Who speaks how often, and who tells others what to do."""
    counts = Counter(turn.speaker for turn in said)
    directing: Counter[str] = Counter()
    names = list(counts)[:N_NAMES]
    for turn in said:
        directing[turn.speaker] += any(name in turn.said for name in names if name != turn.speaker)
    workers = [name for name in counts if directing[name] < 0.5 * counts[name]] or list(counts)
    busiest = max(counts, key=lambda name: counts[name])
    worker = max(workers, key=lambda name: counts[name])
    last_turn = {turn.speaker: place for place, turn in enumerate(said)}
    longest = max(len(turn.said) for turn in said)
    made: Counter[str] = Counter()
    for place, (turn, row) in enumerate(zip(said, table, strict=True)):
        name = turn.speaker
        row["n_speakers"] = math.log(len(counts))
        row["share"] = counts[name] / len(said)
        row["turn"] = math.log1p(made[name])
        row["new"] = made[name] == 0
        row["opens"] = name == said[0].speaker
        row["closes"] = name == said[-1].speaker
        row["frequent"] = name == busiest
        row["worker"] = name == worker
        row["directs"] = directing[name] / counts[name]
        row["again"] = place > 0 and said[place - 1].speaker == name
        row["leaves"] = last_turn[name] == place
        row["longest"] = len(turn.said) == longest
        made[name] += 1


def _of_novelty(trace: Trace, said: Sequence[Turn], table: Sequence[Row]) -> None:
    """Numbers and ids that nobody had said before, and words that somebody had."""
    known = {fact for m in trace.messages if m.role == "system" for fact in FACT.findall(_cut([m.content]))}
    words: deque[set[str]] = deque(maxlen=N_COMPARED)
    own: dict[str, set[str]] = {}
    for turn, row in zip(said, table, strict=True):
        known.update(FACT.findall(turn.told))
        facts = set(FACT.findall(turn.said))
        row["facts"] = math.log1p(len(facts))
        row["new_facts"] = len(facts - known) / max(1, len(facts))
        known |= facts
        now = set(turn.said.lower().split())
        row["echo"] = max((_alike(now, before) for before in words), default=0.0)
        row["echo_self"] = _alike(now, own.get(turn.speaker, set()))
        words.append(now)
        own[turn.speaker] = now


def _of_calls(trace: Trace, table: Sequence[Row]) -> None:
    """Tool calls: those that change something, and those made before."""
    made: set[tuple[str, str]] = set()
    writes: list[int] = []
    for place, (step, row) in enumerate(zip(trace.steps, table, strict=True)):
        calls = step.completion.message.tool_calls
        keys = {(call.name, call.arguments) for call in calls}
        row["calls"] = math.log1p(len(calls))
        row["repeats_call"] = bool(keys & made)
        row["writes"] = any(not READS.match(call.name) for call in calls)
        row["new_arguments"] = row["new_facts"] if calls else 0.0
        made |= keys
        if row["writes"]:
            writes.append(place)
    for place, row in enumerate(table):
        row["first_write"] = bool(writes) and place == writes[0]
        row["last_write"] = bool(writes) and place == writes[-1]
        row["n_writes"] = math.log1p(len(writes))


def _of_errors(table: Sequence[Row]) -> None:
    """Where the errors of a trace are, seen from each step."""
    hard = [place for place, row in enumerate(table) if row["hard"]]
    soft = [place for place, row in enumerate(table) if row["soft"]]
    barred = [place for place, row in enumerate(table) if row["barred"]]
    for place, row in enumerate(table):
        row["first_hard"] = bool(hard) and place == hard[0]
        row["last_hard"] = bool(hard) and place == hard[-1]
        row["no_hard"] = not hard
        row["before_hard"] = 1 / (1 + hard[0] - place) if hard and place <= hard[0] else 0.0
        row["since_hard"] = 1 / (1 + place - hard[0]) if hard and place > hard[0] else 0.0
        row["n_hard"] = math.log1p(len(hard))
        row["first_soft"] = bool(soft) and place == soft[0]
        row["n_soft"] = math.log1p(len(soft))
        row["first_barred"] = bool(barred) and place == barred[0]


def _of_answer(trace: Trace, said: Sequence[Turn], table: Sequence[Row]) -> None:
    """Where the names and numbers of the answer, the last words of the run, come from: who said them first."""
    asked = _cut([message.content for message in trace.messages])
    last = next((turn.said for turn in reversed(said) if turn.said.strip()), "")[-MAX_ANSWER:]
    words = dict.fromkeys(word.strip(".,;:!?()[]{}*`'\"") for word in last.split() if not word.islower())
    answer = list(islice((word for word in words if len(word) > 2 and word not in asked), N_TRACED))
    left = answer
    for turn, row in zip(said, table, strict=True):
        here = {word for word in answer if word in turn.said}
        row["answers_first"] = sum(word in here for word in left) / max(1, len(answer))
        row["answers"] = len(here) / max(1, len(answer))
        left = [word for word in left if word not in here]
        row["unanswered"] = len(left) / max(1, len(answer))


def _errors(text: str) -> tuple[bool, bool]:
    """Whether a text reports an error, and whether it says that something did not work out."""
    return _has(text, _HARD_HINT) and HARD.search(text) is not None, bool(text) and _has(text.lower(), SOFT)


def _has(text: str, parts: Iterable[str]) -> bool:
    return any(map(text.__contains__, parts))


def _alike(a: set[str], b: set[str]) -> float:
    """Shared words of all words, 0 to 1."""
    both = len(a & b) if a and b else 0
    return both / (len(a) + len(b) - both) if both else 0.0


def _cut(texts: Sequence[str]) -> str:
    text = "\n".join(text for text in texts if text)
    return text if len(text) <= MAX_TEXT else f"{text[: MAX_TEXT // 2]}\n{text[-MAX_TEXT // 2 :]}"
