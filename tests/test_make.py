"""`make test` stops the services that it started, however the tests end; `make soak` takes one slice."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from argparse import ArgumentTypeError
from itertools import chain
from pathlib import Path

import pytest
from conftest import part_of, slice_of

ROOT = Path(__file__).parents[1]
SERVICES = 'echo "$1 $AGENTLOOP_SERVICES" >>said\n'


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A checkout with an environment that is made, whose services only write down what is asked of them."""
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, tmp_path)
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests/services.sh").write_text(SERVICES)
    (tmp_path / ".venv/bin").mkdir(parents=True)
    for stamp in (".python", ".dev"):
        (tmp_path / ".venv" / stamp).touch()
    return tmp_path


def make_test(checkout: Path, pytest_script: str) -> subprocess.Popen[str]:
    """`make test` in a process group of its own, with a shell script in place of pytest."""
    program = checkout / ".venv/bin/pytest"
    program.write_text(f"#!/bin/sh\n{pytest_script}\n")
    program.chmod(0o755)
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("MAKE", "MFLAGS", "AGENTLOOP"))}
    return subprocess.Popen(
        ["make", "test", "PYTHON=python3"],
        cwd=checkout,
        env=environment,
        start_new_session=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )


@pytest.mark.parametrize("code", [0, 1])
def test_services_are_stopped_and_the_exit_code_is_the_tests(checkout: Path, code: int) -> None:
    with make_test(checkout, f"exit {code}") as process:
        process.communicate(timeout=20)
    assert (process.returncode != 0) == (code != 0)
    state = checkout / ".venv/services"
    assert (checkout / "said").read_text().splitlines() == [f"start {state}", f"stop {state}"]


def test_services_are_stopped_on_ctrl_c(checkout: Path) -> None:
    with make_test(checkout, "echo running; exec sleep 30") as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "running\n"
        os.killpg(process.pid, signal.SIGINT)
        process.communicate(timeout=20)
    assert process.returncode != 0
    assert [line.split()[0] for line in (checkout / "said").read_text().splitlines()] == ["start", "stop"]


@pytest.mark.parametrize("number", ["", "0", "9", "1 2", "x"])
def test_a_slice_that_is_none_is_refused(number: str) -> None:
    done = subprocess.run(
        ["make", "--silent", "--assume-old=.venv/.dev", "soak", f"SLICE={number}"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert done.stderr.startswith(f"no slice '{number}'; run make soak SLICE=n")


def test_the_slices_are_all_tests_once(request: pytest.FixtureRequest) -> None:
    tests = [request.node, *request.session.items[:200]]
    slices = [part_of(tests, (number, 8)) for number in range(1, 9)]
    assert sorted(map(id, chain.from_iterable(slices))) == sorted(map(id, tests))


@pytest.mark.parametrize("text", ["", "0/8", "9/8", "1", "1/", "a/b", "-1/8"])
def test_a_slice_that_cannot_be_is_refused(text: str) -> None:
    with pytest.raises(ArgumentTypeError, match="write one as 3/8"):
        slice_of(text)
