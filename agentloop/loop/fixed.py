"""Versions of a policy whose weights are not ours: run, judged and gated, never trained.

Its settings are its identity. When they change (another model, another script), that is a new
version, and the gate compares it with the live one.
"""

from __future__ import annotations

from collections.abc import Sequence

from agentloop.errors import ConfigError
from agentloop.loop.project import Project, unscored
from agentloop.protocols import Policy
from agentloop.store.store import Judged
from agentloop.types import PolicyVersion, Purpose, Split


class FixedLearner:
    """See `turns.Learner`."""

    def __init__(self, project: Project, policy: Policy, identity: str) -> None:
        """identity: a hash of whatever decides how `policy` acts."""
        self.project, self._policy, self.identity = project, policy, identity

    def policy(self, version: PolicyVersion) -> Policy:
        """The policy as it is now. Raises ConfigError when `version` was another one."""
        if version.sha256 != self.identity:
            raise ConfigError(
                f"v{version.number} was a policy with other settings and has no result on this suite; "
                "set [policy] back to it and run the loop once, then change it again"
            )
        return self._policy

    async def first(self) -> PolicyVersion:
        """Run the train tasks and register the policy as v1."""
        return await self._register(1, None)

    async def next(self, newest: PolicyVersion) -> PolicyVersion | None:
        """A candidate when the settings have changed since `newest`."""
        if newest.sha256 == self.identity:
            await self._run(newest.number)
            self.project.progress.say(
                f"finished: policy {self._policy.name!r} is as it was at v{newest.number}, and its weights are not "
                "ours to train; change [policy] to compare another with it"
            )
            return None
        return await self._register(newest.number + 1, newest.number)

    async def _register(self, number: int, parent: int | None) -> PolicyVersion:
        await self._run(number)
        settings = self.project.config.policy
        return self.project.registry.add(
            number=number,
            parent=parent,
            kind="scripted" if settings.kind == "scripted" else "remote",
            artifact=None,
            sha256=self.identity,
            config_hash=self.project.config.hash,
            note=f"{self._policy.name} {settings.model or settings.script or ''}".strip(),
        )

    async def _run(self, number: int) -> None:
        """Do the train tasks, once for the suite as it is now, and say how they went."""
        name, tasks = f"run-v{number}.{self.project.suite.hash[:6]}", self.project.suite.split(Split.train)
        if not tasks or name in self.project.store.stages():
            return
        stage = await self.project.begin(name)
        self.project.progress.start(f"run: v{number} on train tasks", len(tasks))
        judged = await self.project.gather(stage, tasks, self._policy, purpose=Purpose.run, version=number)
        self.project.finish(stage)
        self.project.progress.say(_tally(name, judged))


def _tally(stage: str, judged: Sequence[Judged]) -> str:
    """How the train tasks went: with a script that plays their solutions, what is not right is a task to mend."""
    rewards = [(task.id, verdict.reward) for task, _, _, verdict in judged]
    wrong = [task for task, reward in rewards if reward is not None and reward < 1.0]
    lost = [task for task, reward in rewards if reward is None]
    line = (
        f"train tasks: {len(rewards) - len(wrong) - len(lost)} right, {len(wrong)} wrong, {len(lost)} without a reward"
    )
    if why := unscored([verdict for *_, verdict in judged]):
        line += f" ({why})"
    if wrong or lost:
        line += f"; such as {(lost or wrong)[0]!r}: `agentloop traces ls --stage {stage} --task {(lost or wrong)[0]}`"
    return line
