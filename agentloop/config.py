"""What can be set, in one tree of two levels: `agentloop.toml`, then the environment, then the command line.

The only place that reads the environment: `AGENTLOOP_POLICY__API_KEY` sets `[policy] api_key`.
Nothing happens at import.
"""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, cast

from pydantic import BaseModel, ConfigDict, Field, SecretStr, ValidationError, field_validator
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict, SettingsError

from agentloop.errors import ConfigError, did_you_mean
from agentloop.types import FailureType, content_hash

CONFIG_FILE = "agentloop.toml"
SECRET_NAMES = ("_KEY", "APIKEY", "TOKEN", "SECRET", "PASSWORD", "PASSWD", "CREDENTIALS")
"""How the names of variables end that have a secret."""
ENV_PREFIX = "AGENTLOOP_"


class Section(BaseModel):
    """One table of the file; an unknown key is an error, not a default."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


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


class PolicySection(Section):
    """What chooses the actions."""

    kind: Literal["tiny", "openai", "scripted"] = "tiny"
    """`tiny` is made and trained here; `openai` is any endpoint of that dialect; `scripted` is a program."""
    temperature: float = Field(default=1.0, gt=0.0, le=2.0)
    base_url: str | None = None
    """Of an OpenAI-compatible endpoint, up to and without `/chat/completions`."""
    model: str | None = None
    """The endpoint's name for the model."""
    api_key: SecretStr | None = None
    """Set it in the environment, as AGENTLOOP_POLICY__API_KEY."""
    script: str | None = None
    """`module:function` or `file.py:function`, called with the suite's tasks and giving a scripted policy;
    left out, each task's own reference solution is played."""
    max_concurrent: int = Field(default=8, ge=1)
    """Episodes at once against an endpoint."""


class WarmStartSection(Section):
    """How the tiny policy learns to use tools at all, before it learns to use them well."""

    demonstrator: str | None = None
    """Like `[policy] script`: the program that is imitated; left out, the reference solutions are."""
    n_demonstrations: int = Field(default=2000, ge=1)
    """Episodes of the demonstrator. A literal handful cannot teach copying to a model made from scratch."""
    max_steps: int = Field(default=900, ge=1)
    """Gradient steps after which the warm start gives up."""


class TrainSection(Section):
    """How a turn of the loop trains."""

    max_turns: int = Field(default=6, ge=1)
    """Turns of the project's life, not of one run: each makes a version and a decision. Raise it to go on."""
    steps_per_turn: int = Field(default=15, ge=1)
    """Updates between two versions."""
    n_tasks: int = Field(default=12, ge=1)
    """Tasks of one update."""
    group_size: int = Field(default=16, ge=2)
    """Episodes a task: what an episode's reward is compared with."""
    learning_rate: float = Field(default=4e-4, gt=0.0)
    stop_at: float = Field(default=0.97, gt=0.0, le=1.0)
    """Success on the validation split at which the loop has nothing left to learn."""
    n_threads: int = Field(default=1, ge=1)
    """Torch threads. One is the cheapest for models this small, and keeps a run repeatable."""


class GateSection(Section):
    """What a version must show before it is promoted."""

    trials: int = Field(default=4, ge=1)
    """Episodes of each held-out task."""
    alpha: float = Field(default=0.05, gt=0.0, lt=0.5)
    """Probability, per candidate, of promoting a version that is no better."""
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
    usd_per_million: tuple[float, float] | None = None
    """Price of prompt and completion tokens, where nobody else knows it."""


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
        taken = next((kind for n, kind in enumerate(types) if kind in [*FailureType, *types[:n]]), None)
        if taken is not None:
            raise ValueError(f"{taken.value} is there already; call it something else")
        return leaves


class Config(BaseSettings):
    """The resolved settings of one project."""

    model_config = SettingsConfigDict(
        frozen=True,
        extra="forbid",
        env_prefix=ENV_PREFIX,
        env_nested_delimiter="__",
        nested_model_default_partial_update=True,
    )

    project: ProjectSection = ProjectSection()
    sandbox: SandboxSection = SandboxSection()
    policy: PolicySection = PolicySection()
    warm_start: WarmStartSection = WarmStartSection()
    train: TrainSection = TrainSection()
    gate: GateSection = GateSection()
    failures: FailuresSection = FailuresSection()

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """The environment outranks the file, which is what the constructor is given."""
        return env_settings, init_settings

    @property
    def hash(self) -> str:
        """What decides a result: everything but names, the box's kind, secrets and how long to go on."""
        kept = self.model_dump(
            mode="json",
            exclude={
                "project": {"name"},
                "sandbox": True,
                "policy": {"api_key", "max_concurrent"},
                "train": {"max_turns", "stop_at"},
                "failures": True,
            },
        )
        return content_hash(kept)


def load_config(project: Path, /, **overrides: dict[str, Any]) -> Config:
    """The settings of the project in folder `project`.

    overrides: section -> its keys, from the command line; they outrank file and environment.
    Raises ConfigError, with the file and the key, for whatever does not fit.
    """
    path = project / CONFIG_FILE
    try:
        tables = tomllib.loads(path.read_text())
    except FileNotFoundError:
        raise ConfigError(f"no {CONFIG_FILE} in {project}; {_where_a_project_can_be(project)}") from None
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}; name the folder of a project") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: {error}; mend the file") from None
    inside: tuple[str, ...] = ()
    try:
        config = Config(**tables)
        for section, keys in overrides.items():
            inside = (section,)
            current = getattr(config, section)
            changed = type(current).model_validate({**current.model_dump(), **keys})
            config = config.model_copy(update={section: changed})
        return config
    except ValidationError as error:
        raise ConfigError(_first_problem(path, error, inside)) from None
    except SettingsError:  # a variable that is named like a table
        whole = {f"{ENV_PREFIX}{table}".upper() for table in Config.model_fields}
        named = ", ".join(sorted(variable for variable in os.environ if variable.upper() in whole))
        raise ConfigError(
            f"{named}: a variable sets one key, as {ENV_PREFIX}SANDBOX__KIND sets [sandbox] kind; name the key, too"
        ) from None


