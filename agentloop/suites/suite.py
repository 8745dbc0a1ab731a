"""A suite on disk: the tasks that policies are compared on, in git beside the code.

    evals/NAME/suite.toml     name, tags, [sandbox], [limits], [reward] and [[verifiers]] (for tasks that name none)
    evals/NAME/tasks.jsonl    one task a line: id, instruction, split, pool, verifiers, reward, solution, environment,
                              and tags beside those of suite.toml
    evals/NAME/files/         what a box starts with, when [sandbox] says `files = "files"`
    evals/NAME/baseline/      what policies did here (`bank.py`)
    evals/NAME/CASE/          a regression case, whose tasks.jsonl has one task: its own box, and maybe a prefix.jsonl

Paths in a suite are relative to its folder; a loaded suite has absolute ones, so that its tasks can
be rolled out from anywhere. A verifier kept in a file must be a file of the suite's project; whether another kind is
installed is the business of `plugins.py`.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import stat
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, Field, ValidationError

from agentloop.errors import ConfigError, boundary, did_you_mean
from agentloop.input_files import parse_json, parse_toml
from agentloop.output_files import write_text
from agentloop.plugins import MARKERS, is_of_project, project_folder
from agentloop.types import (
    EnvironmentSpec,
    Frozen,
    Limits,
    Part,
    RewardRule,
    SandboxSpec,
    Split,
    Step,
    Task,
    content_hash,
)

HEAD = "suite.toml"
TASKS = "tasks.jsonl"
HEAD_KEYS = ("name", "tags", "sandbox", "limits", "reward", "verifiers")
TASK_KEYS = ("id", "instruction", "split", "pool", "verifiers", "reward", "solution", "environment", "tags", "prefix")
CASE = "case.toml"
"""What a folder in a suite has that is a case of it (`case.py`)."""
PREFIX = "prefix.jsonl"
"""The turns that a task goes on from, as they are written; a task names the file by its key `prefix`."""
MUST_PASS = "must-pass"  # noqa: S105 - not that kind of pass
"""The tag of a task that no version may fail for good: the gate watches it by itself (`eprocess.py`)."""
TESTS = "tests"
"""The option of a verifier that names a folder, relative to the suite's as a verifier's own file is."""

Table = dict[str, Any]
Model = TypeVar("Model", bound=BaseModel)


class Suite(Frozen):
    """Tasks that are done in the same kind of box under the same limits, read from a folder or made in Python."""

    name: str
    tasks: tuple[Task, ...]
    folder: Path = Field(default_factory=lambda fields: (Path("evals") / fields["name"]).resolve())
    """Absolute; of one made in Python, where its banks are: `evals/NAME` of the current folder."""
    hash: str = Field(default_factory=lambda fields: _suite_hash(fields["tasks"]))
    """Content hash of the tasks, the files folder and verifiers kept in files; moving the folder keeps it."""

    def split(self, name: Split | str) -> tuple[Task, ...]:
        """The tasks of one split, in the order of the file. Raises ConfigError for a name that is no split."""
        wanted = _split(name, f"suite {self.name!r}")
        return tuple(task for task in self.tasks if task.split is wanted)


class _Head(Frozen):
    """What suite.toml says."""

    name: str
    sandbox: SandboxSpec
    files: dict[Split, Path]
    """What a box of each split starts with; a split that is not in it starts with nothing."""
    limits: Limits
    reward: RewardRule | None
    verifiers: tuple[Part, ...]
    tags: tuple[str, ...]


# --------------------------------------------------------------------------------------- reading


def load_suite(path: Path | str) -> Suite:
    """The suite in the folder `path`. Raises ConfigError: one line with file, line, key and the next move."""
    folder = Path(path).resolve()
    head = _parse_head(_read(folder / HEAD, _where_suites_are(folder)), folder)
    cases = _case_tasks(folder, head)
    tasks: tuple[Task, ...] = ()
    if not cases or (folder / TASKS).exists():
        tasks = _parse_tasks(_read(folder / TASKS, "write one task a line, as JSON"), folder, head)
    tasks += cases
    return Suite(name=head.name, tasks=tasks, folder=folder, hash=_suite_hash(tasks))


def _case_tasks(folder: Path, head: _Head) -> tuple[Task, ...]:
    """The task of each case below `folder` that has one, in the order of their names, with the suite's tags."""
    case_suites = [
        load_suite(path.parent) for path in sorted(folder.glob(f"*/{CASE}")) if (path.parent / TASKS).exists()
    ]
    return tuple(
        task.model_copy(update={"tags": tuple(dict.fromkeys((*head.tags, *task.tags)))})
        for case in case_suites
        for task in case.tasks
    )


