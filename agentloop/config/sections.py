"""The tables of `agentloop.toml`: what can be set, with its unit and the reason of its default, said here and once.

A value with `${NAME}` in it is read from the environment, here; which file and which variable outranks which is
`settings.py`.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, SecretStr, field_validator, model_validator

from agentloop.config.kinds import KindSection, Section
from agentloop.errors import ConfigError
from agentloop.types import FailureType


class ProjectSection(Section):
    """Which tasks, and which random numbers."""

    name: str = "agentloop"
    suite: str = ""
    """Folder of the suite, relative to the project: `evals/NAME`. Who judges traces from elsewhere needs none."""
    seed: int = Field(default=0, ge=0, lt=2**31)
    """Decides every random draw. On one machine versions repeat, too, if what the commands print does."""


class SecretSection(Section):
    """A header that the proxy adds to a box's requests to one host; the box never has it."""

    host: str = Field(pattern=r"^[A-Za-z0-9.-]+$")
    """In the box it is asked by `http://`; the proxy asks it by TLS. A suite's `allowed_hosts` must name it, too."""
    header: str = Field(pattern=r"^[A-Za-z0-9-]+$")
    value: SecretStr
    """Text with `${NAME}` in it: the variable that has the secret, which no file should."""

    @field_validator("host")
    @classmethod
    def _as_it_is_asked(cls, host: str) -> str:
        return host.lower().rstrip(".")

    @field_validator("value", mode="before")
    @classmethod
    def _from_environment(cls, value: object) -> object:
        if isinstance(value, SecretStr):
            return value
        if not isinstance(value, str) or "${" not in value:
            raise ValueError('must name the variable that has the secret, as in "Bearer ${TOKEN}"')
        text = from_environment(value).strip()
        if not text.isprintable():
            raise ValueError("the variable has a line break in it, which no header may have")
        return text


class SandboxSection(Section):
    """Where actions run."""

    kind: str = "auto"
    """`auto` takes docker when an engine answers, else bubblewrap, else refuses. `unconfined` is no sandbox and
    `replay` answers from `journals`; both are had by name alone."""
    allow_unconfined: bool = False
    """True lets a policy be trained without a sandbox: whatever it tries is done on this machine, as this user."""
    journals: Path | None = None
    """Folder, relative to the project, in which all that happens in boxes is recorded; with `replay`, played from."""
    secrets: tuple[SecretSection, ...] = ()
    """Tables `[[sandbox.secrets]]`, one a host."""

    @field_validator("secrets")
    @classmethod
    def _one_a_host(cls, secrets: tuple[SecretSection, ...]) -> tuple[SecretSection, ...]:
        if len({secret.host for secret in secrets}) < len(secrets):
            raise ValueError("two for one host; leave one out")
        return secrets


class PolicySection(KindSection):
    """What chooses the actions."""

    built_in: ClassVar[tuple[str, ...]] = ("tiny", "openai", "vllm", "litellm", "scripted", "replay")
    shared: ClassVar[frozenset[str]] = frozenset({"kind", "max_concurrent"})
    kind: str = "tiny"
    """`tiny` is made and trained here; `openai` is any endpoint of that dialect; `vllm` is a vLLM server, whose tokens
    are kept exactly; `litellm` is any hosted model by its name there; `scripted` is a program; `replay` plays the
    answers of `traces` back. Any other is an installed name of `agentloop.policies` or `file.py:Class`, and the other
    keys of the table are its constructor's."""
    temperature: float = Field(default=1.0, gt=0.0, le=2.0)
    base_url: str | None = None
    """Of an OpenAI-compatible endpoint, up to and without `/chat/completions`."""
    model: str | None = None
    """The endpoint's name for the model; litellm's, such as `anthropic/NAME`."""
    api_key: SecretStr | None = None
    """Set it in the environment, as AGENTLOOP_POLICY__API_KEY."""
    script: str | None = None
    """`module:function` or `file.py:function`, called with the suite's tasks and giving a scripted policy;
    left out, each task's own reference solution is played."""
    max_concurrent: int = Field(default=8, ge=1)
    """Episodes at once against an endpoint."""
    traces: Path | None = None
    """What `replay` plays, relative to the project: a file of `agentloop traces export`, or a store."""

    @property
    def decisive(self) -> dict[str, Any]:
        """The settings that decide how it acts, as JSON; keys that came later are in it where they are set."""
        if not self.is_built_in:
            return {"kind": self.kind, **self.public_options}
        settings = self.model_dump(mode="json", exclude={"api_key", "max_concurrent"})
        return {name: value for name, value in settings.items() if name != "traces" or value is not None}


