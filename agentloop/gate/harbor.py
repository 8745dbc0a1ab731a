"""Harbor task folders as a suite of the gate: what they are, and one trial of one of them as an `Outcome`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from agentloop.failures.detectors.rules import Rule
from agentloop.gate.bank import Evals
from agentloop.gate.outcomes import Outcome, Side
from agentloop.gate.trials import outcome_of, with_lost
from agentloop.harbor.agents import Oracle, PolicyAgent
from agentloop.harbor.task import HarborTask
from agentloop.harbor.trial import Terms, TrialAgent, run_trial
from agentloop.harbor.verification import Outcome as Tested
from agentloop.protocols import SandboxBackend
from agentloop.rollout.actors import Actor
from agentloop.rollout.plan import stable_id
from agentloop.suites.content import folder_contents
from agentloop.suites.names import MUST_PASS
from agentloop.types import Attempt, FailureType, RewardState, SandboxSpec, Task, Verdict, content_hash


def harbor_evals(path: Path, tasks: Sequence[HarborTask]) -> Evals:
    """Of the folder `path`, which holds `tasks`. Their hash covers every file of theirs, tests and images included."""
    contents = sorted((task.name, folder_contents(task.folder)) for task in tasks)
    return Evals(
        name=path.resolve().name,
        hash=content_hash({"harbor": contents}),
        folder=path.resolve(),
        tasks=tuple(task.name for task in tasks),
        must_pass=tuple(task.name for task in tasks if MUST_PASS in task.tags),
        verifiers=(f"{Tested.name}@{Tested.version}",),
    )


def program_tasks(tasks: Sequence[HarborTask]) -> list[Task]:
    """What a program that acts on them is called with."""
    return [Task(id=task.name, instruction=task.instruction) for task in tasks]


def boxed(tasks: Sequence[HarborTask]) -> list[Task]:
    """The sandboxes of `tasks`: their images, and the hosts that agent or tests may reach."""
    return [
        Task(
            id=task.name,
            instruction=task.instruction,
            sandbox=SandboxSpec(image=task.image, allowed_hosts=(*task.hosts(task.agent), *task.hosts(task.verifier))),
        )
        for task in tasks
    ]


class HarborTrials:
    """A `bank.Runner` over Harbor tasks."""

    def __init__(
        self,
        tasks: Sequence[HarborTask],
        sides: Mapping[Side, Actor],
        backend: SandboxBackend,
        *,
        run: str,
        keep: Callable[[Attempt], None] = lambda _: None,
        guess: Rule | None = None,
        pauses_s: Sequence[float] | None = None,
    ) -> None:
        """run: decides every seed, with the task, the side and the trial. keep: stores each attempt.

        guess: of `Crew`. pauses_s: of `repeated`.
        """
        self._tasks = {task.name: task for task in tasks}
        self._sides, self._backend, self._run = sides, backend, run
        self._keep, self._guess, self._pauses_s = keep, guess, pauses_s

    async def __call__(self, task_id: str, side: Side, trial: int) -> Outcome:
        """See `bank.Runner`."""
        run, actor, lost = f"{self._run}/{side}", self._sides[side], list[Attempt]()
        agent = _agent(actor, seed=int(stable_id(run, task_id, trial)[:12], 16))
        attempt = await run_trial(
            self._tasks[task_id],
            agent,
            self._backend,
            run=run,
            n=trial,
            terms=Terms(actor.version, actor.identity, self._guess, pauses_s=self._pauses_s),
            on_lost=lost.append,
        )
        self._keep(attempt)
        outcome = with_lost(outcome_of(attempt, side, trial, actor.price), attempt, lost, actor.price)
        return _with_0_for_tampering(attempt.verdict, outcome)


def _with_0_for_tampering(verdict: Verdict, outcome: Outcome) -> Outcome:
    """No reward of an agent that tampered with its tests can be believed; the gate counts that as a failure."""
    has_tampered = verdict.critical is not None and verdict.critical.type is FailureType.outcome_reward_hack
    if verdict.state is not RewardState.unscored or not has_tampered:
        return outcome
    return outcome.model_copy(update={"state": RewardState.scored, "reward": 0.0})


def _agent(actor: Actor, seed: int) -> TrialAgent:
    return Oracle() if actor.plays_solutions else PolicyAgent(actor.policy, actor.agent, seed=seed)
