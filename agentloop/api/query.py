"""`/api/v1`: stored traces by filter and by id, their spans by page, and scores and labels that come later.

Every answer is about the project of the key that asked. Cursors are what an answer gave as `next`.
"""

from __future__ import annotations

import re
from datetime import datetime
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Path, Query, Request
from pydantic import AfterValidator, BaseModel, Field
from starlette.responses import StreamingResponse

from agentloop.api.feedback import GivenLabel, GivenReward, GivenScore, Resolution, person
from agentloop.errors import ConfigError, StateError
from agentloop.failures.analysis.pareto import By, Survey
from agentloop.failures.analysis.survey import survey
from agentloop.formats.export import load_exporter
from agentloop.judge.settle import resolve, settle
from agentloop.judge.stored import is_ours, read
from agentloop.otel.stored import StoredTrace, read_each
from agentloop.store.store import Store
from agentloop.store.tables import TraceSummary
from agentloop.store.verdicts import IMPORT, JUDGE
from agentloop.types import Failure, FailureType, RewardState, Score, Span, Trace, Verdict

MAX_PAGE = 1000
MAX_STEPS_SPANS = 2000
"""Spans of a trace up to which it is shown as steps, too; a longer one is read by its spans, a page at a time."""
_OF_OTLP = re.compile(r"[0-9A-Fa-f]{32}")
TraceId = Annotated[
    str,
    Path(min_length=1, max_length=64, pattern=r"^[A-Za-z0-9_.:-]+$"),
    AfterValidator(lambda trace_id: trace_id.lower() if _OF_OTLP.fullmatch(trace_id) else trace_id),
]
"""OTLP's are hex digits, whatever their case; they are stored in lower case."""
Name = Annotated[str, Path(min_length=1, max_length=100, pattern=r"^[A-Za-z0-9_.:@/ -]+$")]
Cursor = Annotated[str | None, Query(max_length=100, description="`next` of the page before.")]
Filter = Annotated[str, Query(max_length=4000, description="See the filter language.")]
Limit = Annotated[int, Query(ge=1, le=MAX_PAGE)]


def project_of(request: Request) -> str:
    """Whose traces a request is about, as `auth.Guard` found."""
    project: str = request.state.project
    return project


Project = Annotated[str, Depends(project_of)]


class Traces(BaseModel):
    """A page of traces, newest first."""

    traces: list[TraceSummary]
    next: str | None


class SpanItem(BaseModel):
    """One span without its messages."""

    span_id: str
    parent_id: str | None
    name: str
    kind: str
    start_ns: int
    end_ns: int
    error: str | None
    session: str | None
    agent: str | None
    model: str | None
    tool: str | None
    n_prompt_tokens: int
    n_completion_tokens: int
    cost_usd: float | None


class Spans(BaseModel):
    """A page of spans by start time."""

    spans: list[SpanItem]
    next: str | None


class TraceDocument(BaseModel):
    """Everything known of a trace."""

    summary: TraceSummary
    trace: Trace | None = Field(description="As steps; null for one of very many spans, which is read by its spans.")
    verdict: Verdict
    raw: dict[str, Any] = Field(description="What its source said and a trace has no place for.")
    span_ids: list[str]


class Asked(BaseModel):
    """A trace that a person is asked about."""

    trace: TraceSummary
    why: str = Field(description="disputed, waiting, or sampled")


class PastVerdict(BaseModel):
    """One verdict of a trace's history."""

    given_at: datetime
    by: str
    why: str
    verdict: Verdict
    supersedes: str | None = Field(description="The other person whose verdict stood until this one.")


