"""A suite as it may be trained on: without what another suite of the project, or a regression case, holds out."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from agentloop.errors import ConfigError, counted
from agentloop.mining.case import read_cases
from agentloop.suites.names import HEAD
from agentloop.suites.suite import Suite, load_suite
from agentloop.types import Split


def trainable(evals: Path, suite: Suite, say: Callable[[str], None]) -> Suite:
    """`suite` without the train tasks that a case below `evals` was mined of, which are told to `say`.

    A case is held out under an id of its own, and names its task: whoever mines a failure of training goes on training,
    without that task. The hash stays that of the whole. Raises ConfigError when another suite holds out a train task
    itself, or when cases hold out all of them.
    """
    train = {(task.id, task.instruction): task for task in suite.split(Split.train)}
    mined: dict[str, str] = {}
    for head in sorted(evals.glob(f"*/{HEAD}")):
        if head.parent.resolve() == suite.folder:
            continue
        other = load_suite(head.parent)
        origins = {case.id: case.task for case in read_cases(other.folder)}
        held_out = other.split(Split.heldout)
        mined |= {origins[t.id]: t.id for t in held_out if (origins.get(t.id), t.instruction) in train}
        _refuse(suite, other, [t.id for t in held_out if t.id not in origins and (t.id, t.instruction) in train])
    if not mined:
        return suite
    cases = f"cases such as {next(iter(mined.values()))!r} were mined of them, and what is held out is never trained on"
    if len(mined) == len(train):
        raise ConfigError(f"all train tasks of suite {suite.name!r} are held out: {cases}; add tasks to train on")
    say(f"{counted(len(mined), 'train task')} of suite {suite.name!r} left out of training: {cases}")
    tasks = [task for task in suite.tasks if task.split is not Split.train or task.id not in mined]
    return suite.model_copy(update={"tasks": tuple(tasks)})


def _refuse(suite: Suite, other: Suite, leaked: list[str]) -> None:
    if leaked:
        raise ConfigError(
            f"{counted(len(leaked), 'train task')} of suite {suite.name!r}, such as {leaked[0]!r}, "
            f"{'is' if len(leaked) == 1 else 'are'} held out by {other.folder}, and what is held out is never "
            "trained on; give another split to one of them"
        )