def read_jsonl(path: Path, text: str) -> Iterator[tuple[str, Table]]:
    """('file:line', object) of each line of `text`, blank ones left out. Raises ConfigError."""
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        where = f"{path}:{number}"
        try:
            value = parse_json(line)
        except ValueError as error:
            raise ConfigError(f"{where}: not JSON: {error}; write one JSON object a line") from None
        if not isinstance(value, dict):
            raise ConfigError(f"{where}: a line must be a JSON object, not {type(value).__name__}")
        yield where, value


def _read(path: Path, remedy: str) -> str:
    if not path.is_file():
        raise ConfigError(f"{path}: no such file; {remedy}")
    with boundary(ConfigError, f"{path}: cannot be read; mend its permissions or save it as UTF-8"):
        return path.read_text(encoding="utf-8")


def _where_suites_are(folder: Path) -> str:
    names = sorted(head.parent.name for head in folder.parent.glob(f"*/{HEAD}"))
    if not names:
        return f"a suite is a folder with {HEAD} and {TASKS}"
    return f"suites in {folder.parent}: {', '.join(names)}{did_you_mean(folder.name, names)}"


def _parse_head(text: str, folder: Path) -> _Head:
    path = folder / HEAD
    head = parse_toml(path, text)
    _refuse_unknown(head, HEAD_KEYS, lambda key: _toml_place(path, text, "", key))
    name = head.get("name", folder.name)
    if not isinstance(name, str) or not name:
        raise ConfigError(f"{_toml_place(path, text, '', 'name')}: key 'name' must be a text that is not empty")
    return _Head(
        name=name,
        sandbox=_sandbox(path, text, head),
        files=_files(path, text, head),
        limits=_limits(path, text, head),
        reward=_reward(path, text, head),
        verifiers=_verifiers(head.get("verifiers", []), folder, _toml_place(path, text, "", "verifiers")),
        tags=_tags(head.get("tags", []), _toml_place(path, text, "", "tags")),
    )


def _sandbox(path: Path, text: str, head: Table) -> SandboxSpec:
    table = dict(_table(path, text, head, "sandbox", SandboxSpec))
    table.pop("files", None)
    if isinstance(hosts := table.get("allowed_hosts"), list):  # TOML has no tuples, and what is validated is strict
        table["allowed_hosts"] = tuple(hosts)
    return _validated(path, text, "sandbox", table, SandboxSpec)


def _files(path: Path, text: str, head: Table) -> dict[Split, Path]:
    """`files = "folder"` for every split, or `files = { train = "folder", ... }`: a box sees its split."""
    files = head.get("sandbox", {}).get("files")
    if files is None:
        return {}
    where = _toml_place(path, text, "sandbox", "files")
    folders = files if isinstance(files, dict) else dict.fromkeys([split.value for split in Split], files)
    contents = {}
    for name, folder in folders.items():
        if not isinstance(folder, str):
            raise ConfigError(f"{where}: key 'files' must be the path of a folder, relative to the suite")
        place = _place(path.parent, folder, f"{where}: key 'files'")
        if not place.is_dir():
            raise ConfigError(
                f"{where}: key 'files': no folder {_listed(place)}; make it, or leave the key out for an empty box"
            )
        _refuse_above(place, path.parent, f"{where}: key 'files'")
        contents[_split(name, where)] = place
    return contents


