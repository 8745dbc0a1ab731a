"""The nouns of agentloop, in the order in which one task meets them.

Task -> Episode -> Trace -> Verdict -> Sample -> PolicyVersion -> EvalReport -> Decision

Frozen models without behaviour beyond what follows from their own fields. Nothing here reads a
file, a clock or the network; SQL rows in `store/tables.py` are the storage form of these types.
"""

from __future__ import annotations

import hashlib
import json
import re
from datetime import datetime
from enum import StrEnum
from pathlib import Path
from typing import Any, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, Field


class Frozen(BaseModel):
    """A value: compared by its fields, never changed after it was made."""

    model_config = ConfigDict(frozen=True, extra="forbid")


def content_hash(value: object) -> str:
    """SHA-256 (hex) of the canonical JSON of `value`: key order and spacing do not matter."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return hashlib.sha256(text.encode()).hexdigest()


# ---------------------------------------------------------------------------------------- Task


class Split(StrEnum):
    """What a task may be used for. Only the gate and the report ever look at `heldout`."""

    train = "train"
    validation = "validation"
    heldout = "heldout"


class Part(Frozen):
    """A part chosen by name: an installed `kind` or a `module:Class`, and its keyword arguments."""

    kind: str
    options: dict[str, Any] = Field(default_factory=dict)


class RewardRule(Frozen):
    """How the numbers of a task's verifiers become its reward (`judge/combine.py`)."""

    combine: Literal["mean", "weighted", "gated", "all"] = "mean"
    """`gated`: every gate must give 1, or the reward is 0. `all`: 1 when every verifier gives 1, else 0."""
    weights: dict[str, float] = Field(default_factory=dict)
    """Verifier -> weight, at least 0; 1 where none is given. A verifier of weight 0 is recorded and counts nothing."""
    gates: tuple[str, ...] = ()
    """Verifiers that are asked first, and open or close the way to the others."""
    dispute: float = Field(default=0.5, ge=0, le=1)
    """With `mean` and `weighted`: verifiers further apart than this make the reward `disputed`; 1 is never."""


class SandboxSpec(Frozen):
    """What a box is made of and what it must hold. Equal specs may share a pool."""

    image: str = "host"
    """`host` is the host's own /usr, read-only; what else there is, `sandbox/images.py` says."""
    files: Path | None = None
    """Host folder that appears as the working directory /work; None gives an empty one."""
    read_only: bool = False
    """True mounts `files` read-only, which lets several episodes share one box."""
    agent_files: Path | None = None
    """Host folder that appears at /agent, read-only: the agent's program, which is no part of the task."""
    root: bool = False
    """True: the image's own root user and a root file system that can be written, as an image's tests may need."""
    workdir: str | None = None
    """Where commands start; None is /work, or with `root` the image's own folder."""
    scratch_mb: int = Field(default=64, gt=0)
    """Size in MiB of each writable tmpfs (/tmp, and /work unless read_only); less where memory_mb leaves less."""
    scratch_files: int | None = Field(default=None, gt=0)
    """Files and folders in each of them at most; None leaves that to the kernel."""
    memory_mb: int | None = Field(default=None, gt=0)
    """Of all processes and every tmpfs together, 32 or more; None asks for no limit."""
    cpus: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    """Cores' worth of CPU time; None asks for no limit."""
    n_processes: int | None = Field(default=None, gt=0)
    """Processes and threads at once; None asks for no limit."""
    lifetime_s: float | None = Field(default=None, gt=0)
    """Seconds after which the box ends itself, whatever runs in it; None is never."""
    allowed_hosts: tuple[str, ...] = ()
    """Host names (`*.example.com` for those below) that the proxy connects to; `*` is all but private ones."""


class EnvironmentSpec(Frozen):
    """A Gymnasium environment that a task is played in, by the tools `reset` and `step` (`agents/gym/loop.py`)."""

    id: str
    """As it is registered, such as `FrozenLake-v1`, or `module:Name-v0`, which imports the module first."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of `gymnasium.make`."""
    seed: int | None = Field(default=None, ge=0, lt=2**31)
    """Of its reset; None gives every episode its own."""
    processes: bool = False
    """True steps each in a process of its own: for environments whose steps take longer than a message to one."""


