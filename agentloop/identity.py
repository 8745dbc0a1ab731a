"""Parts -> Identity: one hash for everything that decides how something acts, by contents and never by path.

    identity({"policy": Value({...}), "files": FileContents(Path("mine")), "model": Outside({...}, "model 'm'")})

Equal contents give an equal hash in every process and on every machine, wherever the files lie, whoever owns them and
whenever they were written. A part that lives elsewhere (a hosted model, an MCP server at a URL) is hashed by its name
alone and listed in `Identity.unhashed`: an equal hash then does not mean equal behaviour.

What a version consists of is decided elsewhere (`registry/parts.py`); this module reads files and knows no settings.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import stat
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, TypeAlias

from agentloop.errors import ConfigError, boundary
from agentloop.types import content_hash

SKIPPED = ".git"
"""Name of files and folders that are never part of a program."""
BYTE_CODE = ("__pycache__", ".pyc")
"""Folder and suffix of the files that Python makes from sources; they differ between machines."""
FILE_BITS, FOLDER_BITS = 0o6555, 0o555
"""Mode bits that count: who may read and run it, and set-user-ID. Write bits follow the umask of whoever copied it."""


@dataclass(frozen=True)
class Value:
    """Settings, a prompt, a list of names: any value that JSON can express."""

    tag: ClassVar[str] = "Value"
    """Its part of the hash. It stays the same, whatever the class is called."""
    value: object


@dataclass(frozen=True)
class FileContents:
    """A file, or a folder with everything below it, by contents."""

    tag: ClassVar[str] = "Files"
    path: Path
    follow: bool = False
    """False hashes a symbolic link by its target's text, as a sandbox that shows only this folder resolves it.
    True reads through links, as code that runs on this machine does."""
    belongs_to_machine: bool = False
    """True for an interpreter and an installed package: a copy of them would not run elsewhere."""


@dataclass(frozen=True)
class Digest:
    """Contents that were hashed elsewhere, such as weights."""

    tag: ClassVar[str] = "Digest"
    sha256: str


@dataclass(frozen=True)
class Outside:
    """A part without a content hash: its name counts, and what it does may change behind that name."""

    tag: ClassVar[str] = "Outside"
    name: object
    """As for `Value`."""
    label: str
    """For people, in a few words."""


Part: TypeAlias = Value | FileContents | Digest | Outside


@dataclass(frozen=True)
class Identity:
    """What `identity` returns."""

    hash: str
    """64 hex digits."""
    parts: Mapping[str, str]
    """Hash of each part, 64 hex digits, by its name."""
    unhashed: tuple[str, ...] = ()
    """Labels of the parts that have no content hash."""

    def changed(self, other: Mapping[str, str]) -> list[str]:
        """Names of the parts that differ from `other`, those that only one side has included."""
        return sorted(name for name in {*self.parts, *other} if self.parts.get(name) != other.get(name))


def identity(parts: Mapping[str, Part]) -> Identity:
    """The identity of whatever consists of `parts`; their order does not matter.

    Raises ConfigError for a file that cannot be read, and for one that is neither file, folder nor link.
    """
    hashes = {name: content_hash([part.tag, _content(part)]) for name, part in sorted(parts.items())}
    unhashed = tuple(part.label for _, part in sorted(parts.items()) if isinstance(part, Outside))
    return Identity(_hash_of(hashes), hashes, unhashed)


def _hash_of(hashes: Mapping[str, str]) -> str:
    return content_hash({"identity": 1, "parts": hashes})


def with_parts(base: Identity, parts: Mapping[str, Part], *, without: str) -> Identity:
    """`base` with `parts` in place of those called `without` or `without.NAME`; it keeps every label of `unhashed`."""
    more = identity(parts)
    others = {name: value for name, value in base.parts.items() if name.partition(".")[0] != without}
    hashes = dict(sorted({**others, **more.parts}.items()))
    labels = tuple(dict.fromkeys((*base.unhashed, *more.unhashed)))
    return Identity(_hash_of(hashes), hashes, labels)


def files_hash(path: Path, *, follow: bool = False) -> str:
    """64 hex digits of a file, or of a folder with everything below it. Files are streamed.

    Of each entry these count: name, kind, `FILE_BITS` or `FOLDER_BITS`, and bytes or link target. These do not: times,
    owner, where `path` is and what it is called, empty folders, `.git`, and `*.pyc` in `__pycache__`.
    follow: see `FileContents`. Raises ConfigError.
    """
    with boundary(ConfigError, f"{path}: cannot be read; correct its permissions or name another"):
        top = Path(os.path.realpath(path))
        if not top.exists():
            raise ConfigError(f"{path}: no such file or folder; correct the path")
        digest = hashlib.sha256()
        for name, entry in sorted(_entries(top, follow)):
            for field in (name, *_described(entry, follow)):
                digest.update(b"%d:%b" % (len(field), field))  # lengths keep neighbouring fields apart
        return digest.hexdigest()


def copy_files(path: Path, target: Path, *, follow: bool = False) -> None:
    """Write everything of `path` that `files_hash` counts to `target`, so that both have the same hash.

    Folders that exist are filled. Raises ConfigError for what cannot be read or written.
    """
    with boundary(ConfigError, f"{path}: cannot be copied to {target}; make room, or correct its permissions"):
        top = Path(os.path.realpath(path))
        modes: list[tuple[Path, int]] = []
        for name, entry in sorted(_entries(top, follow)):
            place = target / os.fsdecode(name)
            place.parent.mkdir(parents=True, exist_ok=True)
            is_link = entry.is_symlink() and not (follow and entry.exists())
            if place.is_symlink() or place.is_file():
                place.unlink()
            if is_link:
                place.symlink_to(os.readlink(entry))
            elif entry.is_dir():
                place.mkdir(exist_ok=True)
                modes.append((place, entry.stat().st_mode))
            else:
                shutil.copy2(entry, place)
        for place, mode in modes:
            place.chmod(stat.S_IMODE(mode) | stat.S_IWUSR)


def _content(part: Part) -> object:
    if isinstance(part, Value):
        return part.value
    if isinstance(part, FileContents):
        return files_hash(part.path, follow=part.follow)
    if isinstance(part, Digest):
        return part.sha256
    return part.name


def _entries(top: Path, follow: bool) -> Iterator[tuple[bytes, Path]]:
    """(name below `top`, path) of every file and link that counts, and of every folder that one of them is in."""
    if not top.is_dir():
        yield b"", top
        return
    waiting = [(top, frozenset({top}))]
    folders = {top}
    while waiting:
        folder, above = waiting.pop()
        for entry in os.scandir(folder):
            path = Path(entry.path)
            if entry.name == SKIPPED or (folder.name, path.suffix) == BYTE_CODE:
                continue
            if entry.is_dir(follow_symlinks=follow):
                place = Path(os.path.realpath(path))
                if place not in above:  # a link to a folder that it is in has no end
                    waiting.append((path, above | {place}))
                continue
            yield _name(path, top), path
            folders.update(parent for parent in path.parents if parent.is_relative_to(top))
    yield from ((_name(folder, top), folder) for folder in folders)


def _name(path: Path, top: Path) -> bytes:
    return os.fsencode(path.relative_to(top).as_posix())


def _described(path: Path, follow: bool) -> tuple[bytes, ...]:
    """Kind, mode bits and contents of one entry. Raises ConfigError for a special file."""
    mode = (path.stat() if follow and path.exists() else path.lstat()).st_mode
    if stat.S_ISLNK(mode):
        return b"link", b"", os.fsencode(os.readlink(path))
    if stat.S_ISDIR(mode):
        return b"folder", b"%o" % (mode & FOLDER_BITS), b""
    if not stat.S_ISREG(mode):
        raise ConfigError(f"{path}: a special file, and a version consists of files, folders and links; remove it")
    with path.open("rb") as file:
        return b"file", b"%o" % (mode & FILE_BITS), hashlib.file_digest(file, "sha256").digest()