def _limits(path: Path, text: str, head: Table) -> Limits:
    table = _table(path, text, head, "limits", Limits)
    limits = _validated(path, text, "limits", table, Limits)
    for key in table:
        if getattr(limits, key) <= 0 and Limits.model_fields[key].annotation is not bool:
            where = _toml_place(path, text, "limits", key)
            raise ConfigError(f"{where}: key {key!r} is {table[key]}; a limit must be above 0")
    return limits


def _reward(path: Path, text: str, head: Table) -> RewardRule | None:
    table = dict(_table(path, text, head, "reward", RewardRule))
    if isinstance(gates := table.get("gates"), list):
        table["gates"] = tuple(gates)
    return _validated(path, text, "reward", table, RewardRule) if table else None


def _table(path: Path, text: str, head: Table, name: str, model: type[BaseModel]) -> Table:
    table = head.get(name, {})
    if not isinstance(table, dict):
        raise ConfigError(f"{_toml_place(path, text, '', name)}: key {name!r} must be a table, [{name}]")
    allowed = tuple(key for key in model.model_fields if key != "agent_files")  # which is the agent's to say
    _refuse_unknown(table, allowed, lambda key: _toml_place(path, text, name, key))
    return table


def _validated(path: Path, text: str, name: str, table: Table, model: type[Model]) -> Model:
    try:
        return model.model_validate(table, strict=True)
    except ValidationError as error:
        first = error.errors()[0]
        key = str(first["loc"][0])
        where = _toml_place(path, text, name, key)
        raise ConfigError(f"{where}: key {key!r} is {first['input']!r}: {_lower(first['msg'])}") from None


def _parse_tasks(text: str, folder: Path, head: _Head) -> tuple[Task, ...]:
    path = folder / TASKS
    tasks: list[Task] = []
    first_seen: dict[str, str] = {}
    for where, row in read_jsonl(path, text):
        task = _task(row, where, folder, head)
        if task.id in first_seen:
            raise ConfigError(f"{where}: key 'id': {task.id!r} is already at {first_seen[task.id]}; rename one of them")
        first_seen[task.id] = where
        tasks.append(task)
    if not tasks:
        raise ConfigError(f"{path}: no task in it; write one task a line, as JSON")
    if len({task.environment is None for task in tasks}) > 1:
        raise ConfigError(f"{path}: tasks with an environment and tasks without; write one suite for each")
    return tuple(tasks)


def _task(row: Table, where: str, folder: Path, head: _Head) -> Task:
    _refuse_unknown(row, TASK_KEYS, lambda _: where)
    if isinstance(environment := row.get("environment"), dict):
        _refuse_unknown(environment, tuple(EnvironmentSpec.model_fields), lambda _: f"{where}: key 'environment'")
    for key in ("id", "instruction"):
        if not row.get(key):
            raise ConfigError(f"{where}: key {key!r} is missing or empty; every task needs one")
    verifiers = _verifiers(row["verifiers"], folder, where) if "verifiers" in row else head.verifiers
    if not verifiers:
        raise ConfigError(
            f"{where}: task {row['id']!r} has no verifier, so nothing could score it; "
            f'add "verifiers": [{{"kind": "exact", "expected": "…"}}] or [[verifiers]] in {HEAD}'
        )
    split = _split(row.get("split", Split.train), where)
    box = head.sandbox.model_copy(update={"files": head.files.get(split)})
    try:
        return Task.model_validate(
            {
                "reward": head.reward,
                **row,
                "split": split,
                "verifiers": verifiers,
                "sandbox": box,
                "limits": head.limits,
                "tags": tuple(dict.fromkeys((*head.tags, *_tags(row.get("tags", []), where)))),
                "prefix": _prefix(row.get("prefix"), where, folder),
            }
        )
    except ValidationError as error:
        first = error.errors()[0]
        if first["loc"][0] == "solution":
            shape = json.dumps([row["solution"] if isinstance(row["solution"], str) else "wc -l < a0"])
            raise ConfigError(f"{where}: key 'solution' must be a list of shell commands, like {shape}") from None
        raise ConfigError(f"{where}: key {'.'.join(map(str, first['loc']))!r}: {_lower(first['msg'])}") from None