class Limits(Frozen):
    """What ends an episode that does not end itself."""

    max_steps: int = 8
    """Agent turns."""
    max_tokens: int = 1024
    """Sampled tokens in one turn."""
    tool_timeout_s: float = 30.0
    """Wall time of one tool call."""
    max_output: int = 16_384
    """Bytes of stdout and of stderr kept from one tool call, head and tail."""
    show_stderr: bool = True
    """False tells the agent only that there was error output: the programs of a pipeline write theirs in any order."""
    max_wall_s: float | None = None
    """Of the whole episode; None is no limit, as with the next two."""
    max_cost_usd: float | None = None
    """Of all that models answer in it, sub-agents' and summaries included. The turn that reaches it is the last."""
    max_context_tokens: int | None = None
    """Of a conversation and the next answer together; what happens then, `[agent] compaction` says."""


class Task(Frozen):
    """One thing to do, where it is done, and how the result is judged."""

    id: str
    instruction: str
    split: Split = Split.train
    pool: str = "default"
    """Tasks of one kind; the curriculum weighs pools by their recent failure."""
    sandbox: SandboxSpec = SandboxSpec()
    limits: Limits = Limits()
    verifiers: tuple[Part, ...] = ()
    solution: tuple[str, ...] = ()
    """Shell commands of a reference solution; the last one prints the answer. Never shown to a policy."""
    reward: RewardRule | None = None
    """None is the mean of the verifiers, with the default bound on their dispute."""
    environment: EnvironmentSpec | None = None
    """What is played in place of working in the box; None for nothing."""
    tags: tuple[str, ...] = ()
    """Words to choose tasks by; `must-pass` means something to the gate."""
    prefix: tuple[Step, ...] = ()
    """Turns that were taken before: a fork goes on from there, in a box that has what they left (`rollout/fork.py`)."""

    @property
    def hash(self) -> str:
        """Content hash; the folder's location is left out, its contents belong to the suite's hash."""
        return content_hash(self.portable())

    def portable(self) -> dict[str, Any]:
        """As JSON without locations, and without what is not there of later fields: a hash outlives new ones."""
        row = self.model_dump(mode="json", exclude={"sandbox": {"files", "agent_files"}})
        row["limits"] = {key: value for key, value in row["limits"].items() if value is not None}
        empty: dict[str, object] = {"reward": None, "environment": None, "tags": [], "prefix": []}
        return {key: value for key, value in row.items() if key not in empty or value != empty[key]}


# ------------------------------------------------------------------------------------- Episode


class ToolSpec(Frozen):
    """A tool as a policy is told of it; `parameters` is a JSON schema of an object."""

    name: str
    description: str
    parameters: dict[str, Any]


class ToolCall(Frozen):
    """A call as the policy wrote it: `arguments` is its JSON text, valid or not."""

    id: str
    name: str
    arguments: str
    error: str | None = None
    """Why the text could not be read as a call; None for a well-formed one."""


class Message(Frozen):
    """One chat message. `token_ids` are an assistant message's tokens exactly as they were sampled."""

    role: str
    content: str = ""
    reasoning: str = ""
    """What the model thought before it answered, where that was kept."""
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None
    name: str | None = None
    """Who speaks, where several agents or users share a role."""
    token_ids: tuple[int, ...] = ()


BROKEN = "broken"
"""How an answer finished with which a run ended because the call failed, was refused, or was cut off."""


class Completion(Frozen):
    """One answer of a policy, with the tokens that training needs when the policy has them."""

    message: Message
    finish_reason: str
    """`stop`, `length`, or what the endpoint said; `broken` of a call that failed (see `Step.is_broken`)."""
    prompt_token_ids: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    """Log-probability (nats) of each of `message.token_ids` under the sampler, at its temperature."""
    model: str | None = None
    n_prompt_tokens: int = 0
    n_cached_tokens: int = 0
    """Of the prompt's tokens, those that the endpoint had kept from an earlier call."""
    n_completion_tokens: int = 0
    cost_usd: float | None = None


