"""Versions of a policy whose weights are not ours: run, judged and gated, never trained.

A version is identified by the settings of its policy and agent and by the contents of their files (`acting.py`). When
any of them changes (another model, an edited program), that is a new version, and the gate compares it with the live
one.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator

from agentloop.errors import ConfigError
from agentloop.identity import Identity
from agentloop.loop.project import Project
from agentloop.loop.stage import begin
from agentloop.protocols import Policy
from agentloop.rollout.refusals import why_unscored
from agentloop.store.bodies import unpack
from agentloop.store.tables import TraceRow
from agentloop.types import PolicyVersion, Purpose, RewardState, Split, StageKey, StageKind, VersionKind

N_NAMED = 3
"""Tasks named of those that are wrong; the rest are counted."""


class FixedTrainer:
    """See `protocols.Trainer`."""

    def __init__(self, project: Project, policy: Policy, identity: str) -> None:
        """identity: hash of everything that decides how `policy` and the project's agent act."""
        self.project = project
        self._policy = policy
        self.identity = identity
        self._last_tally = ""

    def policy(self, version: PolicyVersion) -> Policy:
        """The policy as it is now. Raises ConfigError when `version` was another one."""
        if version.sha256 != self.identity:
            raise ConfigError(
                f"v{version.number} was another policy or agent and has no result on this suite; restore its "
                "settings and files and run the loop once, then change them again"
            )
        return self._policy

    async def first(self) -> PolicyVersion:
        """Run the train tasks and register the policy as v1."""
        return await self._register(1, None)

    async def next(self, newest: PolicyVersion) -> PolicyVersion | None:
        """A candidate when the policy or the agent has changed since `newest`."""
        if newest.sha256 == self.identity:
            await self._run(newest.number)
            self.project.progress.say(
                f"finished: policy {self._policy.name!r} and its agent are unchanged since v{newest.number}, and its "
                "weights are not trained here; change [policy], [agent] or their files to compare another version"
            )
            return None
        return await self._register(newest.number + 1, newest.number)

    async def _register(self, number: int, parent: int | None) -> PolicyVersion:
        await self._run(number)
        settings = self.project.config.policy
        return self.project.registry.add(
            number=number,
            parent=parent,
            kind=VersionKind.settings,
            artifact=None,
            sha256=self.identity,
            config_hash=self.project.config.hash,
            note=f"{self._policy.name} {settings.model or settings.script or ''}".strip(),
        )

    async def _run(self, number: int) -> None:
        """Do the train tasks, once for the suite as it is now, and say how they went, once in this process."""
        key = StageKey(StageKind.run, number, self.project.suite.hash)
        name = key.name
        tasks = self.project.suite.split(Split.train)
        if not tasks or name == self._last_tally:
            return
        # Before the version is registered, a finished stage may be that of a program which was edited since.
        if name not in self.project.store.stages() or self.project.registry.get(number) is None:
            stage = await begin(self.project, key)
            self.project.progress.start(f"run: v{number} on train tasks", len(tasks))
            identity = Identity(self.identity, {})
            await stage.gather(tasks, self._policy, purpose=Purpose.run, version=number, identity=identity)
            stage.finish()
        self._last_tally = name
        for line in self._tally(self.project.store.stage_traces(name)):
            self.project.progress.say(line)

    def _tally(self, rows: list[TraceRow]) -> Iterator[str]:
        """How the train tasks went, and the first of what is not right: no other line or table is about them."""
        wrong = [row for row in rows if row.reward is not None and row.reward < 1.0]
        unscored = [row for row in rows if row.reward_state in (RewardState.unscored, RewardState.disputed)]
        lost = [row for row in rows if row.reward_state == RewardState.infra_failed]
        n_right = len(rows) - len(wrong) - len(unscored) - len(lost)
        infra = f", {len(lost)} lost to the infrastructure" if lost else ""
        yield f"train tasks: {n_right} right, {len(wrong)} wrong, {len(unscored)} unscored{infra}"
        settings = self.project.config.policy
        if wrong:
            plays_solutions = settings.kind == "scripted" and settings.script is None
            yield self._named("wrong", wrong, "mend the solution or the verifier" if plays_solutions else "")
        if unscored:
            yield self._named("unscored", unscored, why_unscored(unpack(unscored[0].body)[1]))
        if lost:
            yield self._named("lost", lost, " ".join((lost[0].error or "").split()))

    def _named(self, what: str, rows: list[TraceRow], why: str) -> str:
        """The first few tasks of `rows`, and how to see the first."""
        ids = ", ".join(repr(row.task_id) for row in rows[:N_NAMED])
        more = f" and {len(rows) - N_NAMED} more" if len(rows) > N_NAMED else ""
        show = f"`agentloop traces show {rows[0].id[:10]} -p {shlex.quote(str(self.project.folder))}` shows the first"
        return f"  {what}: {'; '.join(part for part in (ids + more, why, show) if part)}"