def _split(name: object, where: str) -> Split:
    names = [split.value for split in Split]
    if not isinstance(name, str) or name not in names:
        hint = did_you_mean(str(name), names)
        raise ConfigError(f"{where}: key 'split': no split {name!r} (splits: {', '.join(names)}){hint}")
    return Split(name)


def _tags(names: object, where: str) -> tuple[str, ...]:
    if not isinstance(names, list) or not all(isinstance(name, str) and name for name in names):
        raise ConfigError(f"{where}: key 'tags' must be a list of words, like {json.dumps([MUST_PASS])}")
    return tuple(names)


def _prefix(name: object, where: str, folder: Path) -> tuple[Step, ...]:
    """The turns in the file `name`, one a line."""
    if name is None:
        return ()
    path = _place(folder, name, f"{where}: key 'prefix'") if isinstance(name, str) else folder
    if not path.is_file():
        raise ConfigError(f"{where}: key 'prefix': no file {_listed(path)} of turns; paths start at the suite folder")
    steps = []
    for line, row in read_jsonl(path, _read(path, "write one turn a line, as JSON")):
        try:
            steps.append(Step.model_validate({**row, "copied": True}))
        except ValidationError as error:
            raise ConfigError(
                f"{line}: no turn of a trace: {_lower(error.errors()[0]['msg'])}; mend the line"
            ) from None
    return tuple(steps)


def _verifiers(rows: object, folder: Path, where: str) -> tuple[Part, ...]:
    shape = 'a list like [{"kind": "exact", "expected": "57"}]'
    if not isinstance(rows, list):
        raise ConfigError(f"{where}: key 'verifiers' must be {shape}")
    parts = []
    for row in rows:
        if not isinstance(row, dict) or not isinstance(row.get("kind"), str):
            raise ConfigError(f"{where}: key 'verifiers': {row!r} names no kind; it must be {shape}")
        options = {key: value for key, value in row.items() if key != "kind"}
        if isinstance(options.get(TESTS), str):
            tests = _place(folder, options[TESTS], f"{where}: key 'verifiers'")
            options[TESTS] = _existing(tests, row["kind"], where)
            _refuse_above(tests, folder, f"{where}: key 'verifiers'")
        parts.append(Part(kind=_absolute_kind(row["kind"], folder, where), options=options))
    return tuple(parts)


def _refuse_above(place: Path, folder: Path, where: str) -> None:
    if folder.is_relative_to(place):
        raise ConfigError(f"{where}: the suite and its solutions are in the folder {_listed(place)}; name another")


def _existing(folder: Path, kind: str, where: str) -> str:
    if not folder.is_dir():
        raise ConfigError(
            f"{where}: key 'verifiers': no folder {_listed(folder)} of tests for {kind!r}; it starts at the suite's"
        )
    return str(folder)


def _place(folder: Path, name: str, where: str) -> Path:
    """The path `name`, which starts at `folder`. Raises ConfigError for a text that no path can be."""
    try:
        place = (folder / name).resolve()
        place.exists()
    except (OSError, ValueError, RuntimeError) as error:  # too long, with a NUL, through a link to itself
        raise ConfigError(f"{where}: {name[:100]!r} is no path: {error.__class__.__name__}; name another") from None
    return place


def _listed(path: Path) -> str:
    """As it is, or quoted where it is not one line of text."""
    return str(path) if str(path).isprintable() else repr(str(path))


def _in_file(kind: str) -> tuple[Path, str] | None:
    """(file, class) of a kind like `check.py:Class`, None for an installed name or `module:Class`."""
    file, _, name = kind.rpartition(":")
    return (Path(file), name) if file.endswith(".py") else None


