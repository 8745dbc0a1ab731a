"""A version on the held-out tasks, and the gate's word on a candidate: compared with the live version, and carried out.

Only this looks at the held-out split. What it says decides which version is live, never what is trained on.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime

from agentloop.errors import ConfigError, SandboxError, counted
from agentloop.gate.decide import decide, lost_too_much
from agentloop.identity import Identity
from agentloop.loop.project import Project
from agentloop.loop.stage import begin, unscored
from agentloop.protocols import ProjectTrainer
from agentloop.types import (
    Attempt,
    Decision,
    EvalReport,
    PolicyVersion,
    Purpose,
    RewardState,
    Split,
    StageKey,
    StageKind,
    Task,
    Verdict,
)


async def gate(project: Project, trainer: ProjectTrainer, candidate: PolicyVersion) -> Decision:
    """Compare a candidate with the live version on the held-out tasks, decide, and carry it out."""
    champion = project.registry.live()
    if champion is None:
        raise ConfigError(f"no version is live beside candidate v{candidate.number}; the store was changed by hand")
    baseline = await evaluate(project, trainer, champion)
    report = await evaluate(project, trainer, candidate)
    settings = project.config.gate
    decision = decide(baseline, report, alpha=settings.alpha, n_min=settings.n_min, now=datetime.now(UTC))
    project.registry.apply(decision)
    return decision


async def evaluate(project: Project, trainer: ProjectTrainer, version: PolicyVersion) -> EvalReport:
    """The held-out outcomes of one version; rolled out once, remembered after that.

    Raises SandboxError, and remembers nothing, when too many episodes lost an attempt to the infrastructure: what a
    broken machine lost must not count against a version for good.
    """
    report_before = project.store.report(project.suite.hash, version.number)
    if report_before:
        return report_before
    tasks = project.suite.split(Split.heldout)
    trials = project.config.gate.trials
    _refuse_trained(project, tasks)
    stage = await begin(project, gate_stage(project, version.number))
    project.progress.start(f"gate: v{version.number} on held-out tasks", len(tasks) * trials)
    attempts = await stage.gather(
        tasks,
        trainer.policy(version),
        purpose=Purpose.evaluate,
        version=version.number,
        group_size=trials,
        identity=Identity(version.sha256, {}),
    )
    report = eval_report(project, version.number, tasks, attempts, stage.n_lost)
    why = unscored([attempt.verdict for attempt in attempts])
    if why:
        project.progress.say(f"v{version.number} on held-out tasks: {why}")
    if lost_too_much(report):
        whole = {attempt.episode.id for attempt in attempts if _is_whole(attempt, stage.n_lost)}
        project.store.supersede_stage(stage.name, without=whole)  # else the next run would find the same losses
        raise _too_many_lost(report, [attempt.verdict for attempt in attempts])
    stage.finish()  # first: with a report the stage is not done again, and would never be counted
    project.store.put_report(report)
    return report


def _is_whole(attempt: Attempt, n_lost: Mapping[str, int]) -> bool:
    """Whether it has a reward, and infrastructure lost no attempt before it."""
    return attempt.verdict.state is RewardState.scored and not n_lost.get(attempt.episode.id)


def _too_many_lost(report: EvalReport, verdicts: Sequence[Verdict]) -> ConfigError | SandboxError:
    """What cost the gate its decision, the larger cause first: a verifier to mend, or a machine."""
    n_unscored = sum(v.state in (RewardState.unscored, RewardState.disputed) for v in verdicts)
    n_infra = sum(n > 0 for lost in report.n_lost.values() for n in lost)
    number = report.policy_version
    mend = "too many to decide on; mend that, then run the same command again: only they are done again"
    broken = f"{n_infra} of {len(verdicts)} held-out episodes of v{number} lost an attempt to the infrastructure"
    why = unscored(verdicts)
    if n_unscored < n_infra:
        return SandboxError(f"{broken}{f' and {why}' if why else ''}, {mend}")
    return ConfigError(f"v{number} on held-out tasks: {why}{f', and {broken}' if n_infra else ''}, {mend}")


def gate_stage(project: Project, number: int) -> StageKey:
    """The stage in which version `number` did the held-out tasks of the suite as it is now."""
    return StageKey(StageKind.gate, number, project.suite.hash)


def _refuse_trained(project: Project, tasks: Sequence[Task]) -> None:
    """ConfigError when held-out tasks were trained on: they prove nothing of any version made since."""
    trained = project.store.task_ids(Purpose.train, Purpose.demonstrate)
    leaked = sorted(task.id for task in tasks if task.id in trained)
    if leaked:
        raise ConfigError(
            f"{counted(len(leaked), 'held-out task')} had been trained on before, such as {leaked[0]!r}; give back the "
            "old split, or make a new project for the new splits"
        )


def eval_report(
    project: Project, number: int, tasks: Sequence[Task], attempts: Sequence[Attempt], n_lost: Mapping[str, int]
) -> EvalReport:
    """Scored rewards by task. n_lost: episode id -> its attempts that infrastructure lost."""
    rewards: defaultdict[str, list[float]] = defaultdict(list)
    lost = defaultdict[str, list[int]](list)
    unscored_lost = defaultdict[str, list[int]](list)
    for attempt in attempts:
        task_id = attempt.task.id
        verdict = attempt.verdict
        n = n_lost.get(attempt.episode.id, 0)
        if verdict.state is RewardState.scored and verdict.reward is not None:
            rewards[task_id].append(verdict.reward)
            lost[task_id].append(n)
        elif n:
            unscored_lost[task_id].append(n)
    critical = [attempt.verdict.critical for attempt in attempts]
    failures = Counter(failure.type.value for failure in critical if failure)
    all_lost = {task.id: (*lost[task.id], *unscored_lost[task.id]) for task in tasks}
    return EvalReport(
        suite=project.suite.name,
        suite_hash=project.suite.hash,
        policy_version=number,
        rewards={task.id: tuple(rewards[task.id]) for task in tasks if rewards[task.id]},
        n_infra=sum(attempt.verdict.state is not RewardState.scored for attempt in attempts),
        n_lost={task: numbers for task, numbers in all_lost.items() if any(numbers)},
        failures=dict(failures),
    )
