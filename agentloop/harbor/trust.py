"""Which of an agent's changes to the file system reach the sandbox in which its work is judged.

An agent in a shared sandbox was root, so every program there may be its own by now. The tests therefore
run in a fresh sandbox of the image, and get the agent's files there, but none that would decide what a
program of the image does: the image's programs and libraries are never replaced, and what is loaded
without being asked for (`sitecustomize`, `.pth`, `ld.so.preload`, a second `python3` earlier in the
path, a `pytest` plugin) stays behind. New programs and packages come along: installing is work, too.
What the tests themselves execute of the agent's work is theirs to fence.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from enum import Enum
from pathlib import PurePosixPath

from agentloop.sandbox.canaries import FOLDER

LEFT_OUT = (
    "/proc",
    "/sys",
    "/dev",
    "/run/agentloop",
    "/tests",
    "/solution",
    FOLDER,
    "/logs/verifier",
    "/.dockerenv",
    "/etc/hostname",
    "/etc/hosts",
    "/etc/resolv.conf",
    "/etc/mtab",
)
"""Not the image's and not the agent's work: the kernel's, the engine's, ours and the verifier's."""
PROGRAMS = ("/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32", "/usr")
DATA = re.compile(r"/usr/((local/)?share/(?!perl|python|keyrings)|src/|include/|local/(src|etc|var)/)")
"""Below PROGRAMS, and yet what a task may be about: a page of a web server, a header."""
LOADED_CONFIG = re.compile(
    r"/etc/(ld\.so|alternatives(/|$)|nsswitch\.conf|pam\.|security/|environment$|profile|bash|zsh|python|perl"
    r"|ssl/openssl\.cnf|gitconfig$|pip\.conf$|apt/|dpkg/|uv/|curlrc$|wgetrc$)"
    r"|/(root|home/[^/]+)/(\.config/(pip|uv|go)(/|$)|\.pip/|\.cargo/config|\.(curlrc|wgetrc|npmrc|pydistutils\.cfg)$)"
)
"""Configuration that decides which code any program runs, or what tests that install their tools get."""
CACHES = re.compile(r"/(root|home/[^/]+)/\.cache/(pip|uv)(/|$)|/var/(cache|lib)/apt/|/etc/ld\.so\.cache")
"""What programs keep of what they fetched, and believe."""
TEST_TOOL = re.compile(
    r"/(?:site|dist)-packages/(?:_?pytest|pluggy|iniconfig)(?:/|-[\d.]+\.(?:dist|egg)-info|\.py$|$)"
    r"|/bin/(?:pytest|py\.test)$"
)
"""Tests of an image without it bring their own; an agent's is for the agent."""
FETCHERS = re.compile(r"/bin/uvx?$|local/s?bin/(curl|wget|apt(-get)?|dpkg)$")
"""So do these: tests bring theirs, and anybody may have installed a uv for the work."""
PYTHON_LOADS = re.compile(r"(^|/)(sitecustomize|usercustomize)(\.py|\.pyc|\.[^/]*\.so|/|$)|(^|/)ld\.so\.preload$")
"""Wherever it lies."""
SITE = re.compile(r"/(?:site|dist)-packages/([^/]+)")
STDLIB = re.compile(r"/lib(?:64)?/python3(?:\.\d+)?/(?!site-packages/|dist-packages/)(?:lib-dynload/)?([^/]+)")
INTERPRETER = re.compile(r"(/.+)/(?:lib(?:64)?/python3[^/]*/os\.py|lib/node_modules/npm/package\.json|pyvenv\.cfg)$")
"""In a folder with one of these is a Python or Node, to which a link or a shim on the path may lead."""
ZIPPED = re.compile(r"/lib(?:64)?/python3\d+\.zip$")
LIBRARY = re.compile(r"/[^/]+\.so(\.[\d.]+)?$")
TOP_FILES = re.compile(r"/(conftest\.py|\.?pytest\.(ini|toml)|tox\.ini|setup\.cfg|pyproject\.toml|uv\.toml)$")
"""At the top pytest and uv read them for /tests too."""
GIT_RUNS = re.compile(rb"(?i)fsmonitor|hookspath|command|pager|editor|textconv|external|include|=\s*\"?!")
"""Of git's settings those that name a program; a name and an address may come along."""
HOME = re.compile(r"/.*\.local/(bin|lib)/")
"""Of a home wherever it is: a user may have been given another."""
LEADS = re.compile(
    r"/(root|home(/[^/]+)?|etc)$|/(root|home/[^/]+)/\.(local|config|cache|cargo)(/|$)|/etc/(apt|python|pip|uv|ssl|profile|ld)"
    r"|.*/((site|dist)-packages|python3(\.\d+)?|s?bin|lib(32|64)?|gconv|glibc-hwcaps)$"
)
"""As a link one of these would lead a program to what is not looked for where it really lies."""
TELLING = re.compile(
    r"(^|/)(sh|dash|bash|busybox|env|python[\d.]*|pytest|py\.test|tee|cat|grep|diff|cmp|test|\[)$"
    r"|site-packages/_?pytest/|dist-packages/_?pytest/|(^|/)(sitecustomize|usercustomize)\.|ld\.so\.preload$|/python3\d+\.zip$"
    r"|/conftest\.py$|/pytest\.ini$|/ld-linux[^/]*$|/libc\.so"
)
"""Of what stays behind, that which nobody changes for the work's sake: the verifier's own tools and what they load."""

