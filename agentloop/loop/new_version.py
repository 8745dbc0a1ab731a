"""The next version: what the trainer makes, or what changed settings and files make; frozen in its folder, registered.

A version exists once its folder is in place, its stage is finished and its row is stored, in this order: whatever is
cut short is made again. A version of changed settings comes before anything that is trained, and takes along what a
trainer made of the version before.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
from dataclasses import replace

from agentloop.abilities import Rehearses
from agentloop.config.settings import known_secrets
from agentloop.errors import ConfigError, PluginError, TrainingError, boundary, counted
from agentloop.loop.draft import ProjectDraft, workspace_of
from agentloop.loop.experience import ProjectExperience
from agentloop.loop.project import Project
from agentloop.loop.stage import begin, mean_reward
from agentloop.loop.suite_audit import audited
from agentloop.loop.train_tasks import try_train_tasks
from agentloop.protocols import Trainer
from agentloop.publish.probe import read_probe
from agentloop.registry.acting import is_of_base, with_secrets
from agentloop.registry.artifacts import ADAPTER, WEIGHTS
from agentloop.registry.folders import FILES, LINEAGE, OVERLAY, VERSION_FILE, freeze, frozen, put_in_place, read_overlay
from agentloop.registry.loading import OF_WEIGHTS
from agentloop.registry.parts import own_parts
from agentloop.types import (
    Lineage,
    PolicyVersion,
    Purpose,
    Rehearsal,
    Split,
    StageKey,
    StageKind,
    VersionKind,
    content_hash,
)

MADE = {VersionKind.overlay: OVERLAY, VersionKind.weights: WEIGHTS, VersionKind.adapter: ADAPTER}
"""Name of the file or folder that a version of each kind has in its folder."""
VALIDATION = "validation"
"""Name of the figure that says how a version does on the validation split."""
SETTINGS = "settings@1"
"""The trainer in the lineage of a version that changed settings made."""


async def first_version(project: Project, trainer: Trainer) -> PolicyVersion:
    """Make and register version 1, which is live because nothing exists to compare it with."""
    draft = ProjectDraft(project, 1)
    experience = ProjectExperience(project, 1, None)
    try:
        note = await trainer.first(draft, experience)
        kind = VersionKind.settings if note is None else trainer.makes
        note = note or settings_note(project)
        return _register(draft, experience, kind, None, _lineage(draft, experience, trainer, None), note)
    finally:
        draft.discard()


async def next_version(
    project: Project, trainer: Trainer, newest: PolicyVersion, filter: str = ""
) -> PolicyVersion | None:
    """Make and register the candidate after `newest`; None, having reported why, when nothing is to be made.

    filter: of the stored traces that the trainer may learn from.
    """
    # A process that was killed right after it registered the version left its checkpoints.
    shutil.rmtree(workspace_of(project.version_folder(newest.number)), ignore_errors=True)
    _refuse_without_weights(project, newest)
    if not is_of_base(project.base.identity(), newest):
        return await _of_changed_settings(project, newest)
    n_turns = newest.number - 1
    if trainer.makes is not VersionKind.settings and n_turns >= project.config.train.max_turns:
        project.progress.say(_turns_are_over(project, newest))
        return None
    parent = _parent(project, newest)
    draft = ProjectDraft(project, newest.number + 1)
    experience = ProjectExperience(project, draft.number, parent, filter)
    try:
        if trainer.makes in OF_WEIGHTS:
            await audited(project, experience.tasks)
        note = await trainer.improve(parent, draft, experience)
        if note is None:
            return None
        lineage = _lineage(draft, experience, trainer, parent)
        return _register(draft, experience, trainer.makes, parent, lineage, note)
    finally:
        draft.discard()


async def train_once(project: Project, trainer: Trainer, filter: str = "") -> PolicyVersion | None:
    """One candidate, which no gate has seen; a project without versions gets its first one before.

    None, having reported why, when nothing is to be made.
    """
    try:
        newest = project.registry.newest()
        if newest is None:
            newest = await first_version(project, trainer)
            project.progress.say(f"v{newest.number} is the first version: {newest.note}")
        return await next_version(project, trainer, newest, filter)
    finally:
        await project.pool.close()


async def rehearse(project: Project, trainer: Trainer, filter: str = "") -> Rehearsal:
    """The start of `train_once`, without a call of a model. Raises ConfigError for a trainer that cannot tell."""
    if not isinstance(trainer, Rehearses):
        raise ConfigError(f"trainer {trainer.name!r} cannot show what it would do; run it without --dry-run")
    newest = project.registry.newest()
    if newest is None:
        raise ConfigError(
            "the project has no version and no traces yet; run `agentloop loop` or `agentloop train` first"
        )
    parent = _parent(project, newest)
    draft = ProjectDraft(project, newest.number + 1)
    try:
        return await trainer.rehearse(parent, draft, ProjectExperience(project, draft.number, parent, filter))
    finally:
        draft.discard()
        await project.pool.close()


async def _of_changed_settings(project: Project, newest: PolicyVersion) -> PolicyVersion:
    """A version with the trained parts of the parent and the present settings and files."""
    parent = _parent(project, newest)
    draft = ProjectDraft(project, newest.number + 1)
    experience = ProjectExperience(project, draft.number, parent)
    try:
        is_tiny = project.base.policy.kind == "tiny"
        if is_tiny or parent.kind in OF_WEIGHTS:
            kind = VersionKind.weights if is_tiny else parent.kind
            note = f"the {kind} of v{parent.number} under other [policy] or [agent] settings"
        elif parent.kind is VersionKind.overlay:
            kind = VersionKind.overlay
            note = f"the text of v{parent.number} under other [policy] or [agent] settings"
        else:
            kind = VersionKind.settings
            note = settings_note(project)
        if kind is not VersionKind.settings:
            _take_along(project, parent, draft)
        if is_tiny:
            await _validate_again(draft, experience, parent)
        elif kind not in OF_WEIGHTS:
            overlay = read_overlay(draft.folder)
            await try_train_tasks(project, draft.number, overlay)
        lineage = Lineage(
            trainer=SETTINGS,
            base=_base_of(draft) or parent.sha256,
            seed=project.config.project.seed,
            is_unproven=not project.suite.split(Split.heldout),
        )
        return _register(draft, experience, kind, parent, lineage, note)
    finally:
        draft.discard()


def settings_note(project: Project) -> str:
    """Which policy it is, in a few words."""
    settings = project.config.policy
    return f"{project.present_actor().policy.name} {settings.model or settings.script or ''}".strip()


def stage_of(number: int) -> StageKey:
    """The stage that makes version `number` in a turn."""
    return StageKey(StageKind.turn, number)


def _parent(project: Project, newest: PolicyVersion) -> PolicyVersion:
    """Training of weights goes on from the newest version, promoted or not; text is edited from the live version."""
    live = project.registry.live()
    return newest if newest.kind in OF_WEIGHTS or live is None else live


def _refuse_without_weights(project: Project, newest: PolicyVersion) -> None:
    if project.base.policy.kind == "tiny" and newest.kind is not VersionKind.weights:
        raise ConfigError(
            f"v{newest.number} is a {newest.kind} policy, which has no weights to train from; "
            "set [policy] back to it, or make another project for 'tiny'"
        )


def _turns_are_over(project: Project, newest: PolicyVersion) -> str:
    row = project.store.stages().get(stage_of(newest.number).name)
    success = row.metrics.get(VALIDATION) if row else None
    solves = "" if success is None else f" v{newest.number} solves {success:.0%} of the validation tasks;"
    n_turns = project.config.train.max_turns
    return (
        f"finished: {counted(newest.number - 1, 'turn')},{solves} "
        f"for more, raise [train] max_turns (now {n_turns}) and run the loop again"
    )


def _take_along(project: Project, parent: PolicyVersion, draft: ProjectDraft) -> None:
    """Copy everything that a trainer left in the parent's folder."""
    folder = project.version_folder(parent.number)
    own = shutil.ignore_patterns(VERSION_FILE, FILES, LINEAGE)
    with boundary(TrainingError, "cannot save a version; fix it and run the same command again", folder=draft.folder):
        shutil.copytree(folder, draft.folder, ignore=own, dirs_exist_ok=True)


