"""The shape of the source: short commands, few parameters, short functions, no import cycles inside a package.

Exceptions are listed by name. A list may only shrink: a name in it that needs no exception any more fails, too.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]
ENGINE, COMMANDS = ROOT / "agentloop", ROOT / "cli" / "agentloop_cli"
MAX_PARAMETERS, MAX_LINES, MAX_COMMAND_LINES = 8, 60, 15

LONG_COMMANDS: frozenset[str] = frozenset()
"""Commands whose bodies are longer than MAX_COMMAND_LINES."""
MANY_PARAMETERS: frozenset[str] = frozenset()
LONG_FUNCTIONS: frozenset[str] = frozenset(
    {
        "agentloop.store.migrations.versions.v0001_episodes:upgrade",  # a migration never changes again
    }
)
CYCLES: frozenset[frozenset[str]] = frozenset()
"""Modules of one package that import each other."""


@dataclass(frozen=True)
class Function:
    name: str
    n_parameters: int
    n_lines: int
    n_body_lines: int
    is_command: bool


@cache
def modules() -> tuple[tuple[str, ast.Module], ...]:
    """(dotted name, tree)."""
    trees = []
    for base in (ENGINE, COMMANDS):
        for path in sorted(base.rglob("*.py")):
            parts = path.relative_to(base.parent).with_suffix("").parts
            trees.append((".".join(parts[:-1] if parts[-1] == "__init__" else parts), ast.parse(path.read_text())))
    return tuple(trees)


@cache
def functions() -> tuple[Function, ...]:
    return tuple(
        measured(module, node)
        for module, tree in modules()
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    )


def measured(module: str, node: ast.FunctionDef | ast.AsyncFunctionDef) -> Function:
    arguments = node.args
    every = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
    annotations = " ".join(ast.unparse(one.annotation) for one in every if one.annotation)
    is_command = module.startswith("agentloop_cli") and any(
        sign in annotations for sign in ("typer.Option", "typer.Argument", "AsJson", "ProjectFolder", "Where")
    )
    body = node.body[1:] if ast.get_docstring(node) is not None else node.body
    return Function(
        name=f"{module}:{node.name}",
        n_parameters=sum(one.arg not in ("self", "cls") for one in every),
        n_lines=(node.end_lineno or node.lineno) - node.lineno + 1,
        n_body_lines=(body[-1].end_lineno or 0) - body[0].lineno + 1 if body else 0,
        is_command=is_command,
    )


def test_a_command_parses_calls_and_prints() -> None:
    long = {one.name for one in functions() if one.is_command and one.n_body_lines > MAX_COMMAND_LINES}
    assert long == LONG_COMMANDS


def test_no_function_but_a_command_has_many_parameters() -> None:
    many = {one.name for one in functions() if not one.is_command and one.n_parameters > MAX_PARAMETERS}
    assert many == MANY_PARAMETERS


def test_no_function_but_a_command_is_long() -> None:
    long = {one.name for one in functions() if not one.is_command and one.n_lines > MAX_LINES}
    assert long == LONG_FUNCTIONS


def test_modules_of_a_package_do_not_import_each_other_in_a_circle() -> None:
    assert cycles(imports()) == CYCLES


def imports() -> dict[str, frozenset[str]]:
    """Module -> the modules of its own package that it imports anywhere, also in functions and for types alone."""
    trees = dict(modules())
    return {
        name: frozenset(
            target
            for node in ast.walk(tree)
            for target in targets(node, trees)
            if target != name and target.rpartition(".")[0] == name.rpartition(".")[0]
        )
        for name, tree in trees.items()
    }


def targets(node: ast.AST, trees: Mapping[str, ast.Module]) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names if alias.name in trees]
    if not isinstance(node, ast.ImportFrom) or node.module is None:
        return []
    submodules = [f"{node.module}.{alias.name}" for alias in node.names]
    return [name for name in (node.module, *submodules) if name in trees]


def cycles(graph: Mapping[str, frozenset[str]]) -> set[frozenset[str]]:
    """Groups of modules each of which reaches every other one."""
    reached = {start: reachable(graph, start) for start in graph}
    groups = {frozenset(other for other in reached[start] if start in reached[other]) | {start} for start in graph}
    return {group for group in groups if len(group) > 1}


def reachable(graph: Mapping[str, frozenset[str]], start: str) -> set[str]:
    seen: set[str] = set()
    waiting = [start]
    while waiting:
        for target in graph[waiting.pop()] - seen:
            seen.add(target)
            waiting.append(target)
    return seen


def test_a_circle_is_seen() -> None:
    graph = {"p.a": frozenset({"p.b"}), "p.b": frozenset({"p.c"}), "p.c": frozenset({"p.a"}), "p.d": frozenset({"p.a"})}
    assert cycles(graph) == {frozenset({"p.a", "p.b", "p.c"})}