class McpSection(Section):
    """One MCP server, whose tools an agent has as `name__tool`."""

    name: str = Field(pattern=r"^[A-Za-z0-9_-]{1,32}$")
    command: str | None = None
    """Of a server over stdio: it runs in the box, by `sh -c`."""
    url: str | None = Field(default=None, pattern=r"^https?://")
    """Of a server by streamable HTTP: this machine asks it, whatever the box may reach."""
    headers: dict[str, SecretStr] = Field(default_factory=dict)
    """Sent to the url. In their values `${NAME}` is that variable of this process."""

    @model_validator(mode="after")
    def _one_way(self) -> McpSection:
        if (self.command is None) == (self.url is None) or (self.headers and self.url is None):
            raise ValueError("give it a command, which runs in the box, or a url, which may have headers")
        return self

    @field_validator("headers", mode="before")
    @classmethod
    def _from_environment(cls, headers: object) -> object:
        if not isinstance(headers, dict):
            return headers
        return {name: from_environment(text) if isinstance(text, str) else text for name, text in headers.items()}


class AgentSection(KindSection):
    """Who acts: our own agent and what it works with, or any other's program (`docs/02-agents.md`)."""

    built_in: ClassVar[tuple[str, ...]] = ("tool_loop", "command")
    kind: str = "tool_loop"
    """`tool_loop` is our own; `command` a program in the box, whose only network is the gateway. Any other is an
    installed name of `agentloop.agents` or `file.py:Class`, and the other keys of the table are its constructor's."""
    command: str | None = None
    """Of `command`: for `sh -c`, in the task's folder of the box."""
    files: Path | None = None
    """Folder, relative to the project, that boxes show at /agent, read-only: the program, or MCP servers."""
    instructions: Path | None = None
    """Of `tool_loop`: a file, relative to the project, whose text is the system prompt. Default: no system prompt."""
    tools: tuple[str, ...] = ("shell",)
    """Families of tools: `shell`, `python`, `files`, `search`, `delegate`, installed ones, or `file.py:Class`. `submit`
    is always there."""
    mcp: tuple[McpSection, ...] = ()
    """Tables `[[agent.mcp]]`, one a server."""
    compaction: Literal["none", "drop", "summarise"] = "none"
    """When a conversation has no more room: `none` ends the episode, `drop` leaves out the oldest results of tools,
    `summarise` asks the policy for a summary of it."""

    @property
    def decisive(self) -> dict[str, Any]:
        """The settings that decide how it acts, as JSON; keys that came later are in it where they are set."""
        if not self.is_built_in:
            return {"kind": self.kind, **self.public_options}
        settings = self.model_dump(mode="json", exclude={"mcp": {"__all__": {"headers"}}})
        later = {"kind": "tool_loop", "command": None, "files": None, "instructions": None}
        return {name: value for name, value in settings.items() if name not in later or value != later[name]}

    @model_validator(mode="after")
    def _one_kind(self) -> AgentSection:
        if self.kind == "command" and not self.command:
            raise ValueError('kind = "command" needs a command, the line that starts the program')
        if self.kind != "command" and self.command:
            raise ValueError('a command is of kind = "command"; set that, or leave it out')
        if self.kind != "tool_loop" and self.is_built_in and self.instructions is not None:
            raise ValueError("a program brings its own instructions; leave instructions out")
        if self.kind == "command" and (self.mcp or self.compaction != "none" or self.tools != ("shell",)):
            raise ValueError('a program of kind = "command" brings its own tools; leave tools, mcp and compaction out')
        return self

    @field_validator("mcp")
    @classmethod
    def _one_a_name(cls, servers: tuple[McpSection, ...]) -> tuple[McpSection, ...]:
        if len({server.name for server in servers}) < len(servers):
            raise ValueError("two of one name; rename one")
        return servers


class ServingSection(Section):
    """How `agentloop policies serve` starts vLLM."""

    python: str | None = None
    """Of the environment that has vLLM, `.../bin/python`; left out, the one that runs agentloop."""
    start_timeout_s: float = Field(default=900.0, gt=0.0)
    """A large model takes minutes to load."""


class WarmStartSection(Section):
    """How the tiny policy learns to use tools at all, before it learns to use them well."""

    demonstrator: str | None = None
    """Like `[policy] script`: the program that is imitated; left out, the reference solutions are."""
    n_demonstrations: int = Field(default=2000, ge=1)
    """Episodes of the demonstrator. A literal handful cannot teach copying to a model made from scratch."""
    max_steps: int = Field(default=900, ge=1)
    """Gradient steps after which the warm start gives up."""