async def _validate_again(draft: ProjectDraft, experience: ProjectExperience, parent: PolicyVersion) -> None:
    """Weights under other settings do otherwise: their trainer looks at this figure before it goes on."""
    from agentloop.policies.tiny import TinyPolicy

    project = draft.project
    experience.stage = stage = await begin(project, stage_of(draft.number))
    policy = TinyPolicy(draft.folder / WEIGHTS, temperature=project.base.policy.temperature)
    attempts = await stage.gather(
        project.suite.split(Split.validation),
        replace(project.acting_as(policy), identity=project.base.identity(own_parts(draft.folder, None))),
        purpose=Purpose.validate,
        version=draft.number,
        group_size=3,
        part="validate/end",
    )
    draft.measure(**{VALIDATION: mean_reward(attempts)})


def _lineage(
    draft: ProjectDraft, experience: ProjectExperience, trainer: Trainer, parent: PolicyVersion | None
) -> Lineage:
    draft.dropped.update(experience.dropped)
    return Lineage(
        trainer=f"{trainer.name}@{trainer.version}",
        base=_base_of(draft) or (parent.sha256 if parent else draft.identity.hash),
        filter=" | ".join(dict.fromkeys(experience.filters)) if experience.filters else None,
        n_traces=len(draft.pairs),
        traces=content_hash(sorted(draft.pairs)) if draft.pairs else None,
        dropped=dict(draft.dropped),
        seed=draft.project.config.project.seed,
        is_unproven=parent is not None and not draft.project.suite.split(Split.heldout),
    )


