"""A suite on disk: tasks on which policies are compared, kept in git beside the code.

    evals/NAME/suite.toml     name, tags, [sandbox], [limits], [reward], [environment] and [[verifiers]] (for tasks
                              without their own)
    evals/NAME/tasks.jsonl    one task a line: id, instruction, split, pool, verifiers, reward, solution, environment,
                              and tags beside those of suite.toml
    evals/NAME/files/         the first content of a sandbox, if [sandbox] has `files = "files"`
    evals/NAME/baseline/      outcomes of policies on this suite (`bank.py`)
    evals/NAME/CASE/          a regression case: tasks.jsonl with one task, and maybe a prefix.jsonl

A folder of tasks in the Harbor format, or one such task, is a suite, too (`harbor.py`): `load_suite` takes all three.

Paths in a suite are relative to its folder; a loaded suite has absolute ones, so that its tasks can be rolled out from
anywhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from pydantic import Field

from agentloop.errors import ConfigError, did_you_mean
from agentloop.harbor.task import TASK, find_tasks
from agentloop.suites.content import suite_hash
from agentloop.suites.harbor import harbor_hash, ordinary, task_folders
from agentloop.suites.head import SuiteHead, parse_head
from agentloop.suites.lines import read_text
from agentloop.suites.names import CASES, HEAD, TASKS
from agentloop.suites.parts import split_of
from agentloop.suites.tasks import parse_tasks
from agentloop.types import Frozen, Split, Task


class Suite(Frozen):
    """Tasks with the same kind of sandbox and the same limits, read from a folder or made in Python."""

    name: str
    tasks: tuple[Task, ...]
    folder: Path = Field(default_factory=lambda fields: (Path("evals") / fields["name"]).resolve())
    """Absolute. A suite made in Python has its banks in `evals/NAME` of the current folder."""
    hash: str = Field(default_factory=lambda fields: suite_hash(fields["tasks"]))
    """Content hash of the tasks, the files folder and verifiers kept in files; moving the folder keeps it."""
    remarks: tuple[str, ...] = ()
    """A line for each request of its Harbor tasks that is not met."""

    @property
    def is_harbor(self) -> bool:
        """True if its tasks are in the Harbor format."""
        return any(task.setup is not None for task in self.tasks)

    def split(self, name: Split | str) -> tuple[Task, ...]:
        """The tasks of one split, in the order of the file. Raises ConfigError for a name that is no split."""
        wanted = split_of(name, f"suite {self.name!r}")
        return tuple(task for task in self.tasks if task.split is wanted)


def load_suite(path: Path | str) -> Suite:
    """The suite in the folder `path`. Raises ConfigError: one line with file, line, key and the next move."""
    folder = Path(path).resolve()
    if _is_harbor(folder):
        return _harbor_suite([folder])
    head = parse_head(read_text(folder / HEAD, where_suites_are(folder)), folder)
    cases = _case_tasks(folder, head)
    tasks: tuple[Task, ...] = ()
    # A folder of regression cases needs no tasks of its own.
    if not cases or (folder / TASKS).exists():
        tasks = parse_tasks(read_text(folder / TASKS, "write one task a line, as JSON"), folder, head)
    tasks += cases
    return Suite(name=head.name, tasks=tasks, folder=folder, hash=suite_hash(tasks))


def load_suites(paths: Sequence[Path]) -> list[Suite]:
    """The suites in `paths`. All folders of Harbor tasks are one suite together. Raises ConfigError as `load_suite`."""
    folders = [path.resolve() for path in paths]
    harbor = [folder for folder in folders if _is_harbor(folder)]
    suites = [load_suite(folder) for folder in folders if folder not in harbor]
    if harbor:
        suites.append(_harbor_suite(harbor))
    return suites


def _is_harbor(folder: Path) -> bool:
    """True for a folder of Harbor tasks. Raises ConfigError for one that has tasks of both kinds."""
    tasks = task_folders(folder)
    if not (folder / HEAD).is_file():
        # An incomplete or deeper Harbor task counts, too: `find_tasks` has the better message for it.
        return bool(tasks) or (folder / TASK).is_file() or any(folder.glob(f"*/*/{TASK}"))
    if tasks:
        raise ConfigError(
            f"{folder}: a suite ({HEAD}) and a task in the Harbor format ({tasks[0] / TASK}) in one folder; move the "
            "Harbor tasks to a folder of their own, and name both folders"
        )
    return False


def _harbor_suite(folders: Sequence[Path]) -> Suite:
    tasks = find_tasks(list(folders))
    return Suite(
        name=folders[0].name,
        tasks=tuple(ordinary(task) for task in tasks),
        folder=folders[0],
        hash=harbor_hash(tasks),
        remarks=tuple(remark for task in tasks for remark in task.remarks),
    )


def has_task(case: Path) -> bool:
    """False for an offline case, which is only a trace."""
    return (case / TASKS).exists() or bool(task_folders(case))


def _case_tasks(folder: Path, head: SuiteHead) -> tuple[Task, ...]:
    """The tasks of the cases in `folder`, by name, all held out, with the tags of the suite."""
    case_suites = [load_suite(path.parent) for path in sorted(folder.glob(CASES)) if has_task(path.parent)]
    return tuple(
        task.model_copy(update={"tags": tuple(dict.fromkeys((*head.tags, *task.tags))), "split": Split.heldout})
        for case in case_suites
        for task in case.tasks
    )


def where_suites_are(folder: Path) -> str:
    """The suites beside `folder`, for a message, and the most similar name."""
    names = sorted(head.parent.name for head in folder.parent.glob(f"*/{HEAD}"))
    if not names:
        return f"a suite is a folder with {HEAD} and {TASKS}"
    return f"suites in {folder.parent}: {', '.join(names)}{did_you_mean(folder.name, names)}"