class AlarmSection(Section):
    """Table `[train.alarms]`: limits of a step's figures, beyond which training returns to the last good checkpoint.

    A figure that the trainer does not record raises no alarm. `inf` turns a maximum off, 0 a minimum.
    """

    patience: int = Field(default=3, ge=1)
    """Steps in a row beyond a limit before there is an alarm: one step is noise."""
    max_mismatch: float = Field(default=0.05, gt=0.0)
    """Mean difference between the trainer's and the sampler's log-probabilities, in nats. Rounding to bfloat16 makes
    about 0.004; a wrong adapter, template or temperature makes tenths."""
    min_entropy: float = Field(default=0.0005, ge=0.0)
    """Mean entropy at a sampled token, in nats. Below it nothing is tried out any more, so nothing is learned."""
    max_clip: float = Field(default=0.5, gt=0.0)
    """Share of clipped tokens of either sign. Where most are clipped, the step is too long."""
    max_gradient: float = Field(default=1000.0, gt=0.0)
    """Norm of the gradient before it is clipped. A number that is not finite is beyond it."""
    max_kl: float = Field(default=5.0, gt=0.0)
    """Mean KL divergence to the reference at a sampled token, in nats."""
    max_part_drop: float = Field(default=0.5, gt=0.0)
    """How far one verifier's part of the reward, the mean of `patience` steps, may fall below its best while the reward
    as a whole does not fall: what rises in its place is a part that is easier to satisfy."""


class TrainSection(Section):
    """What makes the versions of `agentloop loop`."""

    kind: str | None = None
    """An installed name of `agentloop.trainers`, or `file.py:Class`. Default: what goes with `[policy] kind`, which is
    `grpo` for `tiny` and `fixed` for any other."""
    max_turns: int = Field(default=6, ge=1)
    """Turns of the project's life, not of one run: each makes a version and a decision. Raise it to go on."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Table `[train.options]`: the arguments of the trainer's constructor."""
    alarms: AlarmSection = AlarmSection()
    """Table `[train.alarms]`."""
    trusted_verifiers: tuple[str, ...] = ()
    """Names of verifiers that are not audited before the first turn; `*` is all. Cheats that satisfy such a verifier
    are learned."""
    variants: Path | None = None
    """Folder of a suite whose train tasks are trained on as well, as `agentloop train variants` writes it; relative to
    the project."""
    rewriter: dict[str, Any] | None = None
    """Table `[train.rewriter]`: the policy that words tasks anew, as keys of `[policy]`. Default: `rewriter` of
    `[train.options]`, where the trainer has that option."""


class GateSection(Section):
    """What a version must show before it is promoted."""

    trials: int = Field(default=4, ge=1)
    """Episodes of each held-out task: of the live version all, of a candidate until it is decided."""
    alpha: float = Field(default=0.05, gt=0.0, lt=0.5)
    """Probability, over the project's whole life, of ever promoting a version that is no better (`gate/wealth.py`)."""
    n_min: int = Field(default=20, ge=1)
    """Fewer tasks than this never promote."""


class LeafSection(Section):
    """One type of failure of a project's own."""

    type: FailureType
    """`GROUP.NAME`; the groups are infra, budget, call, obs, plan and outcome, and the name is none of ours."""
    definition: str = Field(min_length=1)
    """One sentence."""


class ReaderSection(Section):
    """A model that says why a run failed where rules do not know; see `judge.reader.Reader`."""

    model: str
    """As the endpoint, or litellm, has it."""
    base_url: str | None = None
    """Of an endpoint of the OpenAI dialect; without it litellm is asked."""
    api_key: str = "${AGENTLOOP_JUDGE_KEY:-}"
    """With `${NAME}`, the variable that has it."""
    votes: int = Field(default=3, ge=1)
    max_characters: int = Field(default=40_000, ge=1)
    temperature: float = Field(default=1.0, ge=0)


class FailuresSection(Section):
    """What counts as a failure, beyond the types that are there."""

    leaf: tuple[LeafSection, ...] = ()
    """Tables `[[failures.leaf]]`, one a type."""
    reader: ReaderSection | None = None
    """Table `[failures.reader]`."""

    @field_validator("leaf")
    @classmethod
    def _new_ones(cls, leaves: tuple[LeafSection, ...]) -> tuple[LeafSection, ...]:
        types = [leaf.type for leaf in leaves]
        duplicate = next((kind for n, kind in enumerate(types) if kind in [*FailureType, *types[:n]]), None)
        if duplicate is not None:
            raise ValueError(f"{duplicate.value} is there already; call it something else")
        return leaves