def suite_folder(project: Path, config: Config) -> Path:
    """Where the tasks of the project in folder `project` are. Raises ConfigError where it names none."""
    if not config.project.suite:
        raise ConfigError(
            f'{project / CONFIG_FILE}: [project] has no suite; name the folder of its tasks there: suite = "evals/NAME"'
        )
    return project / config.project.suite


def place(path: Path, table: str, key: str) -> str:
    """Where `[table] key` was set: the variable when there is one, which outranks the file at `path`."""
    variable = f"{ENV_PREFIX}{table}__{key}".upper()
    return variable if variable in map(str.upper, os.environ) else f"{path}: [{table}] {key}"


def _where_a_project_can_be(folder: Path) -> str:
    """The next move, which must be one that `init` accepts: it makes a project in a new or empty folder only."""
    below = sorted(file.parent for file in folder.glob(f"*/{CONFIG_FILE}"))
    if below:
        return f"did you mean {' or '.join(map(str, below[:3]))}?"
    if folder.is_dir() and any(folder.iterdir()):
        return f"name the folder of a project, or make one in a new folder: `agentloop init {folder / 'my-project'}`"
    return f"`agentloop init {folder}` makes a project there"


def _first_problem(path: Path, error: ValidationError, inside: tuple[str, ...]) -> str:
    """inside: the table that was checked, when it was not the whole tree."""
    problem = min(error.errors(), key=lambda found: found["type"] != "extra_forbidden")
    table, *keys = (*inside, *map(str, problem["loc"]))
    if len(keys) > 1:
        return _inside_a_list(path, table, keys, problem["msg"])
    if problem["type"] == "extra_forbidden":
        return _unknown(path, table, *keys[:1], is_table=isinstance(problem["input"], dict))
    if not keys:
        return f"{path}: {table} must be a table; write [{table}] on a line of its own and its keys below"
    is_secret = (table, keys[0]) in (("policy", "api_key"), ("sandbox", "secrets"))
    got = "" if is_secret else f" is {problem['input']!r}"
    wanted = problem["msg"].removeprefix("Value error, ").replace("Input", "it", 1).partition(", unable to")[0]
    return f"{place(path, table, keys[0])}{got}: {wanted}"


def _inside_a_list(path: Path, table: str, keys: Sequence[str], problem: str) -> str:
    """keys: the list, the place in it, and the key; what is there is not shown, because it may be a secret."""
    where = f"[[{table}.{keys[0]}]] number {int(keys[1]) + 1}" if keys[1].isdigit() else f"[{table}] {keys[0]}"
    return f"{path}: {' '.join([where, *keys[2:]])}: {problem.removeprefix('Value error, ')}"


def _unknown(path: Path, table: str, key: str | None = None, *, is_table: bool) -> str:
    """What to say of a table that does not exist, or of a key that its table does not have."""
    sections = {name: list(cast(type[Section], f.annotation).model_fields) for name, f in Config.model_fields.items()}
    if key is not None:
        hint = did_you_mean(key, sections[table]) or _belongs_in(key, sections)
        return f"{place(path, table, key)}: no such key in this table (keys: {', '.join(sections[table])}){hint}"
    tables = f"(tables: {', '.join(sections)})"
    if is_table:
        return f"{path}: unknown table [{table}] {tables}{did_you_mean(table, sections)}"
    return f"{path}: {table!r} is set above the first table {tables}{_belongs_in(table, sections)}"


def _belongs_in(key: str, sections: dict[str, list[str]]) -> str:
    tables = [f"[{name}]" for name, keys in sections.items() if key in keys]
    return f"; it belongs in {' or '.join(tables)}" if tables else ""


def known_secrets(project: Path) -> list[str]:
    """Values that must never be stored, whatever their shape, if they are long enough to look for (`Redactor`).

    Those of variables whose names end as a secret's does, and those in the settings of the project in folder
    `project`, if it has any. Raises ConfigError for settings that cannot be read, because they may have secrets.
    """
    found = [value for name, value in os.environ.items() if name.upper().endswith(SECRET_NAMES)]
    if (project / CONFIG_FILE).exists():
        config = load_config(project)
        given = [config.policy.api_key, *(secret.value for secret in config.sandbox.secrets)]
        texts = [text.get_secret_value() for text in given if text is not None]
        found += [*texts, *(word for text in texts for word in text.split())]  # as in "Bearer ${TOKEN}"
    return found


def from_environment(text: str) -> str:
    """`text` with `${NAME}` and `${NAME:-default}` replaced by this process's variables. Raises ConfigError."""

    def value(found: re.Match[str]) -> str:
        known = os.environ.get(found[1], found[2])
        if known is None:
            raise ConfigError(f"the variable {found[1]} is not set, which {text!r} asks for; set it and run again")
        return known

    return re.sub(r"\$\{(\w+)(?::-([^}]*))?\}", value, text)
