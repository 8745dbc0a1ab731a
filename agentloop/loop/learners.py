"""Settings -> learner: who makes the versions of this project.

Torch is imported here only when weights of our own are to be made.
"""

from __future__ import annotations

from agentloop.errors import ConfigError, extra
from agentloop.identity import identity
from agentloop.loop.fixed import FixedLearner
from agentloop.loop.project import Project
from agentloop.loop.turns import Learner
from agentloop.plugins import load_part
from agentloop.registry.parts import agent_parts, policy_parts
from agentloop.registry.policies import fixed_policy, interrupts_wait, script


def make_learner(project: Project) -> Learner:
    """As `[train] trainer` says, else `[policy]`. Raises ConfigError or PluginError for what cannot be made."""
    trainer = project.config.train.trainer
    if trainer is not None:
        made: Learner = load_part("trainers", trainer, {"project": project}, base=project.folder)
        return made
    settings = project.config.policy
    if settings.kind == "tiny":
        try:
            with interrupts_wait():
                from agentloop.loop.learner import TinyLearner
        except ImportError as error:
            raise ConfigError(f"policy 'tiny' needs {error.name}; {extra('train')}") from None
        shown = script(project.suite.tasks, project.folder, project.config.warm_start.demonstrator, project.suite.name)
        agent = agent_parts(project.config.agent, project.folder, project.suite.tasks)
        return TinyLearner(project, shown, identity({**policy_parts(settings, project.folder), **agent}).hash)
    prices, tasks = project.config.prices, project.suite.tasks
    policy, parts = fixed_policy(settings, project.folder, tasks, project.suite.name, prices)
    acting = identity({**parts, **agent_parts(project.config.agent, project.folder, tasks)})
    return FixedLearner(project, policy, acting.hash)
