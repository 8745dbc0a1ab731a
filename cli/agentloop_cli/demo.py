"""The body of `agentloop demo`."""

from __future__ import annotations

import shlex
from pathlib import Path

from agentloop.errors import ConfigError
from agentloop_cli.render import stderr, stdout


def run_demo(seed: int, sandbox: str, out: Path, algorithm: str | None, *, overlay: bool, as_json: bool) -> None:
    """Make the project in `out`, or continue it, and run its loop. overlay: the agent on a hosted model, not ours.

    algorithm: what trains the weights; None is that of the demo in `out`, or `grpo`. Raises ConfigError.
    """
    from agentloop.demo.overlay import prepare_overlay_demo
    from agentloop.demo.project import prepare_demo
    from agentloop.sandbox.ladder import make_backend
    from agentloop_cli.run import run_project

    if overlay and algorithm is not None:
        raise ConfigError("--algorithm trains weights, and --overlay has none; use one of the two")
    backend = make_backend(sandbox, "--sandbox")
    state = "continuing the demo"
    if prepare_overlay_demo(out, seed) if overlay else prepare_demo(out, seed, algorithm):
        state = "new demo"
    stderr.print(f"{state} in {out}, seed {seed}, sandbox {backend.name}", markup=False)
    words = ["agentloop", "demo", "--seed", str(seed), "--sandbox", sandbox, "--out", str(out)]
    words += ["--overlay"] if overlay else ["--algorithm", algorithm] if algorithm else []
    run_project(out, backend, command=shlex.join(words), as_json=as_json)
    if overlay and not as_json:
        _show_texts(out)


def _show_texts(out: Path) -> None:
    """Which words the newest version changed."""
    from agentloop.registry.folders import read_overlay
    from agentloop.registry.serving import project_versions

    for version in project_versions(out)[-1:]:
        overlay = read_overlay(out / ".agentloop" / (version.artifact or ""))
        for component in overlay.components if overlay else ():
            before = set(component.original.splitlines())
            stdout.print(f"{component.name} of v{version.number}:", markup=False)
            for line in component.text.splitlines():
                if line not in before:
                    stdout.print(f"  + {line}", markup=False, soft_wrap=True)
