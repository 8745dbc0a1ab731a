"""Publishers keep their laws, in front of a server whose answers torch computes; `tests/serving` has vLLM itself."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from agentloop.publish.full import FullReload
from agentloop.publish.lora import LoraHotSwap
from agentloop.publish.probe import Probe
from agentloop.publish.server import VLLMControl
from agentloop.registry.artifacts import ADAPTER, WEIGHTS
from agentloop.testing.publishers import PUBLISHER_LAWS, PublisherCase, PublisherLaw
from agentloop.train.model import Lora, Placement, Trainable
from agentloop.train.probes import make_probe
from tests.serving.trained import random_rows, train
from tests.train.trainers.torch_server import BASE, TorchServer, serving
from tests.train.trainers.world import first_weights

LORA = Lora(2, 4)
CPU = Placement(device="cpu")
pytestmark = pytest.mark.slow


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[TorchServer]:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    with serving(first_weights(tmp_path / "v1") / "weights", LORA) as running:
        yield running


def version(server: TorchServer, lora: Lora | None, folder: Path | None, seed: int) -> Probe:
    """The probe of a version that stands on the server's model, and the version in `folder`."""
    trainable = Trainable.load(server.folder, lora=lora, placement=CPU)
    parent = trainable.state() if lora is None else None
    train(trainable, seed)
    if folder is not None:
        trainable.save(folder)
    return make_probe(trainable, random_rows(trainable.n_vocab), parent)


@pytest.mark.first(kind=1)
@pytest.mark.parametrize("law", PUBLISHER_LAWS, ids=lambda law: law.__name__)
@pytest.mark.parametrize("kind", ["lora", "full"])
def test_publisher_keeps(law: PublisherLaw, kind: str, server: TorchServer, tmp_path: Path) -> None:
    folder = tmp_path / "v2"
    lora = LORA if kind == "lora" else None
    probe = version(server, lora, folder, seed=1)
    other = probe.model_copy(update={"logprobs": probe.parent, "parent": probe.logprobs})
    publishers = {
        "lora": lambda: LoraHotSwap(server.url, BASE),
        "full": lambda: FullReload(server.url, BASE, server.folder),
    }
    control = VLLMControl(server.url)
    place = folder / (ADAPTER if kind == "lora" else WEIGHTS)
    case = PublisherCase(publishers[kind](), place, probe, other, BASE, control.models, control.logprobs)
    asyncio.run(law(case))