class ToolResult(Frozen):
    """What a tool call gave back. A failing command is a result, with `ok` False."""

    call_id: str
    name: str
    content: str
    ok: bool
    exit_code: int | None = None
    timed_out: bool = False
    duration_s: float = 0.0


class ExecResult(Frozen):
    """A command's end. Non-zero exits and timeouts are results, with whatever was printed."""

    exit_code: int
    stdout: str
    stderr: str
    timed_out: bool = False
    dropped: int = 0
    """Bytes left out of the middle of stdout and stderr."""
    oom: bool = False
    """The box ran out of its memory while the command ran, and something in it was killed."""
    restarted: bool = False
    """A session's shell ended with this command; the next one starts in a new shell."""
    duration_s: float = 0.0


class Step(Frozen):
    """One agent turn: what the policy was told since the last one, what it answered, and what its tool calls gave."""

    index: int
    heard: tuple[Message, ...] = ()
    """Messages since the last step that are no results of its tool calls: a user's next turn, another agent's words."""
    completion: Completion
    results: tuple[ToolResult, ...] = ()
    started_at: datetime | None = None
    duration_s: float = 0.0
    compacted: bool = False
    """The context was shortened before this turn: what came earlier may no longer have been before the policy."""
    context: tuple[Message, ...] = ()
    """All that was before the policy, where that was shortened; else it is what came before, and what was heard."""
    copied: bool = False
    """The turn was taken over from another trace, for context: it is not trained on."""
    tools: tuple[dict[str, Any], ...] = ()
    """Definitions of the tools that the model was offered, as its request had them. () where they are those of the
    step before, and where nobody said."""

    @property
    def is_broken(self) -> bool:
        """The call failed, and none followed: the message is what there was of an answer, and is not trained on."""
        return self.completion.finish_reason == BROKEN

    @property
    def calls(self) -> list[tuple[ToolCall, ToolResult | None]]:
        """Each call of a tool with its result; calls that share an id have theirs in their order."""
        results: dict[str, list[ToolResult]] = {}
        for result in self.results:
            results.setdefault(result.call_id, []).append(result)
        calls: list[tuple[ToolCall, ToolResult | None]] = []
        for call in self.completion.message.tool_calls:
            own = results.get(call.id)
            calls.append((call, own.pop(0) if own else None))
        return calls

    @property
    def said(self) -> tuple[Message, ...]:
        """The answer and its results, as they are before the policy from then on."""
        told = (Message(role="tool", content=r.content, tool_call_id=r.call_id) for r in self.results)
        return (self.completion.message, *told)


class StopReason(StrEnum):
    """Why an episode ended; what went wrong in it is a `FailureType`."""

    submitted = "submitted"
    no_tool_call = "no_tool_call"
    step_limit = "step_limit"
    context_limit = "context_limit"
    time_limit = "time_limit"
    cost_limit = "cost_limit"
    cancelled = "cancelled"
    error = "error"
    unknown = "unknown"
    """Nothing that was imported tells it."""


class EpisodeState(StrEnum):
    """`finished` is judged, also where the agent crashed; `infra_failed` is never scored and does not train."""

    running = "running"
    finished = "finished"
    infra_failed = "infra_failed"


class Purpose(StrEnum):
    """What an episode was rolled out for."""

    demonstrate = "demonstrate"
    run = "run"
    train = "train"
    validate = "validate"
    evaluate = "evaluate"


class Episode(Frozen):
    """One attempt at a task. The id comes from the caller, so that a retry repeats no effect."""

    id: str
    task_id: str
    group: str
    """Episodes of one task under one policy version that are compared with each other."""
    purpose: Purpose
    policy_version: int
    seed: int
    state: EpisodeState = EpisodeState.running


