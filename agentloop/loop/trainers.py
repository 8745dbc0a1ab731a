"""Settings -> trainer: what makes the versions of this project. The built-in ones are entry points like any other.

Torch is imported here only when weights of our own are to be made.
"""

from __future__ import annotations

from agentloop.errors import ConfigError, extra
from agentloop.identity import identity
from agentloop.loop.fixed import FixedTrainer
from agentloop.loop.project import Project
from agentloop.plugins import load_part
from agentloop.protocols import ProjectTrainer
from agentloop.registry.parts import agent_parts, policy_parts
from agentloop.registry.policies import fixed_policy, interrupts_wait, script

GROUP = "trainers"
WEIGHTS = "grpo"
"""Trainer of `[policy] kind = "tiny"`."""
FIXED = "fixed"
"""Trainer of any other policy."""


def make_trainer(project: Project) -> ProjectTrainer:
    """As `[train] trainer` says, else `[policy]`. Raises ConfigError or PluginError for what cannot be made."""
    name = project.config.train.trainer
    if name is None:
        name = WEIGHTS if project.config.policy.kind == "tiny" else FIXED
    trainer: ProjectTrainer = load_part(GROUP, name, {"project": project}, base=project.folder)
    return trainer


def grpo(project: Project) -> ProjectTrainer:
    """A warm start, then GRPO, on weights of our own. Raises ConfigError without the packages for that."""
    try:
        with interrupts_wait():
            from agentloop.loop.learner import TinyTrainer
    except ImportError as error:
        raise ConfigError(f"policy 'tiny' needs {error.name}; {extra('train')}") from None
    tasks = project.suite.tasks
    settings = project.config
    demonstrator = script(tasks, project.folder, settings.warm_start.demonstrator, project.suite.name)
    parts = policy_parts(settings.policy, project.folder)
    parts |= agent_parts(settings.agent, project.folder, tasks)
    return TinyTrainer(project, demonstrator, identity(parts).hash)


def fixed(project: Project) -> ProjectTrainer:
    """A version whenever `[policy]` or `[agent]` changes; nothing is trained."""
    tasks = project.suite.tasks
    settings = project.config
    policy, parts = fixed_policy(settings.policy, project.folder, tasks, project.suite.name, settings.prices)
    acting = identity({**parts, **agent_parts(settings.agent, project.folder, tasks)})
    return FixedTrainer(project, policy, acting.hash)