class UpstreamSection(Section):
    """A server of models behind the gateway."""

    name: str = Field(min_length=1)
    base_url: str = ""
    """Up to and without `/chat/completions`, as in `http://127.0.0.1:8000/v1`; of `via = "litellm"` none is needed."""
    api_key: str = ""
    """With `${NAME}`, the variable that has it."""
    via: Literal["http", "litellm"] = "http"
    """`litellm` knows every other provider, and costs several times as much CPU."""
    dialects: tuple[Literal["chat", "responses", "messages"], ...] = ("chat",)
    """What it speaks itself; from any other dialect calls are translated to chat."""
    models: tuple[str, ...] = ("*",)
    """Names, or patterns such as `gpt-*`, that it answers for."""
    serves_versions: bool = False
    """True for the server that has this project's versions, each as `policy-vN`."""
    gives_tokens: bool | None = None
    """Whether it gives token ids and log-probabilities, as vLLM does; left out, it is asked which server it is."""
    timeout_s: float = Field(default=600.0, gt=0)
    """Of a whole call."""
    silent_s: float = Field(default=120.0, gt=0)
    """How long it may say nothing."""


class AliasSection(Section):
    """A name that agents ask for, and who answers."""

    name: str = Field(min_length=1)
    to: dict[str, Annotated[float, Field(gt=0)]] = Field(min_length=1)
    """Name -> weight; all calls of an episode have the same answerer. `policy/live` and `policy/N` are versions."""


class GatewaySection(Section):
    """Models for agents that were written elsewhere; see docs/03-gateway.md."""

    upstream: tuple[UpstreamSection, ...] = ()
    """Tables `[[gateway.upstream]]`, the first one that answers for a name is asked."""
    alias: tuple[AliasSection, ...] = ()
    """Tables `[[gateway.alias]]`."""

    @field_validator("upstream", "alias")
    @classmethod
    def _one_a_name(cls, entries: tuple[Any, ...]) -> tuple[Any, ...]:
        names = [each.name for each in entries]
        twice = next((name for n, name in enumerate(names) if name in names[:n]), None)
        if twice is not None:
            raise ValueError(f"two are called {twice!r}; leave one out")
        return entries


class StoreSection(Section):
    """Where traces, verdicts and versions are kept."""

    url: SecretStr | None = None
    """A file, relative to the project, or `postgresql://USER:PASSWORD@HOST/NAME`; default: traces/store.db. `${NAME}`
    in it is read from the environment. Set it with AGENTLOOP_STORE__URL where it has a password."""
    url_file: Path | None = None
    """A file that has the URL, relative to the project, such as a secret that an orchestrator mounts."""
    project: str = Field(default="", pattern=r"^[A-Za-z0-9._-]*$")
    """The project (tenant) of every command that names none: to it belong the attempts, stages and versions that it
    makes, the traces that it imports or records, the spans that come without a key, and the traces that it judges.
    Default: the name of the project on a server and in a file that `url` names, else `default`. Projects that share a
    store need different ones."""
    connect_timeout_s: float = Field(default=10.0, gt=0)
    """For a connection to a server."""
    statement_timeout_s: float = Field(default=60.0, gt=0)
    """For one statement on a server."""
    lock_timeout_s: float = Field(default=30.0, gt=0)
    """For another process's transaction to end."""
    idle_timeout_s: float = Field(default=60.0, gt=0)
    """After which a server ends a transaction in which nothing happens."""

    @field_validator("url", mode="before")
    @classmethod
    def _from_environment(cls, value: object) -> object:
        if isinstance(value, str):
            return from_environment(value).strip()
        return value

    @model_validator(mode="after")
    def _one_place(self) -> StoreSection:
        if self.url is not None and self.url_file is not None:
            raise ValueError("has both url and url_file; leave one out")
        return self


class PriceSection(Section):
    """What a model's tokens cost, in USD per million: for limits in money, for budgets, and for `agentloop costs`."""

    model: str = Field(min_length=1)
    """Its name as the endpoint's answers have it, or as it is asked for; `*` is any letters. The first table that fits
    counts."""
    input: float = Field(ge=0, allow_inf_nan=False)
    output: float = Field(ge=0, allow_inf_nan=False)
    cached: float | None = Field(default=None, ge=0, allow_inf_nan=False)
    """Of prompt tokens that the endpoint had kept; left out, they cost what others do."""


def from_environment(text: str) -> str:
    """`text` with `${NAME}` and `${NAME:-default}` replaced by this process's variables. Raises ConfigError."""

    def value(match: re.Match[str]) -> str:
        variable = os.environ.get(match[1], match[2])
        if variable is None:
            raise ConfigError(f"the variable {match[1]} is not set, which {text!r} asks for; set it and run again")
        return variable

    return re.sub(r"\$\{(\w+)(?::-([^}]*))?\}", value, text)
