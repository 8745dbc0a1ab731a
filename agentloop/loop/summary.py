"""What came of a loop, read from its store: the document of `--json`, and the data of the report.

Nothing is kept on the side while a loop runs, so the summary of an interrupted, a continued and an
uninterrupted run are made in the same way.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from statistics import fmean
from typing import Any

from agentloop.failures.analysis.pareto import Survey
from agentloop.failures.analysis.survey import survey
from agentloop.gate.decide import decide, difference_ci95, paired_differences, sign_flip_p, success
from agentloop.loop.project import REPORT, Project
from agentloop.loop.stage import why_unscored
from agentloop.loop.turns import CONTROL, control_stage, gate_stage, stored_attempts
from agentloop.mining.failed import FAILED, read_failed
from agentloop.reports.loop import (
    Control,
    Quote,
    ReportData,
    StageRate,
    TracePair,
    TraceVerdict,
    VersionRow,
    write_report,
)
from agentloop.store.bodies import unpack
from agentloop.types import Action, EvalReport, PolicyVersion, RewardState

NO_NUMBER = (RewardState.unscored.value, RewardState.disputed.value)
N_PAIRS = 4
"""Traces shown side by side."""
N_QUOTES = 2
"""Kinds of failure quoted of each type, the most frequent ones."""
LABELS = {"demonstrate": "demonstrations", "warm-start": "warm start", "control": "control arm"}


class Summary:
    """Reads once, answers as a document (`json`) and as a report (`write_report`)."""

    def __init__(self, project: Project, *, sandbox: str, command: str) -> None:
        self.project, self.sandbox, self.command = project, sandbox, command
        self.stages = project.store.stages()
        self.decisions = project.store.decisions()
        reports = {v.number: project.store.report(project.suite.hash, v.number) for v in project.registry.all()}
        self.reports: dict[int, EvalReport] = {n: report for n, report in reports.items() if report}
        self.versions = [v for v in project.registry.all() if v.number in self.reports]

    @property
    def first(self) -> PolicyVersion:
        """Where the loop started."""
        return self.versions[0]

    @property
    def live(self) -> PolicyVersion:
        """Where it is."""
        live = self.project.registry.live()
        return live if live and live.number in self.reports else self.first

    @property
    def decision(self) -> Action | None:
        """The gate's test once more, on the live version against the first one; None while there is but one version.

        When no version was promoted, it is the newest version's decision.
        """
        if self.live.number != self.first.number:
            first, live = self.reports[self.first.number], self.reports[self.live.number]
            gate = self.project.config.gate
            return decide(first, live, alpha=gate.alpha, n_min=gate.n_min, now=self.live.created_at).action
        last = [self.decisions[v.number].action for v in self.versions if v.number in self.decisions]
        return last[-1] if last else None

    @property
    def control(self) -> Control | None:
        """The same model taught only by passing demonstrations, beside the live version; None where it was not run."""
        report = self.project.store.report(self.project.suite.hash, CONTROL)
        stage = self.stages.get(control_stage(self.project))
        if report is None or stage is None:
            return None
        ahead = list(paired_differences(report, self.reports[self.live.number]).values())
        return Control(
            success=success(report),
            n_demonstrations=int(stage.metrics["n_demonstrations"]),
            n_steps=int(stage.metrics["steps"]),
            failures=report.failures,
            ahead=fmean(ahead),
            ahead_ci95=difference_ci95(ahead),
            p_ahead=sign_flip_p(ahead),
        )

    @property
    def samples_dropped(self) -> dict[str, int]:
        """Why rows did not train -> how many, over all stages."""
        total: Counter[str] = Counter()
        for stage in self.stages.values():
            total.update(stage.dropped)
        return dict(sorted(total.items()))

    @property
    def n_infra_failed(self) -> int:
        """Attempts that failed for our reasons, those that were tried again included; none was scored."""
        return int(sum(stage.metrics.get("n_infra_failed", 0) for stage in self.stages.values()))

    @property
    def unscored(self) -> dict[str, Any] | None:
        """Held-out episodes that the verifiers gave no reward, over all versions, and the words of one; None for 0."""
        counts = {version.number: n for version in self.versions if (n := self._n_unscored(version))}
        if not counts:
            return None
        stage = gate_stage(self.project, min(counts))
        store = self.project.store
        found = (store.find_traces(limit=1, stage=stage, reward_state=s, project=store.project) for s in NO_NUMBER)
        row = next(row for rows in found for row in rows)
        return {"episodes": sum(counts.values()), "why": why_unscored(unpack(row.body)[1])}

    def _n_unscored(self, version: PolicyVersion) -> int:
        stage = gate_stage(self.project, version.number)
        store = self.project.store
        return sum(store.n_traces(stage=stage, reward_state=state, project=store.project) for state in NO_NUMBER)

    @property
    def isolation(self) -> str:
        """What held the actions of the episodes that are compared."""
        stages = {gate_stage(self.project, version.number) for version in (self.first, self.live)}
        found = {trace.isolation for stage in stages for trace, _ in stored_attempts(self.project, stage)}
        return " and ".join(sorted(filter(None, found)))

    def n_episodes(self) -> int:
        """Over all stages."""
        return sum(stage.n_episodes for stage in self.stages.values())

    def json(self) -> dict[str, Any]:
        """The one document of `--json`."""
        project = self.project
        return {
            "seed": project.config.project.seed,
            "sandbox": self.sandbox,
            "isolation": self.isolation,
            "episodes": self.n_episodes(),
            "tool_calls": sum(stage.n_tool_calls for stage in self.stages.values()),
            "infra_failed": self.n_infra_failed,
            "unscored": self.unscored,
            "heldout": {
                "n": success(self.reports[self.live.number]).n_tasks,
                "before": _success(self.reports[self.first.number]),
                "after": _success(self.reports[self.live.number]),
            },
            "failures": {
                "before": self.reports[self.first.number].failures,
                "after": self.reports[self.live.number].failures,
            },
            "versions": [self._version(v) for v in self.versions],
            "control": self._control(),
            "decision": self.decision.value if self.decision else None,
            "failed_tasks": self.n_failed(),
            "samples_dropped": self.samples_dropped,
            # Of finished stages, in this process: what an interruption cost and what boxes spent is not in it.
            "wall_s": round(sum(s.wall_s for s in self.stages.values()), 1),
            "cpu_s": round(sum(s.cpu_s for s in self.stages.values()), 1),
            "store": str(project.store.path),
            "report": str(project.folder / REPORT),
        }

    def _control(self) -> dict[str, Any] | None:
        """The control arm; `ahead` is the live version's success minus the arm's."""
        arm = self.control
        if arm is None:
            return None
        return {
            "success": round(arm.success.mean, 4),
            "ci95": [round(edge, 4) for edge in arm.success.ci95],
            "demonstrations": arm.n_demonstrations,
            "steps": arm.n_steps,
            "failures": arm.failures,
            "ahead": round(arm.ahead, 4),
            "ahead_ci95": [round(edge, 4) for edge in arm.ahead_ci95],
            "p_ahead": arm.p_ahead,
        }

    def n_failed(self) -> int:
        """Held-out tasks that some champion failed."""
        return len(read_failed(self.project.folder / FAILED))

    def _version(self, version: PolicyVersion) -> dict[str, Any]:
        decision = self.decisions.get(version.number)
        report = self.reports[version.number]
        return {
            "number": version.number,
            "parent": version.parent,
            "state": version.state.value,
            "sha256": version.sha256,
            "note": version.note,
            "decision": decision.action.value if decision else None,
            "reasons": list(decision.reasons) if decision else [],
            "p_better": decision.p_better if decision else None,
            "failures": report.failures,
            "infra_failed": report.n_infra - self._n_unscored(version),
            **_success(report),
        }

    def write_report(self) -> Path:
        """One HTML file with everything in it; its path."""
        path = self.project.folder / REPORT
        write_report(self._report(), path)
        return path

    def _report(self) -> ReportData:
        before, after = self._failed(self.first), self._failed(self.live)
        return ReportData(
            title=f"agentloop {self.project.config.project.name}",
            command=self.command,
            seed=self.project.config.project.seed,
            sandbox=self.sandbox,
            isolation=self.isolation,
            suite_hash=self.project.suite.hash,
            config_hash=self.project.config.hash,
            versions=tuple(self._row(version) for version in self.versions),
            control=self.control,
            learning_curve=self._learning_curve(),
            failures_before=self.reports[self.first.number].failures,
            failures_after=self.reports[self.live.number].failures,
            n_before=before.n,
            n_after=after.n,
            quotes_before=_quotes(before),
            quotes_after=_quotes(after),
            own_types={leaf.type.value: leaf.definition for leaf in self.project.config.failures.leaf},
            stages=tuple(
                StageRate(
                    label=LABELS.get(kind := s.name.split(".")[0], kind),
                    episodes=s.n_episodes,
                    tool_calls=s.n_tool_calls,
                    wall_s=s.wall_s,
                )
                for s in self.stages.values()
            ),
            pairs=self._pairs(),
            samples_dropped=self.samples_dropped,
            n_infra_failed=self.n_infra_failed,
            n_failed=self.n_failed(),
            wall_s=sum(s.wall_s for s in self.stages.values()),
            cpu_s=sum(s.cpu_s for s in self.stages.values()),
        )

    def _row(self, version: PolicyVersion) -> VersionRow:
        report = self.reports[version.number]
        return VersionRow(
            number=version.number,
            parent=version.parent,
            note=version.note,
            sha256=version.sha256,
            success=success(report),
            decision=self.decisions.get(version.number),
            failures=report.failures,
        )

    def _failed(self, version: PolicyVersion) -> Survey:
        """What went wrong in the held-out episodes of a version."""
        return survey(self.project.store, f"stage:{gate_stage(self.project, version.number)}", limit=1000)

    def _learning_curve(self) -> tuple[tuple[int, float], ...]:
        points, n = [], 0
        for stage in self.stages.values():
            if "validation" in stage.metrics:
                n += stage.n_episodes if stage.name.startswith("turn") else 0
                points.append((n, stage.metrics["validation"]))
        return tuple(points)

    def _pairs(self) -> tuple[TracePair, ...]:
        """Held-out tasks that failed under the first version and pass under the live one, of varied failure."""
        if self.live.number == self.first.number:
            return ()
        passed = {
            trace.task_id: TraceVerdict(trace=trace, verdict=verdict)
            for trace, verdict in stored_attempts(self.project, gate_stage(self.project, self.live.number))
            if verdict.reward == 1.0
        }
        tasks = {task.id: task for task in self.project.suite.tasks}
        pairs: dict[str, TracePair] = {}
        for trace, verdict in stored_attempts(self.project, gate_stage(self.project, self.first.number)):
            critical = verdict.critical
            task = tasks.get(trace.task_id or "")
            if task and verdict.reward == 0.0 and critical and task.id in passed and critical.type.value not in pairs:
                pairs[critical.type.value] = TracePair(
                    task_id=task.id,
                    instruction=task.instruction,
                    before=TraceVerdict(trace=trace, verdict=verdict),
                    after=passed[task.id],
                )
        return tuple(pairs.values())[:N_PAIRS]


def _quotes(found: Survey) -> dict[str, tuple[Quote, ...]]:
    quotes: dict[str, tuple[Quote, ...]] = {}
    for cluster in found.clusters:  # the largest first
        known = quotes.get(cluster.type, ())
        if len(known) < N_QUOTES:
            shown = cluster.example
            made = Quote(evidence=shown.evidence, n=cluster.n, task_id=shown.task or "", trace_id=shown.trace_id)
            quotes[cluster.type] = (*known, made)
    return quotes


def _success(report: EvalReport) -> dict[str, Any]:
    found = success(report)
    return {"success": round(found.mean, 4), "ci95": [round(edge, 4) for edge in found.ci95]}