PACKAGES = frozenset({"/var/lib/dpkg/status", "/lib/apk/db/installed", "/usr/lib/apk/db/installed"})
"""Where a package manager writes what it installed: an upgrade changes any tool, and nobody is accused of it."""


class Fate(Enum):
    """What becomes of a change."""

    carried = "carried"
    kept_back = "kept back"
    ignored = "ignored"
    """A cache, or nothing of the agent's: leaving it behind changes no result."""


@dataclass(frozen=True)
class Trust:
    """What is known of a fresh sandbox of the image, and with it what may be brought there."""

    paths: Collection[str]
    """Everything that is in it."""
    path: str
    """Its $PATH."""
    workdir: str = "/"
    _folders: tuple[str, ...] = field(init=False)
    _programs: frozenset[str] = field(init=False)
    _libraries: frozenset[str] = field(init=False)
    _modules: frozenset[str] = field(init=False)

    def __post_init__(self) -> None:
        on_path = {str(PurePosixPath(folder)) for folder in self.path.split(":") if folder.startswith("/")}
        # An interpreter of its own, such as /opt/venv/bin: with its libraries, unless that is where the work is.
        prefixes = {str(PurePosixPath(folder).parent) for folder in on_path if folder.endswith(("/bin", "/sbin"))}
        off_path = {match[1] for path in self.paths if (match := INTERPRETER.match(path))}
        prefixes |= {folder for folder in off_path if not below(folder, (self.workdir,))}
        prefixes = {p for p in prefixes if p != "/" and not below(self.workdir, (p,))} | on_path
        set_ = object.__setattr__
        set_(self, "_folders", tuple(sorted({*PROGRAMS, *prefixes})))
        set_(self, "_programs", frozenset(_name(p) for p in self.paths if _folder(p) in _twins(on_path)))
        set_(self, "_libraries", frozenset(_name(p) for p in self.paths if LIBRARY.search(p)))
        modules = {_module(match[1]) for p in self.paths if (match := SITE.search(p) or STDLIB.search(p))}
        set_(self, "_modules", frozenset(modules - {"site-packages", "dist-packages", "__pycache__"}))

    def fate(self, path: str, *, is_link: bool = False) -> Fate:
        """What becomes of a file, folder or link that the agent made or changed at the absolute `path`."""
        if below(path, LEFT_OUT) or path in ("/", "/logs"):
            return Fate.ignored
        is_program = below(path, self._folders) and not DATA.match(path)
        if is_program and (path.endswith((".pyc", ".pyo")) or "/__pycache__" in path):
            return Fate.ignored
        if CACHES.match(path):
            return Fate.ignored
        if PYTHON_LOADS.search(path) or LOADED_CONFIG.match(path) or TOP_FILES.match(path):
            return Fate.kept_back
        if is_link and not below(path, (self.workdir,)) and LEADS.match(path):
            return Fate.kept_back
        if is_program and path in self.paths:
            return Fate.kept_back
        is_installed = is_program or bool(HOME.match(path))
        if is_installed and self._takes_the_place(path):
            return Fate.kept_back
        if is_installed and (TEST_TOOL.search(path) or FETCHERS.search(path)):
            return Fate.ignored
        return Fate.carried

    def _takes_the_place(self, path: str) -> bool:
        """Whether the new file `path` would be found before one of the image's, or be loaded unasked."""
        if _folder(path).endswith(("/bin", "/sbin")) and _name(path) in self._programs:
            return True
        if ZIPPED.search(path) or "/glibc-hwcaps/" in path or "/gconv/" in path:
            return True
        if LIBRARY.search(path) and _name(path) in self._libraries and not SITE.search(path):
            return True
        match = SITE.search(path) or STDLIB.search(path)
        return match is not None and _module(match[1]) in self._modules


def fate_by_content(path: str, read: Callable[[], bytes]) -> Fate:
    """What becomes of a file that may come along by its name: Python, pytest and git load code by what some say.

    The entry points of a plugin are ignored, because every other package brings one (anyio does) and
    no tests need those that the image lacks; a `.pth` file that runs code is missed, but for setuptools'.
    """
    if path.endswith("/entry_points.txt") and b"pytest11" in read():
        return Fate.ignored
    if path.endswith(".pth") and any(line.startswith((b"import ", b"import\t")) for line in read().splitlines()):
        return Fate.ignored if path.endswith("/distutils-precedence.pth") else Fate.kept_back
    if path.endswith(("/.gitconfig", "/.config/git/config")) and GIT_RUNS.search(read()):
        return Fate.kept_back
    return Fate.carried


def below(path: str, folders: Collection[str]) -> bool:
    """Whether `path` is one of `folders`, or in one."""
    return any(path == folder or path.startswith(folder + "/") for folder in folders)


def _twins(folders: Collection[str]) -> set[str]:
    """The same folders by both names that a merged /usr gives them."""
    return {*folders, *(f.removeprefix("/usr") for f in folders), *(f"/usr{f}" for f in folders)}


def _folder(path: str) -> str:
    return path.rpartition("/")[0]


def _name(path: str) -> str:
    return path.rpartition("/")[2]


def _module(entry: str) -> str:
    """What an entry of a site folder is imported as; of a distribution's records, a name that is no module's."""
    return entry if entry.endswith((".dist-info", ".egg-info")) else entry.partition(".")[0]
