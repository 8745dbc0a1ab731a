"""REF -> who acts: one way to name a policy, for whatever compares some with others (`agentloop gate`, `bank`).

    v3, live                     a version of the project, with the project's agent
    FILE.toml                    [policy] and [agent] as in agentloop.toml; paths in it start at the file's folder
    scripted:FILE.py:function    a program that is called with the tasks; the path starts at the project's folder
    oracle                       each task's own solution

Nothing here rolls out an episode, and nothing is registered.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from agentloop.agents.gym.loop import GymLoop
from agentloop.agents.selection import choose_agent
from agentloop.config.layout import artifact_folder
from agentloop.config.sections import AgentSection, PolicySection, PriceSection
from agentloop.config.settings import CONFIG_FILE, known_secrets, load_config, load_policy, load_prices
from agentloop.costs.totals import Price, free, price
from agentloop.errors import ConfigError, extra
from agentloop.identity import Digest, Part, Value, identity
from agentloop.protocols import Agent, Policy
from agentloop.registry.artifacts import WEIGHTS, folder_hash
from agentloop.registry.parts import agent_parts
from agentloop.registry.policies import fixed_policy, interrupts_wait
from agentloop.registry.versions import Registry
from agentloop.rollout.actors import ORACLE, Actor
from agentloop.store.place import store_place
from agentloop.types import PolicyVersion, Purpose, Task, VersionKind

SCRIPTED = "scripted:"
LIVE = "live"
NUMBERED = re.compile(r"v[0-9]+")
OURS = ("tiny", "scripted", "replay")
"""Kinds of policies whose answers cost nothing."""


def resolve(ref: str, project: Path, tasks: Sequence[Task], suite: str) -> Actor:
    """What `ref` names. tasks: those it will be given, of `suite`.

    Raises ConfigError or PluginError, with what there is, for what cannot be had.
    """
    if ref == ORACLE or ref.startswith(SCRIPTED):
        name = ref.removeprefix(SCRIPTED) if ref != ORACLE else None
        settings = PolicySection(kind="scripted", script=name)
        if name is not None:
            _check_script(ref, name, project)
        return fixed_actor(ref, settings, AgentSection(), project, tasks, suite, ())
    if ref.endswith(".toml"):
        path = project / ref
        policy, agent = load_policy(path)
        if policy.kind == "tiny":
            raise ConfigError(
                f"{path}: [policy] kind is 'tiny', which is also the default: name a version of the project, such as "
                "v1, or add a [policy] of another kind"
            )
        return fixed_actor(ref, policy, agent, path.parent, tasks, suite, load_prices(project))
    if ref == LIVE or NUMBERED.fullmatch(ref):
        return _version(ref, project, tasks, suite)
    raise ConfigError(
        f"no policy {ref!r}; name a version of the project (vN or live), a FILE.toml with [policy], "
        f"{SCRIPTED}FILE.py:function, or {ORACLE}{_versions(project)}"
    )


def is_ref(name: str) -> bool:
    """Whether `name` is written as a REF; a policy or a function of Python has another name."""
    has_file = name.startswith(SCRIPTED) and ":" in name.removeprefix(SCRIPTED)
    return has_file or name in (ORACLE, LIVE) or name.endswith(".toml") or bool(NUMBERED.fullmatch(name))


def _check_script(ref: str, name: str, project: Path) -> None:
    """Raises ConfigError for the two slips of whoever writes such a REF."""
    file, _, function = name.rpartition(":") if not name.endswith(".py") else (name, "", "")
    if file.endswith(".py") and not (project / file).is_file():
        raise ConfigError(f"{ref}: no such file: {project / file}; paths of scripts start at the project's folder (-p)")
    if not function or not file:
        raise ConfigError(f"{ref}: of which function? add :function, as in {SCRIPTED}FILE.py:function")


def fixed_actor(
    ref: str,
    settings: PolicySection,
    agent: AgentSection,
    folder: Path,
    tasks: Sequence[Task],
    suite: str,
    prices: Sequence[PriceSection],
    version: PolicyVersion | None = None,
) -> Actor:
    """The policy and the agent of these settings, under the name `ref`.

    folder: where their paths start. version: what this is to be, as it was registered. Raises ConfigError, PluginError.
    """
    policy, parts = fixed_policy(settings, folder, tasks, suite, prices)
    acts = _agent(agent, folder, tasks)
    acting = identity({**parts, **agent_parts(agent, folder, tasks)})
    if version is not None and version.sha256 != acting.hash:
        raise ConfigError(
            f"{ref} (v{version.number}) was another policy or agent than {folder / CONFIG_FILE} and the files it names "
            "describe now; restore them, or name a policy with a FILE.toml of its own"
        )
    cost: Price = free if settings.kind in OURS else price(prices)
    return Actor(
        ref,
        acts,
        policy,
        acting,
        cost,
        packages=_packages(settings.kind, agent, tasks),
        version=version.number if version else 0,
    )


def _version(ref: str, project: Path, tasks: Sequence[Task], suite: str) -> Actor:
    place = store_place(project)
    if place.file is not None and not place.file.is_file():
        raise ConfigError(
            f"no project at {project}: it has no {place.file.relative_to(project)}; name the folder of one that has "
            "run with -p/--project"
        )
    config = load_config(project)
    store = place.open(create=False, secrets=known_secrets(project))
    try:
        registry = Registry(store)
        trained = store.task_ids(Purpose.train, Purpose.demonstrate)
        version = registry.live() if ref == LIVE else registry.get(int(ref[1:]))
    finally:
        store.close()
    if version is None:
        raise ConfigError(f"{project} has no policy version {ref!r}{_versions(project)}")
    if version.kind is VersionKind.weights:
        policy = _tiny(version, project, config.policy.temperature)
        agent = _agent(config.agent, project, tasks)
        weights: dict[str, Part] = {
            "policy": Value({"kind": "tiny", "temperature": config.policy.temperature}),
            "policy.weights": Digest(version.sha256),
        }
        acting = identity({**weights, **agent_parts(config.agent, project, tasks)})
        packages = _packages("tiny", config.agent, tasks)
        return Actor(ref, agent, policy, acting, free, frozenset(trained), packages, version.number)
    return fixed_actor(ref, config.policy, config.agent, project, tasks, suite, config.prices, version)


def _tiny(version: PolicyVersion, project: Path, temperature: float) -> Policy:
    """Its weights, loaded; they must be those that were registered."""
    try:
        with interrupts_wait():
            from agentloop.policies.tiny import TinyPolicy
    except ImportError as error:
        raise ConfigError(f"policy v{version.number} needs {error.name}; {extra('train')}") from None
    folder = artifact_folder(project, version.artifact or "") / WEIGHTS
    policy = TinyPolicy(folder, temperature=temperature)
    if folder_hash(folder) != version.sha256:
        raise ConfigError(f"{folder}: these are not the weights of v{version.number}; bring back what was there")
    return policy


def _agent(settings: AgentSection, folder: Path, tasks: Sequence[Task]) -> Agent:
    plays = bool(tasks) and tasks[0].environment is not None
    return GymLoop() if plays else choose_agent(settings, folder)


def _packages(kind: str, agent: AgentSection, tasks: Sequence[Task]) -> tuple[str, ...]:
    """Installed packages whose versions decide what an actor does, beyond agentloop itself."""
    plays = bool(tasks) and tasks[0].environment is not None
    needed = {"torch": kind == "tiny", "litellm": kind == "litellm", "mcp": bool(agent.mcp), "gymnasium": plays}
    return tuple(name for name, is_needed in needed.items() if is_needed)


def _versions(project: Path) -> str:
    """The end of a message: which versions there are."""
    place = store_place(project)
    if place.file is not None and not place.file.is_file():
        return f" ({project} has no versions)"
    store = place.open(create=False)
    try:
        there = ", ".join(f"v{version.number}" for version in Registry(store).all())
    finally:
        store.close()
    return f" (versions in {project}: {there or 'none'})"
