"""The folder of a version: everything that it needs to act again after the settings and files of its project changed.

    .agentloop/policies/v0003/
        version.json     [policy] and [agent], without secrets; paths start at files/
        files/           copies of the files that they name, as `identity.py` counts them
        overlay.json     of kind `overlay`; `adapter/` or `weights/` of the other kinds
        lineage.jsonl    the (trace id, verdict key) pairs that it was made of, one a line
        evidence.jsonl   the failures that each text of its overlay was written from, one a line
        trainer/         whatever its trainer needs to go on from it

A version is written beside its place and renamed, so its folder is whole or not there. Files of the machine (an
interpreter, an installed package) are not copied: `acting.py` refuses a version whose machine has changed.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from secrets import token_bytes
from typing import Any

from pydantic import ValidationError

from agentloop.config.kinds import KindSection, is_secret
from agentloop.config.sections import AgentSection, PolicySection
from agentloop.errors import ConfigError
from agentloop.identity import FileContents, Identity, copy_files
from agentloop.options import code_options, interpreter_options, path_options, secret_options
from agentloop.output_files import STATE, make_folder
from agentloop.registry.parts import Base, own_parts, public_url
from agentloop.store.redact import Redactor
from agentloop.types import Overlay
from agentloop.types.overlay import TextFailure

VERSION_FILE = "version.json"
FILES = "files"
OVERLAY = "overlay.json"
LINEAGE = "lineage.jsonl"
EVIDENCE = "evidence.jsonl"
OUTSIDE = "outside"
"""Folder, in `files/`, of what lies outside of the project."""
FORMAT = 1
ENVIRONMENT = ".env"
"""How the names of files begin in which programs keep their keys."""
MAX_SEARCHED = 1 << 20
"""Bytes of a file that is searched for secrets."""


@contextmanager
def replacing(folder: Path) -> Iterator[Path]:
    """An empty draft that takes the place of `folder`, on disk, when the block ends without an error."""
    draft = draft_of(folder)
    shutil.rmtree(draft, ignore_errors=True)
    make_folder(draft)
    yield draft
    put_in_place(draft, folder)


def draft_of(folder: Path) -> Path:
    """Where the version in `folder` is written first."""
    return folder.with_name(f".{folder.name}.draft")


def put_in_place(draft: Path, folder: Path) -> None:
    """Rename `draft` to `folder` once all of it is on disk. Whatever an interrupted run left there is replaced."""
    for path in sorted(draft.rglob("*")):
        if not path.is_symlink():
            _flush(path)
    shutil.rmtree(folder, ignore_errors=True)
    draft.rename(folder)
    _flush(folder.parent)


def freeze(
    draft: Path,
    base: Base,
    *,
    place: Path,
    pairs: Iterable[tuple[str, str]] = (),
    secrets: Iterable[str] = (),
) -> Identity:
    """Write the settings and files of `base` to `draft`, beside what a trainer left there; the version's identity.

    place: where the draft will lie. pairs: what it was made of. secrets: values that must not be stored. Raises
    ConfigError for files that cannot be copied.
    """
    copies = _Copies(base.folder, place / FILES)
    parts = base.parts()
    for part in parts.values():
        if isinstance(part, FileContents) and not part.belongs_to_machine:
            copies.add(part)
    settings = {"policy": copies.policy(base.policy), "agent": copies.agent(base.agent)}
    make_folder(draft)
    redactor = Redactor(token_bytes(32), secrets)
    copies.write(draft / FILES)
    _remove_secrets(draft / FILES, redactor)
    text = json.dumps({"format": FORMAT, **settings}, indent=1, ensure_ascii=False)
    (draft / VERSION_FILE).write_bytes(redactor.json(text.encode()))
    (draft / LINEAGE).write_text("".join(json.dumps(pair) + "\n" for pair in sorted(set(pairs))))
    return base.identity(own_parts(draft, read_overlay(draft)))


def _remove_secrets(folder: Path, redactor: Redactor) -> None:
    """Remove copies of files that hold a secret. The version then acts only while the original is unchanged."""
    for path in folder.rglob("*"):
        if path.is_symlink() or not path.is_file():
            continue
        if path.name.startswith(ENVIRONMENT) or _has_secret(path, redactor):
            path.unlink()


def _has_secret(path: Path, redactor: Redactor) -> bool:
    if path.stat().st_size > MAX_SEARCHED:
        return False
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        return False
    return redactor.text(text) != text


def frozen(folder: Path, *, has_agent: bool = True) -> Base:
    """The settings and files of the version in `folder`, without secrets. Raises ConfigError for a broken folder."""
    path = folder / VERSION_FILE
    try:
        settings = json.loads(path.read_bytes())
        policy = PolicySection.model_validate(settings["policy"])
        agent = AgentSection.model_validate(settings["agent"])
    except FileNotFoundError:
        raise ConfigError(f"no {path}; bring back what was there") from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        why = error.errors()[0]["msg"] if isinstance(error, ValidationError) else str(error)
        raise ConfigError(f"{path}: {' '.join(why.split())}; bring back what was there") from None
    return Base(policy, agent, folder / FILES, has_agent)


def read_overlay(folder: Path) -> Overlay | None:
    """The overlay of the version in `folder`; None where it has none. Raises ConfigError for a broken one."""
    path = folder / OVERLAY
    if not path.is_file():
        return None
    try:
        return Overlay.model_validate_json(path.read_bytes())
    except ValidationError as error:
        why = error.errors()[0]
        raise ConfigError(f"{path}: {'.'.join(map(str, why['loc']))} {why['msg']}; bring back what was there") from None


def write_overlay(folder: Path, overlay: Overlay) -> None:
    """Put `overlay` into the folder of a version that is being made."""
    (folder / OVERLAY).write_text(overlay.model_dump_json(indent=1))


def write_evidence(folder: Path, evidence: Iterable[TextFailure]) -> None:
    """Put the failures that texts were written from into the folder of a version that is being made."""
    (folder / EVIDENCE).write_text("".join(each.model_dump_json() + "\n" for each in evidence), encoding="utf-8")


def read_evidence(folder: Path) -> list[TextFailure]:
    """The failures that texts of the version in `folder` were written from; none where its trainer stored none.

    Raises ValueError for a file that was changed by hand.
    """
    path = folder / EVIDENCE
    if not path.is_file():
        return []
    return [TextFailure.model_validate_json(line) for line in path.read_text(encoding="utf-8").splitlines()]


def read_pairs(folder: Path) -> list[tuple[str, str]]:
    """The (trace id, verdict key) pairs of the version in `folder`."""
    path = folder / LINEAGE
    if not path.is_file():
        return []
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    return [(str(trace), str(key)) for trace, key in rows]


class _Copies:
    """Where the files of a version are copied to, and its settings with paths that name the copies."""

    def __init__(self, project: Path, place: Path) -> None:
        """project: where paths start now. place: where they will start."""
        self._project = project
        self._root = project.resolve()
        self._place = place
        self._parts: dict[Path, FileContents] = {}
        self._folders: list[Path] = []
        """Folders outside of the project that copied files lie in."""

    def add(self, part: FileContents) -> None:
        """Copy this part, too. Raises ConfigError for one that the copy would lie in."""
        path = part.path.resolve()
        if self._place.resolve().is_relative_to(path) or path.name == STATE:
            raise ConfigError(
                f"{part.path} holds {STATE}/, which changes with each version; put the program into a folder of its own"
            )
        if path.is_relative_to(self._root) or path.parent in self._folders:
            self._parts[path] = part
            return
        self._folders.append(path.parent)
        self._parts[path] = part

    def write(self, target: Path) -> None:
        """Copy everything below `target`."""
        make_folder(target)
        for path, part in self._parts.items():
            copy_files(path, target / self._name(path), follow=part.follow)

    def policy(self, settings: PolicySection) -> dict[str, Any]:
        """`[policy]` as it is stored."""
        if not settings.is_built_in:
            return self._foreign("policies", "policy", settings)
        table = settings.model_dump(mode="json", exclude={"api_key", "max_concurrent"}, exclude_none=True)
        if settings.base_url is not None:
            table["base_url"] = public_url(settings.base_url)
        return table | self._rehomed(table, ("script", "traces"))

    def agent(self, settings: AgentSection) -> dict[str, Any]:
        """`[agent]` as it is stored."""
        if not settings.is_built_in:
            return self._foreign("agents", "agent", settings)
        table = settings.model_dump(mode="json", exclude={"mcp": {"__all__": {"headers"}}}, exclude_none=True)
        for server in table["mcp"]:
            if "url" in server:
                server["url"] = public_url(server["url"])
        table["tools"] = [self._path(name) for name in table["tools"]]
        return table | self._rehomed(table, ("files", "instructions"))

    def _foreign(self, group: str, name: str, settings: KindSection) -> dict[str, Any]:
        marked = (group, name, settings, self._project)
        hidden = {key for key in settings.options if is_secret(key)} | set(secret_options(*marked))
        table = {key: value for key, value in settings.public_options.items() if key not in hidden}
        paths = {*path_options(*marked), *code_options(*marked), *interpreter_options(*marked)} & table.keys()
        kind = settings.kind if ":" not in settings.kind else self._path(settings.kind)
        return {"kind": kind, **table, **self._rehomed(table, sorted(paths))}

    def _rehomed(self, table: Mapping[str, Any], keys: Iterable[str]) -> dict[str, str]:
        return {key: self._path(table[key]) for key in keys if isinstance(table.get(key), str)}

    def _path(self, text: str) -> str:
        """`text`, a path or `file.py:name`, as it is written in a folder whose paths start at the copies."""
        name = text
        attribute = ""
        if ".py:" in text:
            name, _, attribute = text.rpartition(":")
        elif ":" in text or not (self._project / text).exists():
            return text
        path = (self._project / name).resolve()
        if any(path.is_relative_to(copied) for copied in self._parts):
            name = str(self._name(path))
        elif not Path(name).is_absolute():
            name = os.path.relpath(self._project.absolute() / name, self._place.absolute())
        return f"{name}:{attribute}" if attribute else name

    def _name(self, path: Path) -> Path:
        """Where the copy of `path` lies below `files/`."""
        if path.is_relative_to(self._root):
            return path.relative_to(self._root)
        n, folder = next((n, each) for n, each in enumerate(self._folders) if path.is_relative_to(each))
        return Path(OUTSIDE, str(n)) / path.relative_to(folder)


def _flush(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
