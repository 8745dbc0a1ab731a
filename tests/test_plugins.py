"""Parts by name, from inside and from outside: what is found, and what is said when it is not."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from agentloop.errors import PluginError
from agentloop.plugins import installed, load_object, load_part

PART = '''\
from __future__ import annotations
from dataclasses import dataclass

@dataclass
class WordCount:
    """1.0 when the final answer has at most `limit` words."""
    limit: int = 100
    name = "word_count"

    def __post_init__(self):
        if self.limit < 0:
            raise ValueError("limit must not be negative")

NUMBER = 3
'''


@pytest.fixture
def outside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package of somebody else's, installed as pip does it: modules and metadata in a folder on sys.path."""
    (tmp_path / "word_count_part.py").write_text(PART)
    info = tmp_path / "word_count_part-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: word-count-part\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[agentloop.verifiers]\n"
        "word_count = word_count_part:WordCount\n"
        "broken = word_count_part:Missing\n"
        "needs_torch = no_torch_part:Part\n"
    )
    (tmp_path / "no_torch_part.py").write_text("raise ModuleNotFoundError(\"No module named 'torch'\", name='torch')\n")
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


@pytest.fixture(autouse=True)
def forget() -> Iterator[None]:
    """Modules that a test loaded are forgotten after it."""
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        if "part" in name:
            del sys.modules[name]


@pytest.mark.usefixtures("outside")
def test_an_outside_package_is_used_like_a_built_in() -> None:
    assert load_part("verifiers", "word_count", {"limit": 3}).limit == 3
    assert {"exact", "word_count"} <= set(installed("verifiers"))


@pytest.mark.usefixtures("outside")
def test_module_and_class_work_wherever_a_name_does() -> None:
    assert load_part("verifiers", "word_count_part:WordCount", {"limit": 4}).limit == 4


def test_a_file_and_class_need_no_installation(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(PART)
    part = load_part("verifiers", "mine.py:WordCount", {"limit": 5}, base=tmp_path)
    assert part.limit == 5
    assert sys.modules[type(part).__module__].__file__ == str(tmp_path / "mine.py")


def test_two_files_of_one_name_are_two_modules(tmp_path: Path) -> None:
    for n in (1, 2):
        (tmp_path / f"{n}").mkdir()
        (tmp_path / f"{n}" / "mine.py").write_text(PART)
    made = [load_object("verifiers", f"{n}/mine.py:WordCount", base=tmp_path) for n in (1, 2)]
    assert made[0].__module__ != made[1].__module__


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("exat", r"no verifiers 'exat' \(installed: .*exact.*\); did you mean 'exact'\?"),
        ("zzz", r"no verifiers 'zzz' .*; a part of your own is named `file.py:Class`"),
        ("nowhere.py:Part", r"'nowhere.py:Part' cannot be loaded .*No such file"),
        (
            "mine.py:WordCont",
            r"'mine.py:WordCont': no 'WordCont' in mine.py \(defined there: WordCount.*\); did you mean 'WordCount'\?",
        ),
        ("mine.py:NUMBER", r"'mine.py:NUMBER' cannot be called: .*not a callable"),
        ("wrong.py:Part", r"'wrong.py:Part' cannot be loaded .*ZeroDivisionError"),
        ("syntax.py:Part", r"'syntax.py:Part' cannot be loaded .*SyntaxError"),
        ("no_such_module_part:Part", r"cannot be loaded .*No module named 'no_such_module_part'"),
        ("broken", r"'broken' cannot be loaded: .*Missing"),
        (
            "needs_torch",
            r"'needs_torch' cannot be loaded: .*torch.*; `pip install -e '.\[train\]'",
        ),
    ],
)
def test_what_cannot_be_loaded_is_named_with_the_next_move(outside: Path, kind: str, message: str) -> None:
    (outside / "mine.py").write_text(PART)
    (outside / "wrong.py").write_text("1 / 0\n")
    (outside / "syntax.py").write_text("class (:\n")
    with pytest.raises(PluginError, match=message):
        load_part("verifiers", kind, base=outside)


def test_an_absolute_path_is_said_once(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(PART)
    with pytest.raises(PluginError) as caught:
        load_part("verifiers", f"{tmp_path}/mine.py:WordCont")
    assert str(caught.value) == (
        f"verifiers '{tmp_path}/mine.py:WordCont': no 'WordCont' in mine.py (defined there: WordCount); "
        "did you mean 'WordCount'?"
    )


def test_a_bad_option_is_met_with_those_there_are(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(PART)
    with pytest.raises(PluginError, match=r"unexpected keyword argument 'limt' \(options: limit; given: limt\)"):
        load_part("verifiers", "mine.py:WordCount", {"limt": 3}, base=tmp_path)
    with pytest.raises(PluginError, match="refuses its options: ValueError: limit must not be negative"):
        load_part("verifiers", "mine.py:WordCount", {"limit": -1}, base=tmp_path)


def test_a_file_that_failed_leaves_no_half_module(tmp_path: Path) -> None:
    (tmp_path / "wrong_part.py").write_text("1 / 0\n")
    with pytest.raises(PluginError):
        load_object("verifiers", "wrong_part.py:Part", base=tmp_path)
    assert not [name for name in sys.modules if "wrong_part" in name]