def router(store: Store) -> APIRouter:
    """The routes over `store`."""
    routes = APIRouter(prefix="/api/v1")

    @routes.get("/traces")
    def list_traces(
        project: Project,
        filter: Filter = "",
        cursor: Cursor = None,
        limit: Limit = 50,
    ) -> Traces:
        """Traces for which a filter holds, newest first."""
        page = store.find(filter, project=project, cursor=cursor, limit=limit)
        return Traces(traces=page.traces, next=page.next)

    @routes.get("/traces/{trace_id}")
    def show_trace(project: Project, trace_id: TraceId) -> TraceDocument:
        """One trace with its verdict and the ids of all its spans."""
        row = store.row(project, trace_id)
        summary = TraceSummary.model_validate(row.model_dump(exclude={"body", "bodies"}))
        stored = StoredTrace(store, summary)
        return TraceDocument(
            summary=summary,
            trace=stored.trace if row.body is not None or row.n_spans <= MAX_STEPS_SPANS else None,
            verdict=stored.verdict,
            raw=dict(stored.raw),
            span_ids=store.span_ids(project, trace_id),
        )

    @routes.get("/traces/{trace_id}/spans")
    def list_spans(project: Project, trace_id: TraceId, cursor: Cursor = None, limit: Limit = 200) -> Spans:
        """The spans of a trace by start time."""
        store.row(project, trace_id)
        page = store.spans(project, trace_id, after=cursor, limit=limit)
        return Spans(spans=[_item(span) for span in page.spans], next=page.next)

    @routes.get("/export", response_class=StreamingResponse)
    def export(
        project: Project,
        format: Annotated[
            str, Query(max_length=100, description="jsonl, parquet, atif, otlp, or installed.")
        ] = "jsonl",
        filter: Filter = "",
    ) -> StreamingResponse:
        """Whole traces for which a filter holds, newest first, as a file that is sent while it is made."""
        exporter = load_exporter(format)
        store.find(filter, project=project, limit=1)  # a wrong filter is told before the answer begins
        name = "traces" + (".jsonl" if exporter.one_each else exporter.suffix)
        return StreamingResponse(
            exporter.write(read_each(store, store.every(filter, project=project))),
            media_type=exporter.media_type,
            headers={"Content-Disposition": f'attachment; filename="{name}"'},
        )

    @routes.put("/traces/{trace_id}/scores/{verifier:path}")
    def put_score(project: Project, trace_id: TraceId, verifier: Name, body: GivenScore) -> Verdict:
        """Attach a verifier's number. Sent again, it is the same; sent anew, it replaces what its source said."""
        if body.source in (JUDGE, IMPORT):
            raise ConfigError(f"source {body.source!r} is what agentloop itself says; name who gives this score")
        if (body.value is None) == (body.error is None):
            raise ConfigError("a score needs either a value, or an error that says why there is none")
        score = Score(verifier=verifier, version=body.version, value=body.value, error=body.error)
        store.put_score(project, trace_id, score, source=body.source)
        settle(store, project, trace_id)
        return store.verdict(project, trace_id)

    @routes.put("/traces/{trace_id}/labels/{detector:path}/{kind}")
    def put_label(project: Project, trace_id: TraceId, detector: Name, kind: FailureType, body: GivenLabel) -> Verdict:
        """Attach a failure. Without `critical`, the first label of a trace that did not succeed is critical.

        A person's label (`human:NAME`) replaces that person's label before it, has a line in the history, and is
        critical unless the trace succeeded.
        """
        row = store.row(project, trace_id)
        if (stored := read(store, row)) is not None:
            body.check(stored.trace)
        fields = body.model_dump(exclude={"critical"})
        failure = Failure(type=kind, detector=detector, critical=body.critical or False, **fields)
        if (by := person(detector)) is None:
            store.put_label(project, trace_id, failure, critical_if_first=body.critical is None)
            return store.verdict(project, trace_id)
        if body.critical is None:
            failure = failure.model_copy(update={"critical": row.reward is None or row.reward < 1.0})
        store.put_person_label(project, trace_id, failure, by=by, why="")
        return store.verdict(project, trace_id)

    @routes.put("/traces/{trace_id}/reward")
    def put_reward(project: Project, trace_id: TraceId, body: GivenReward) -> Verdict:
        """Say what a trace is worth. Refused where a person has judged it: only `resolution` supersedes that."""
        if body.reward is None and body.state is RewardState.scored:
            raise ConfigError(
                "reward: missing; send a number from 0 to 1, or a state that has none, such as `disputed`"
            )
        if body.reward is not None and body.state is not RewardState.scored:
            raise ConfigError(f"state: {body.state} has no reward; leave out one of the two")
        row = store.row(project, trace_id)
        if is_ours(row) and row.reward_state == RewardState.infra_failed != body.state:
            raise StateError(f"trace {trace_id} is infra_failed and cannot become {body.state}; run its task again")
        store.put_reward(project, trace_id, body.state, body.reward)
        return store.verdict(project, trace_id)

    @routes.put("/traces/{trace_id}/resolution")
    def put_resolution(project: Project, trace_id: TraceId, body: Resolution) -> Verdict:
        """Resolve what is disputed or waits for a person, or correct a reward. The same again changes nothing."""
        resolve(store, project, trace_id, body.reward, by=body.by, why=body.why)
        return store.verdict(project, trace_id)

    @routes.get("/traces/{trace_id}/verdicts")
    def list_verdicts(project: Project, trace_id: TraceId) -> list[PastVerdict]:
        """Every verdict on a trace, the oldest first."""
        return [PastVerdict(**past._asdict()) for past in store.history(project, trace_id)]

    @routes.get("/failures")
    def list_failures(
        project: Project,
        filter: Filter = "",
        by: By = "type",
        since: Annotated[int | None, Query(ge=0, lt=2**31, description="Only clusters new since this version.")] = None,
        labels: Annotated[bool, Query(description="All labels, of successes and unscored traces, too.")] = False,
        limit: Limit = 20,
    ) -> Survey:
        """What fails most, in clusters of alike failures, and how it changed with the policy versions."""
        return survey(store, filter, project=project, by=by, since=since, every=labels, limit=limit)

    @routes.get("/queue")
    def list_queue(project: Project, sample: Annotated[int, Query(ge=0, le=MAX_PAGE)] = 0) -> list[Asked]:
        """What a person is asked about: disputed, waiting, and `sample` others that no person has judged."""
        return [Asked(trace=trace, why=why) for trace, why in store.queue(project, sample=sample)]

    return routes


def _item(span: Span) -> SpanItem:
    return SpanItem(**{name: getattr(span, name) for name in SpanItem.model_fields})
