"""Where the policy in training answers: in this process, or at a vLLM server that gets each update by a new name."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from agentloop.policies.tiny import TinyPolicy
from agentloop.protocols import Policy
from agentloop.registry.artifacts import WEIGHTS
from agentloop.train.data.renderer import ChatRenderer, Renderer
from agentloop.train.model import Trainable
from agentloop.train.trainers.learning import Learning
from agentloop.types import PolicyVersion, VersionKind


class Host(Protocol):
    """The model of a turn, and who answers with it."""

    makes: VersionKind
    learning_rate: float
    answers_in_process: bool
    """Attempts are made in rounds, and each update is the policy at once."""

    def check_room(self, folder: Path, *, has_reference: bool) -> None:
        """Raise TrainingError where memory, or the disk of `folder`, cannot hold a turn.

        has_reference: the loss weighs a divergence from it.
        """
        ...

    def load(self, parent: Path | None, *, head: bool, seed: int) -> Trainable:
        """The model of the version in the folder `parent`; None: the base model alone. head: with a scalar output."""
        ...

    def name_of(self, version: PolicyVersion) -> str:
        """How a version is asked."""
        ...

    def models(self, number: int) -> frozenset[str]:
        """Names under which the policy answered by the turn that makes version `number`; see `Admission.models`."""
        ...

    def policy(self, name: str) -> Policy:
        """Who answers as `name`."""
        ...

    def model_of(self, name: str) -> str:
        """What answers of `name` have as their model."""
        ...

    def renderer(self) -> Renderer:
        """Words -> ids, as the model has them."""
        ...

    async def publish(self, name: str, sequences: Sequence[Sequence[int]], folder: Path) -> None:
        """Let `name` answer as the model in training does now.

        sequences: token ids on which that is checked; none where nothing was trained since the parent. folder: where
        the adapter or the weights are, or are written. Raises PublishError where it answers otherwise; the server then
        has what it had before.
        """
        ...

    async def retract(self, name: str) -> None:
        """Nobody asks `name` any more."""
        ...

    async def retract_updates(self, number: int) -> None:
        """Nobody asks any update of the turns that made the versions up to `number`; see `loading.update_model`."""
        ...

    async def release(self) -> None:
        """The turn is over: a server that had to give up the parent for it has the parent again.

        Raises PublishError where it has not.
        """
        ...


def version_names(number: int) -> frozenset[str]:
    """How a server and the gateway call the versions up to `number`."""
    return frozenset(f"policy-v{n}" for n in range(1, number + 1))


class InProcess:
    """See `Host`. The tiny policy: the weights that are trained are those that answer."""

    makes = VersionKind.weights
    answers_in_process = True

    def __init__(self, learning: Learning, temperature: float) -> None:
        self._temperature = temperature
        self.learning_rate = learning.learning_rate or 4e-4
        self._policy: TinyPolicy | None = None

    def check_room(self, folder: Path, *, has_reference: bool) -> None:
        """See `Host`. A model this small fits everywhere."""

    def load(self, parent: Path | None, *, head: bool, seed: int) -> Trainable:
        """See `Host`."""
        place = (parent or Path()) / WEIGHTS
        self._policy = TinyPolicy(place, temperature=self._temperature)
        companions = self._policy.save_companions
        trainable = Trainable(self._policy.model, head=head, write_companions=companions, seed=seed)
        trainable.load_head(place)
        return trainable

    def name_of(self, version: PolicyVersion) -> str:
        """See `Host`."""
        return f"policy-v{version.number}"

    def models(self, number: int) -> frozenset[str]:
        """See `Host`. The policy itself gives no name, and behind the gateway that of its kind."""
        return version_names(number) | {"", TinyPolicy.name}

    def policy(self, name: str) -> Policy:
        """See `Host`. The model in training itself, whatever its name."""
        return self._loaded

    def model_of(self, name: str) -> str:
        """See `Host`."""
        return name

    def renderer(self) -> Renderer:
        """See `Host`."""
        return ChatRenderer(self._loaded.chat)

    async def publish(self, name: str, sequences: Sequence[Sequence[int]], folder: Path) -> None:
        """See `Host`. Nothing is to be done."""

    async def retract(self, name: str) -> None:
        """See `Host`."""

    async def retract_updates(self, number: int) -> None:
        """See `Host`."""

    async def release(self) -> None:
        """See `Host`."""

    @property
    def _loaded(self) -> TinyPolicy:
        if self._policy is None:
            raise RuntimeError("load comes first")
        return self._policy