class AttemptPhase(StrEnum):
    """How far an attempt had come when it broke."""

    sandbox = "sandbox"
    """Its sandbox was being created and made ready; nothing of the agent had started."""
    agent = "agent"
    """The agent had started."""
    artifacts = "artifacts"
    """Its files were being taken out of the sandbox."""
    tests = "tests"
    """Its tests ran on what it left."""


class Break(Frozen):
    """The error that ended an attempt, as facts; `faults.py` derives from them whose fault it was."""

    phase: AttemptPhase
    error: str | None = None
    """Name of the class of `errors.py` that was raised; None for an error of any other class."""
    status: int | None = None
    """HTTP status with which the model's endpoint answered."""
    cause: str | None = None
    """What the agent did to end its sandbox: memory, processes, supervisor, lifetime; None where nothing shows that
    it did."""


class Trace(Frozen):
    """The record of one run of an agent: first messages, then the steps in order.

    An imported one knows nothing of our episodes, and lacks what its source did not write down.
    """

    id: str
    """Of an imported one 32 hex digits, as OpenTelemetry has them, made from what was imported."""
    episode_id: str | None = None
    task_id: str | None = None
    policy_version: int | None = None
    isolation: str | None = None
    """What held the actions: container, namespaces, or none; None where nobody said."""
    source: str = "agentloop"
    """The format it came in."""
    source_id: str | None = None
    """What its source calls it."""
    session: str | None = None
    """The conversation of several traces that this one belongs to."""
    agent: str | None = None
    messages: tuple[Message, ...]
    steps: tuple[Step, ...] = ()
    children: tuple[SubTrace, ...] = ()
    answer: str | None = None
    """What was submitted; None when nothing was."""
    stop_reason: StopReason = StopReason.error
    error: str | None = None
    """The error that ended the run, in its own words, whoever's fault it was; None when none did."""
    broke: Break | None = None
    """Facts about `error`, from which follows whose fault it was; None for imported traces and older ones of ours."""
    program: bool = False
    """The agent was a program with tools of its own, whose results are known as the model was sent them: in words."""
    started_at: datetime | None = None
    duration_s: float = 0.0

    @property
    def answered(self) -> tuple[Step, ...]:
        """The steps without a broken one, which is nobody's turn."""
        return tuple(step for step in self.steps if not step.is_broken)

    @property
    def tool_calls(self) -> list[tuple[int, ToolCall, ToolResult | None]]:
        """(step index, call, its result) of every call, in order."""
        return [(step.index, call, result) for step in self.steps for call, result in step.calls]

    @property
    def contexts(self) -> list[tuple[Message, ...]]:
        """What was before the policy at each step, of a run of our own: others' may have been shortened unseen."""
        told, contexts = self.messages, []
        for step in self.steps:
            told = step.context or (*told, *step.heard)
            contexts.append(told)
            told += step.said
        return contexts


class SubTrace(Frozen):
    """A sub-agent's run, and where in its parent's it was asked for."""

    trace: Trace
    step: int | None = None
    """Index of the parent's step; None where nobody said."""
    call_id: str | None = None
    """The tool call that started it."""


# ------------------------------------------------------------------------------------- Verdict


class RewardState(StrEnum):
    """Only a `scored` reward trains or gates."""

    scored = "scored"
    infra_failed = "infra_failed"
    unscored = "unscored"
    disputed = "disputed"


OWN_LEAF = re.compile(r"(?:infra|agent|budget|call|obs|plan|outcome)\.[a-z][a-z0-9_]{0,39}")
"""What a project may call a leaf of its own: one of the seven groups, and a word that is not taken."""


