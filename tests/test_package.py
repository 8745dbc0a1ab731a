"""`import agentloop` is light: what is heavy is imported where it is used."""

from __future__ import annotations

import subprocess
import sys
import time
import tomllib
from importlib.metadata import distribution
from pathlib import Path

import pytest

import agentloop

HEAVY = ("torch", "transformers", "litellm", "celery", "fastapi", "docker", "sqlalchemy", "jinja2")
PROJECT = Path(__file__).parents[1] / "pyproject.toml"


def imported(module: str) -> set[str]:
    code = f"import sys, {module}; print(*sorted({{name.split('.')[0] for name in sys.modules}}))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(done.stdout.split())


def test_import_loads_nothing_heavy() -> None:
    assert imported("agentloop") & set(HEAVY) == set()


@pytest.mark.slow
def test_the_config_and_the_types_load_nothing_heavy() -> None:
    assert imported("agentloop.config, agentloop.types, agentloop.protocols, agentloop.plugins") & set(HEAVY) == set()


def test_import_takes_less_than_half_a_second() -> None:
    took = []
    for _ in range(3):
        started = time.perf_counter()
        subprocess.run([sys.executable, "-c", "import agentloop"], check=True)
        took.append(time.perf_counter() - started)
    assert min(took) < 0.5


def test_what_is_declared_is_what_is_installed_and_loads() -> None:
    project = tomllib.loads(PROJECT.read_text())["project"]
    groups = {"console_scripts": project["scripts"], **project["entry-points"]}
    declared = {(group, name, value) for group, points in groups.items() for name, value in points.items()}
    installed = distribution("agentloop-engine").entry_points
    assert {(p.group, p.name, p.value) for p in installed} == declared, "stale: pip install --no-deps -e ."
    for point in installed:
        assert callable(point.load()) or point.group == "pytest11", point.name  # whose plugins are modules


def test_the_version_is_the_package_s() -> None:
    assert agentloop.__version__ == tomllib.loads(PROJECT.read_text())["project"]["version"]
