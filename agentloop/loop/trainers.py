"""Settings -> trainer: what makes the versions of this project. The built-in ones are entry points like any other.

Torch is imported here only when weights of our own are to be made.
"""

from __future__ import annotations

from typing import Annotated, TypeAlias

from pydantic import Field

from agentloop.errors import ConfigError, extra
from agentloop.loop.fixed import FixedTrainer
from agentloop.loop.project import Project
from agentloop.options import load_options
from agentloop.protocols import Trainer
from agentloop.registry.policies import interrupts_wait
from agentloop.types import VersionKind

Positive: TypeAlias = Annotated[int, Field(ge=1)]

GROUP = "trainers"
WEIGHTS = "grpo"
"""Trainer of `[policy] kind = "tiny"`."""
FIXED = "fixed"
"""Trainer of any other policy."""


def make_trainer(project: Project) -> Trainer:
    """As `[train] kind` says, else `[policy]`.

    Raises ConfigError or PluginError for what cannot be made, for an option that it does not take, and for a `[train]`
    that nothing uses.
    """
    train = project.config.train
    if project.config.policy.kind != "tiny":
        project.present_actor()
    kind = train.kind or (WEIGHTS if project.config.policy.kind == "tiny" else FIXED)
    trainer: Trainer = load_options(GROUP, "train.options", kind, train.options, project.folder, {"project": project})
    missing = next((name for name in ("name", "version", "makes") if not hasattr(trainer, name)), None)
    if missing is not None:
        raise ConfigError(f"trainer {kind!r} has no {missing!r}; see `protocols.Trainer`")
    if trainer.makes is VersionKind.settings and "max_turns" in train.model_fields_set:
        raise ConfigError(
            f"[train] max_turns: the trainer {kind!r} makes no turns, so nothing uses it; leave it out, or name "
            "another [train] kind"
        )
    if trainer.makes is not VersionKind.weights and project.config.policy.kind == "tiny":
        raise ConfigError(
            f"[train] kind = {kind!r} makes no weights, and [policy] kind = 'tiny' has none to begin with; use "
            f"{WEIGHTS!r}, or another [policy]"
        )
    if kind == WEIGHTS and project.config.policy.kind != "tiny":
        raise ConfigError(f"[train] kind = {WEIGHTS!r} trains [policy] kind = 'tiny' alone; name another of the two")
    return trainer


def grpo(
    project: Project,
    *,
    steps_per_turn: Positive = 15,
    n_tasks: Positive = 12,
    group_size: Annotated[int, Field(ge=2)] = 16,
    learning_rate: Annotated[float, Field(gt=0.0)] = 4e-4,
    stop_at: Annotated[float, Field(gt=0.0, le=1.0)] = 0.97,
    n_threads: Positive = 1,
) -> Trainer:
    """A warm start, then GRPO, on weights of our own; the options are those of `TinyTrainer`.

    Raises ConfigError without the packages for that.
    """
    try:
        with interrupts_wait():
            from agentloop.loop.learner import TinyTrainer
    except ImportError as error:
        raise ConfigError(f"policy 'tiny' needs {error.name}; {extra('train')}") from None
    return TinyTrainer(
        project,
        steps_per_turn=steps_per_turn,
        n_tasks=n_tasks,
        group_size=group_size,
        learning_rate=learning_rate,
        stop_at=stop_at,
        n_threads=n_threads,
    )


def fixed(project: Project) -> Trainer:
    """Makes a version whenever `[policy]` or `[agent]` changes; nothing is trained."""
    return FixedTrainer(project)