def _absolute_kind(kind: str, folder: Path, where: str) -> str:
    if (in_file := _in_file(kind)) is None:
        return kind
    file = _place(folder, str(in_file[0]), f"{where}: key 'verifiers'")
    if not file.is_file():
        raise ConfigError(
            f"{where}: key 'verifiers': no file {_listed(file)} for kind {kind!r}; paths start at the suite folder"
        )
    project = _project(folder)
    if not is_of_project(file, project):
        raise ConfigError(
            f"{where}: key 'verifiers': {file} for kind {kind!r} is not a file of the project in {project}; move it "
            f"there, or mark the folder above both as the project with one of {', '.join(MARKERS)}"
        )
    return f"{file}:{in_file[1]}"


def _project(folder: Path) -> Path:
    """Whose files the suite in `folder` may name: the project's, or without one all beside the outermost suite."""
    outermost = folder
    while (outermost.parent / HEAD).exists():
        outermost = outermost.parent
    return project_folder(folder, default=outermost.parent)


# --------------------------------------------------------------------------------------- writing


def write_suite(folder: Path, name: str, tasks: Sequence[Task]) -> Suite:
    """Write `tasks` as the suite in `folder` and give it back as it loads from there.

    The files folder and verifier files stay where they are and are named relative to `folder`.
    Everything is checked before anything is written. Each file is replaced whole, suite.toml last:
    a new suite that was cut short does not load. Raises ConfigError, also for tasks of unlike boxes
    or limits, which one suite cannot say.
    """
    kinds = {(task.sandbox.model_copy(update={"files": None}), task.limits) for task in tasks}
    if len(kinds) > 1 or len({(task.split, task.sandbox.files) for task in tasks}) > len({t.split for t in tasks}):
        raise ConfigError(f"{folder}: tasks of a split with different sandboxes or limits; write one suite for each")
    folder = folder.resolve()
    lines = "".join(json.dumps(_row(task, folder), ensure_ascii=False) + "\n" for task in tasks)
    head = _head_text(name, tasks, folder) if tasks else ""
    prefixes = {task.prefix for task in tasks if task.prefix}
    if len(prefixes) > 1:
        raise ConfigError(f"{folder}: tasks that go on from different turns; write one suite for each")
    for prefix in prefixes:
        write_text(folder / PREFIX, "".join(step.model_dump_json(exclude_defaults=True) + "\n" for step in prefix))
    _parse_tasks(lines, folder, _parse_head(head, folder))
    write_text(folder / TASKS, lines)
    write_text(folder / HEAD, head)
    return load_suite(folder)


def _row(task: Task, folder: Path) -> Table:
    row = task.model_dump(mode="json", include={"id", "instruction", "split", "pool", "solution", "tags"})
    verifiers = [{"kind": _relative_kind(part.kind, folder), **_options(part, folder)} for part in task.verifiers]
    if task.reward is not None:
        row["reward"] = task.reward.model_dump(mode="json", exclude_defaults=True)
    if task.environment is not None:
        row["environment"] = task.environment.model_dump(mode="json", exclude_defaults=True)
    if task.prefix:
        row["prefix"] = PREFIX
    return {key: value for key, value in {**row, "verifiers": verifiers}.items() if value != []}


def _options(part: Part, folder: Path) -> Table:
    tests = part.options.get(TESTS)
    return {**part.options, TESTS: _relative(Path(tests), folder)} if isinstance(tests, str) else part.options


def _relative_kind(kind: str, folder: Path) -> str:
    in_file = _in_file(kind)
    return kind if in_file is None else f"{_relative(in_file[0], folder)}:{in_file[1]}"


def _relative(path: Path, folder: Path) -> str:
    return os.path.relpath(path.resolve(), folder)


