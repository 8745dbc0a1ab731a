"""A suite on disk: the tasks that policies are compared on, in git beside the code.

    evals/NAME/suite.toml     name, tags, [sandbox], [limits], [reward] and [[verifiers]] (for tasks that name none)
    evals/NAME/tasks.jsonl    one task a line: id, instruction, split, pool, verifiers, reward, solution, environment,
                              and tags beside those of suite.toml
    evals/NAME/files/         what a box starts with, when [sandbox] says `files = "files"`
    evals/NAME/baseline/      what policies did here (`bank.py`)
    evals/NAME/CASE/          a regression case, whose tasks.jsonl has one task: its own box, and maybe a prefix.jsonl

Paths in a suite are relative to its folder; a loaded suite has absolute ones, so that its tasks can
be rolled out from anywhere.
"""

from __future__ import annotations

from pathlib import Path

from pydantic import Field

from agentloop.errors import did_you_mean
from agentloop.suites.content import suite_hash
from agentloop.suites.head import SuiteHead, parse_head
from agentloop.suites.lines import read_text
from agentloop.suites.names import CASE, HEAD, TASKS
from agentloop.suites.parts import split_of
from agentloop.suites.tasks import parse_tasks
from agentloop.types import Frozen, Split, Task


class Suite(Frozen):
    """Tasks that are done in the same kind of box under the same limits, read from a folder or made in Python."""

    name: str
    tasks: tuple[Task, ...]
    folder: Path = Field(default_factory=lambda fields: (Path("evals") / fields["name"]).resolve())
    """Absolute; of one made in Python, where its banks are: `evals/NAME` of the current folder."""
    hash: str = Field(default_factory=lambda fields: suite_hash(fields["tasks"]))
    """Content hash of the tasks, the files folder and verifiers kept in files; moving the folder keeps it."""

    def split(self, name: Split | str) -> tuple[Task, ...]:
        """The tasks of one split, in the order of the file. Raises ConfigError for a name that is no split."""
        wanted = split_of(name, f"suite {self.name!r}")
        return tuple(task for task in self.tasks if task.split is wanted)


def load_suite(path: Path | str) -> Suite:
    """The suite in the folder `path`. Raises ConfigError: one line with file, line, key and the next move."""
    folder = Path(path).resolve()
    head = parse_head(read_text(folder / HEAD, _where_suites_are(folder)), folder)
    cases = _case_tasks(folder, head)
    tasks: tuple[Task, ...] = ()
    if not cases or (folder / TASKS).exists():
        tasks = parse_tasks(read_text(folder / TASKS, "write one task a line, as JSON"), folder, head)
    tasks += cases
    return Suite(name=head.name, tasks=tasks, folder=folder, hash=suite_hash(tasks))


def _case_tasks(folder: Path, head: SuiteHead) -> tuple[Task, ...]:
    """The task of each case below `folder` that has one, in the order of their names, with the suite's tags."""
    case_suites = [
        load_suite(path.parent) for path in sorted(folder.glob(f"*/{CASE}")) if (path.parent / TASKS).exists()
    ]
    return tuple(
        task.model_copy(update={"tags": tuple(dict.fromkeys((*head.tags, *task.tags)))})
        for case in case_suites
        for task in case.tasks
    )


def _where_suites_are(folder: Path) -> str:
    names = sorted(head.parent.name for head in folder.parent.glob(f"*/{HEAD}"))
    if not names:
        return f"a suite is a folder with {HEAD} and {TASKS}"
    return f"suites in {folder.parent}: {', '.join(names)}{did_you_mean(folder.name, names)}"