class FailureType(StrEnum):
    """Taxonomy v2: 20 leaves in 7 groups, and `unclassified`, which is allowed and counted.

    A project's own leaf, `FailureType("plan.handoff")`, is a value like the others, equal to its text. Iterating
    gives ours alone: which others there are, and what they mean, the project's settings say.
    """

    infra_sandbox_failure = "infra.sandbox_failure"
    infra_tool_timeout = "infra.tool_timeout"
    infra_model_api_error = "infra.model_api_error"
    infra_grader_failure = "infra.grader_failure"
    agent_crashed = "agent.crashed"
    budget_context_overflow = "budget.context_overflow"
    budget_limit_reached = "budget.limit_reached"
    call_malformed = "call.malformed"
    call_unknown_tool = "call.unknown_tool"
    call_wrong_arguments = "call.wrong_arguments"
    obs_error_ignored = "obs.error_ignored"
    obs_misread = "obs.misread"
    obs_fabrication = "obs.fabrication"
    plan_repetition = "plan.repetition"
    plan_goal_drift = "plan.goal_drift"
    plan_no_clarification = "plan.no_clarification"
    outcome_premature_stop = "outcome.premature_stop"
    outcome_wrong_or_unverified = "outcome.wrong_or_unverified"
    outcome_reward_hack = "outcome.reward_hack"
    outcome_unsafe_action = "outcome.unsafe_action"
    unclassified = "unclassified"

    @classmethod
    def _missing_(cls, value: object) -> FailureType | None:
        """A leaf of a project's own. It is not kept: what a request made up must not stay in memory."""
        if not isinstance(value, str) or not OWN_LEAF.fullmatch(value):
            return None
        own = str.__new__(cls, value)
        own._name_, own._value_ = value.replace(".", "_"), value
        return own

    @property
    def is_infra(self) -> bool:
        """True for the group `infra`. Whether a run has a reward its state says, not its labels."""
        return self.value.startswith("infra.")


class Failure(Frozen):
    """One thing that went wrong, with words that the trace really contains."""

    type: FailureType
    step: int | None
    """Index of the step; None when the whole trace is meant."""
    evidence: str
    """Quoted from the trace."""
    detector: str
    """Name and version, `rules.malformed@1`."""
    confidence: float = 1.0
    critical: bool = False
    """True for exactly one failure of a failed trace: the first that was not recovered from."""


class Graded(Frozen):
    """What a verifier may give in place of a bare number: also what it rests on, and what it cost."""

    value: float | None
    """In [0, 1]; None, with an `error`, when there is no number."""
    error: str | None = None
    why: str = ""
    """What a person who doubts the number reads."""
    n_prompt_tokens: int = 0
    n_completion_tokens: int = 0
    cost_usd: float | None = None
    """None where nobody knows the price."""


class Score(Frozen):
    """One verifier's number in [0, 1], or why it gave none."""

    verifier: str
    version: str
    value: float | None
    error: str | None = None
    why: str = ""
    n_prompt_tokens: int = 0
    """What a judge model was sent for it, over all votes."""
    n_completion_tokens: int = 0
    cost_usd: float | None = None
    source: str | None = None
    """Who gave it, where that was later than the trace; None for what came with it."""

    @property
    def waiting(self) -> bool:
        """True when nothing went wrong: the outcome is only not known yet."""
        return self.value is None and (self.error or "").startswith(WAITING)


WAITING = "waiting: "
"""How the `error` of a score begins whose outcome will be known later."""


class Verdict(Frozen):
    """What a trace is worth and why."""

    trace_id: str
    state: RewardState
    reward: float | None
    """In [0, 1] when `state` is scored, else None."""
    scores: tuple[Score, ...] = ()
    failures: tuple[Failure, ...] = ()
    taxonomy: str | None = None
    """Version of the failure types; None where nobody classified."""
    rule: RewardRule | None = None
    """The task's, for scores that come later; None is the default."""

    @property
    def critical(self) -> Failure | None:
        """The failure that decided the outcome; None for a success."""
        return next((f for f in self.failures if f.critical), None)