def _head_text(name: str, tasks: Sequence[Task], folder: Path) -> str:
    lines = [f"name = {toml_value(name)}", "", "[sandbox]"]
    spec = tasks[0].sandbox.model_dump(exclude={"files"}, exclude_none=True)  # which TOML cannot say
    lines += [f"{key} = {toml_value(value)}" for key, value in spec.items()]
    files = {t.split.value: _relative(t.sandbox.files, folder) for t in tasks if t.sandbox.files is not None}
    if len(set(files.values())) == 1:
        lines.append(f"files = {toml_value(next(iter(files.values())))}")
    elif files:
        lines.append("files = { " + ", ".join(f"{split} = {toml_value(path)}" for split, path in files.items()) + " }")
    limits = tasks[0].limits.model_dump(exclude_none=True)
    lines += ["", "[limits]", *(f"{key} = {toml_value(value)}" for key, value in limits.items())]
    return "\n".join(lines) + "\n"


def toml_value(value: str | bool | int | float | list[str]) -> str:
    """A scalar, or a list of texts, in TOML: JSON's spelling, but for DEL, which JSON leaves bare.

    A text with quotes in it is a literal one where it can be, for those who read it.
    """
    if isinstance(value, str) and '"' in value and "'" not in value and value.isprintable():
        return f"'{value}'"
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


# --------------------------------------------------------------------------------------- hashing


def _suite_hash(tasks: Sequence[Task]) -> str:
    """Equal for suites that ask and check the same, wherever they lie and however their lines are ordered."""
    folders = sorted({task.sandbox.files for task in tasks if task.sandbox.files is not None})
    rows = sorted((_portable(task) for task in tasks), key=lambda row: str(row["id"]))
    return content_hash({"tasks": rows, "files": [folder_contents(folder) for folder in folders]})


def _portable(task: Task) -> Table:
    """The task without locations: a verifier kept in a file counts by that file's contents."""
    row = task.portable()
    for part in row["verifiers"]:
        if isinstance(tests := part["options"].get(TESTS), str):
            part["options"][TESTS] = folder_contents(Path(tests))
        if in_file := _in_file(part["kind"]):
            part["kind"] = f"{_sha256(in_file[0])}:{in_file[1]}"
    return row


def folder_contents(folder: Path) -> list[tuple[str, str, bool]]:
    """(relative path, hash or link target, executable) of every file; empty folders are left out, as in git."""
    rows = []
    for path in sorted(folder.rglob("*")):
        if path.is_symlink():
            rows.append((path.relative_to(folder).as_posix(), f"-> {os.readlink(path)}", False))
        elif path.is_file():
            executable = bool(path.stat().st_mode & stat.S_IXUSR)
            rows.append((path.relative_to(folder).as_posix(), _sha256(path), executable))
    return rows


def _sha256(path: Path) -> str:
    with boundary(ConfigError, f"{path}: cannot be read; mend its permissions"), path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


# -------------------------------------------------------------------------------------- messages


def _refuse_unknown(table: Mapping[str, Any], allowed: Collection[str], place: Callable[[str], str]) -> None:
    """Raises ConfigError for the first key of `table` that is not `known`; `place(key)` says where it is."""
    for key in table:
        if key not in allowed:
            hint = did_you_mean(key, allowed)
            raise ConfigError(f"{place(key)}: unknown key {key!r} (keys: {', '.join(allowed)}){hint}")


def _toml_place(path: Path, text: str, table: str, key: str) -> str:
    """'file:line' of `key` in `table` ("" is the top), or the file alone when the key is written in another way."""
    current = ""
    for number, line in enumerate(text.splitlines(), start=1):
        if header := re.match(r"\s*\[+\s*([^\[\]]+?)\s*\]", line):
            current = header[1]
            if not table and current == key:
                return f"{path}:{number}"
        elif current == table and re.match(rf"""\s*["']?{re.escape(key)}["']?\s*=""", line):
            return f"{path}:{number}"
    return str(path)


def _lower(message: str) -> str:
    return message[:1].lower() + message[1:]
