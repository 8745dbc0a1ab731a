"""Settings -> learner: who makes the versions of this project.

Torch is imported here only when weights of our own are to be made.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from agentloop.errors import ConfigError, boundary, counted, extra
from agentloop.loop.fixed import FixedLearner
from agentloop.loop.project import Project
from agentloop.loop.turns import Learner
from agentloop.plugins import load_object
from agentloop.policies.litellm import LiteLLMPolicy
from agentloop.policies.openai import OpenAIPolicy
from agentloop.policies.replay import ReplayPolicy
from agentloop.policies.scripted import ScriptedPolicy, oracle
from agentloop.policies.vllm import VLLMPolicy
from agentloop.types import content_hash


def make_learner(project: Project) -> Learner:
    """As `[policy]` says. Raises ConfigError or PluginError for what cannot be made."""
    settings = project.config.policy
    if settings.kind == "tiny":
        try:
            with _interrupts_wait():
                from agentloop.loop.learner import TinyLearner
        except ImportError as error:
            raise ConfigError(f"policy 'tiny' needs {error.name}; {extra('train')}") from None
        return TinyLearner(project, script(project, project.config.warm_start.demonstrator))
    identity: dict[str, object] = {"policy": settings.identity}
    if settings.kind in ("openai", "vllm"):
        kind = OpenAIPolicy if settings.kind == "openai" else VLLMPolicy
        policy = kind(settings.base_url, settings.model, api_key=settings.api_key, temperature=settings.temperature)
        return FixedLearner(project, policy, content_hash(identity))
    if settings.kind == "litellm":
        hosted = LiteLLMPolicy(
            settings.model,
            base_url=settings.base_url,
            api_key=settings.api_key,
            temperature=settings.temperature,
            usd_per_million=settings.usd_per_million,
        )
        return FixedLearner(project, hosted, content_hash(identity))
    if settings.kind == "replay":
        played = ReplayPolicy(project.folder / settings.traces if settings.traces else None)
        return FixedLearner(project, played, content_hash({**identity, "recorded": played.hash}))
    identity["source"] = _source(project.folder, settings.script)
    return FixedLearner(project, script(project, settings.script), content_hash(identity))


def script(project: Project, name: str | None) -> ScriptedPolicy:
    """The program called `name`, or the one that plays the tasks' own solutions."""
    tasks = project.suite.tasks
    if name is None:
        unsolved = [task.id for task in tasks if not task.solution]
        if unsolved:
            raise ConfigError(
                f"suite {project.suite.name!r} has {counted(len(unsolved), 'task')} without a solution to play, "
                f"such as {unsolved[0]!r}; add one to each, or name a script in agentloop.toml"
            )
        return oracle(tasks)
    with boundary(ConfigError, "the script cannot be used; mend it", script=name):
        made: ScriptedPolicy = load_object("policies", name, base=project.folder)(tasks)
    if not isinstance(made, ScriptedPolicy):
        raise ConfigError(f"script {name!r} gave a {type(made).__name__}; it must give a ScriptedPolicy")
    return made


@contextmanager
def _interrupts_wait() -> Iterator[None]:
    """Ctrl-C counts after the block: torch, interrupted while it loads, passes it off as an ImportError."""
    if threading.current_thread() is not threading.main_thread():  # where no signal arrives
        yield
        return
    pressed: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, _: pressed.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if pressed:
        raise KeyboardInterrupt


def _source(folder: Path, name: str | None) -> str:
    """The text of a script file, so that editing it makes another policy."""
    path = folder / (name or "").rsplit(":", 1)[0]
    return path.read_text() if name and path.suffix == ".py" and path.is_file() else ""