def _base_of(draft: ProjectDraft) -> str | None:
    """Hash of the model that the draft's adapter stands on; None without an adapter."""
    return read_probe(draft.folder).base_hash if (draft.folder / ADAPTER).is_dir() else None


def _register(
    draft: ProjectDraft,
    experience: ProjectExperience,
    kind: VersionKind,
    parent: PolicyVersion | None,
    lineage: Lineage,
    note: str,
) -> PolicyVersion:
    project = draft.project
    product = MADE.get(kind)
    if product is not None and not (draft.folder / product).exists():
        raise PluginError(
            f"trainer {lineage.trainer} made no {product} for v{draft.number}; write it to the draft's folder"
        )
    with boundary(TrainingError, "cannot save a version; fix it and run the same command again", folder=draft.place):
        secrets = known_secrets(project.folder)
        identity = freeze(draft.folder, project.base, place=draft.place, pairs=draft.pairs, secrets=secrets)
        if project.base.identity().hash != draft.identity.hash:
            raise ConfigError(
                f"files of the policy or the agent changed while v{draft.number} was made; run the same command again"
            )
        for line in _warnings(draft, identity.parts):
            project.progress.say(line)
        put_in_place(draft.folder, draft.place)
    project.keep()
    if experience.stage is not None:
        experience.stage.metrics |= draft.figures
        experience.stage.drop(draft.dropped)
        experience.stage.finish()
    version = project.registry.add(
        number=draft.number,
        parent=parent.number if parent else None,
        kind=kind,
        artifact=project.artifact(draft.number),
        identity=identity,
        config_hash=project.config.hash,
        lineage=lineage,
        note=note,
    )
    shutil.rmtree(draft.workspace, ignore_errors=True)
    return version


def _warnings(draft: ProjectDraft, parts: Mapping[str, str]) -> Iterator[str]:
    """A line where the copies in the folder are not what acted: the version then acts while its files are unchanged."""
    copies = with_secrets(frozen(draft.folder, has_agent=draft.project.base.has_agent), draft.project.config)
    own = own_parts(draft.folder, read_overlay(draft.folder))
    changed = copies.identity(own).changed(parts)
    if changed:
        yield (
            f"v{draft.number} cannot act again once its files change: its folder has no whole copy of "
            f"{', '.join(changed)}"
        )