class Span(NamedTuple):
    """One OpenTelemetry span as it is stored. A plain tuple, because thousands arrive in a second."""

    trace_id: str
    """32 hex digits."""
    span_id: str
    """16 hex digits, unique in its trace."""
    parent_id: str | None
    name: str
    kind: str
    """chat, tool, agent, or other: what its attributes say it did; event for a log record, which has a row, too."""
    start_ns: int
    """Since 1970; 0 where nobody said."""
    end_ns: int
    error: str | None
    """Why it failed, `error` when nothing more was said; None for one that did not."""
    session: str | None
    agent: str | None
    model: str | None
    tool: str | None
    n_prompt_tokens: int
    n_completion_tokens: int
    cost_usd: float | None
    head: bytes
    """JSON: {"attributes", "events", "links", "resource", "scope", ...} as they came, where `{"$": n}` stands for
    the n-th of `bodies`."""
    bodies: tuple[bytes, ...]
    """JSON of each message, tool argument and result: what repeats from span to span and is searched."""
    episode_id: str | None = None
    """What it says that its run belongs to: this, and the next two."""
    task_id: str | None = None
    policy_version: int | None = None
    reward: float | None = None
    """What it says that its run was worth, in [0, 1]."""
    response_id: str | None = None
    """The model's, by which two libraries' spans of one call are known to be of one."""


class Imported(Frozen):
    """A trace from elsewhere, with what its source said it was worth, and what had no place in it."""

    trace: Trace
    scores: tuple[Score, ...] = ()
    raw: dict[str, Any] = Field(default_factory=dict)
    """Path of a field -> its value: what could not be mapped is kept."""
    verdict: Verdict | None = None
    """A whole verdict, from those who have them; None where there are scores at most."""


# ------------------------------------------------------------------------- Sample, PolicyVersion


class Sample(Frozen):
    """One trainable row; the four sequences have one entry per token."""

    episode_id: str
    group: str
    pool: str
    policy_version: int
    token_ids: tuple[int, ...]
    action_mask: tuple[int, ...]
    """1 where the policy sampled the token, 0 for prompt and tool output."""
    logprobs: tuple[float, ...]
    """Behaviour log-probability where the mask is 1, 0.0 elsewhere."""
    temperature: float
    reward: float
    advantage: float = 0.0


class PolicyState(StrEnum):
    """candidate -> live -> retired, candidate -> held -> retired; the table is in `registry/`."""

    candidate = "candidate"
    live = "live"
    held = "held"
    retired = "retired"


class PolicyVersion(Frozen):
    """A policy that can be named, compared and rolled back to. Numbers are never used twice."""

    number: int
    parent: int | None
    kind: str
    """`weights` when we hold them, `remote` for a policy that others serve, `scripted` for code."""
    artifact: str | None
    """Folder of the weights, relative to the project; None when we hold none."""
    sha256: str
    """Hash of the artifact, or of the policy's settings when there is none."""
    config_hash: str
    state: PolicyState = PolicyState.candidate
    note: str = ""
    """Where it came from, in a few words."""
    created_at: datetime


# ------------------------------------------------------------------------- EvalReport, Decision


class EvalReport(Frozen):
    """One policy version on one suite split: every scored reward, by task."""

    suite: str
    suite_hash: str
    policy_version: int
    rewards: dict[str, tuple[float, ...]]
    """Task id -> one reward per scored episode; infrastructure failures are not in it."""
    n_infra: int = 0
    """Episodes without a reward."""
    n_lost: dict[str, tuple[int, ...]] = Field(default_factory=dict)
    """Task id -> attempts that infrastructure lost: one number for each reward of the task, then one for each episode
    that has no reward and lost an attempt. A task that lost none is not in it; nor is any in older reports."""
    failures: dict[str, int] = Field(default_factory=dict)
    """Critical failure type -> number of episodes."""


class Action(StrEnum):
    """What becomes of a candidate."""

    promote = "promote"
    hold = "hold"
    roll_back = "roll_back"


class Decision(Frozen):
    """The gate's word on a candidate, with what it rests on."""

    action: Action
    baseline: int
    candidate: int
    n_tasks: int
    difference: float
    """Mean over tasks of candidate minus baseline reward."""
    ci95: tuple[float, float]
    p_better: float
    """One-sided p-value of "not better"."""
    p_worse: float
    """One-sided p-value of "not worse"."""
    reasons: tuple[str, ...]
    created_at: datetime
