"""What can be set, in one tree of two levels: `agentloop.toml`, then the environment, then the command line.

The only place that reads the environment: `AGENTLOOP_POLICY__API_KEY` sets `[policy] api_key`.
Nothing happens at import.
"""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, SecretStr, ValidationError
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict

from agentloop.errors import ConfigError
from agentloop.types import content_hash

CONFIG_FILE = "agentloop.toml"


class Section(BaseModel):
    """One table of the file; an unknown key is an error, not a default."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


class ProjectSection(Section):
    """Which tasks, and which random numbers."""

    name: str = "agentloop"
    suite: str
    """Folder of the suite, relative to the project: `evals/NAME`."""
    seed: int = Field(default=0, ge=0, lt=2**31)
    """Decides every random draw. On one machine versions repeat, too, if what the commands print does."""


class SandboxSection(Section):
    """Where actions run."""

    kind: str = "auto"
    """`auto` takes docker when an engine answers, else bubblewrap, else refuses."""


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


class Config(BaseSettings):
    """The resolved settings of one project."""

    model_config = SettingsConfigDict(
        frozen=True,
        extra="forbid",
        env_prefix="AGENTLOOP_",
        env_nested_delimiter="__",
        nested_model_default_partial_update=True,
    )

    project: ProjectSection
    sandbox: SandboxSection = SandboxSection()
    policy: PolicySection = PolicySection()
    warm_start: WarmStartSection = WarmStartSection()
    train: TrainSection = TrainSection()
    gate: GateSection = GateSection()

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
        """What decides a result: everything but the name, the box's kind, secrets and how long to go on."""
        kept = self.model_dump(
            mode="json",
            exclude={
                "project": {"name"},
                "sandbox": True,
                "policy": {"api_key", "max_concurrent"},
                "train": {"max_turns", "stop_at"},
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
        raise ConfigError(f"no {CONFIG_FILE} in {project}; `agentloop init {project}` makes a project there") from None
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}; name the folder of a project") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: {error}; mend the file") from None
    try:
        config = Config(**tables)
        for section, keys in overrides.items():
            current = getattr(config, section)
            changed = type(current).model_validate({**current.model_dump(), **keys})
            config = config.model_copy(update={section: changed})
        return config
    except ValidationError as error:
        raise ConfigError(_first_problem(path, error)) from None


def _first_problem(path: Path, error: ValidationError) -> str:
    problem = error.errors()[0]
    where = ".".join(str(part) for part in problem["loc"])
    if problem["type"] == "extra_forbidden":
        return f"{path}: no setting {where!r}; the settings are in the file that `agentloop init` writes"
    got = "" if where == "policy.api_key" else f" (got {problem.get('input')!r})"
    return f"{path}: {where}: {problem['msg']}{got}"
