"""All weights of a running server are replaced, and a reload that answers 200 with the old head is refused."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from transformers import AutoConfig, AutoModelForCausalLM

from agentloop.config.sections import PolicySection
from agentloop.errors import ConfigError, PublishError
from agentloop.policies.engine import Installed, vllm_command
from agentloop.policies.serving import VLLMServer
from agentloop.publish.check import compare
from agentloop.publish.full import FullReload
from agentloop.publish.probe import Probe, read_probe
from agentloop.registry.loading import loaded
from agentloop.train.algorithms.kinds import algorithm
from agentloop.train.data.admission import Admission
from agentloop.train.model import Placement, Trainable
from agentloop.train.probes import make_probe
from agentloop.train.trainers.learning import Learning
from agentloop.train.trainers.served import Server
from agentloop.train.trainers.served_weights import ServedWeights
from agentloop.train.trainers.weights import WeightsTrainer
from agentloop.types import PolicyVersion, VersionKind
from tests.api.serving import free_port
from tests.train.trainers.world import PARENT, draft_in, experience
from tests.train.trainers.world import SMALL as SMALL_TURN

from . import tiny_model
from .conftest import ONE_THREAD, SMALL, START_S
from .trained import random_rows, train
from .turns import PATTERN

pytestmark = pytest.mark.slow
DEV = {"VLLM_SERVER_DEV_MODE": "1"}
AS_IT_IS = PARENT.model_copy(update={"kind": VersionKind.settings})


@contextmanager
def running(installed: Installed, model: Path, log: Path, name: str) -> Iterator[str]:
    """The base URL of a server of its own, whose weights can be reloaded."""
    port = free_port()
    command, variables = vllm_command(installed, model, name, host="127.0.0.1", port=port, more=SMALL)
    server = VLLMServer(
        command, f"http://127.0.0.1:{port}", log=log, variables={**os.environ, **variables, **ONE_THREAD, **DEV}
    )
    server.start()
    try:
        server.wait(START_S)
        yield f"{server.url}/v1"
    finally:
        server.stop()


def trained(model: Path, folder: Path) -> Probe:
    """All weights of a model after an update, with their probe, as a trainer leaves them."""
    trainable = Trainable.load(model, placement=Placement(device="cpu"))
    parent = trainable.state()
    train(trainable, 1, size=0.02)
    trainable.save(folder)
    probe = make_probe(trainable, random_rows(trainable.n_vocab), parent)
    probe.save(folder)
    return probe


def version(number: int) -> PolicyVersion:
    return PolicyVersion.model_construct(number=number, kind=VersionKind.weights, lineage=None)


def test_whole_weights_are_reloaded_and_a_version_of_them_acts(
    installed: Installed, model: Path, tmp_path: Path
) -> None:
    probe = trained(model, tmp_path)
    with running(installed, model, tmp_path / "log", tiny_model.NAME) as url:
        policy = PolicySection(kind="vllm", base_url=url, model=tiny_model.NAME)
        with pytest.raises(ConfigError, match=r"v2 cannot act: .*`agentloop policies serve v2` serves it"):
            loaded(version(2), tmp_path, policy, tmp_path)
        publisher = FullReload(url, tiny_model.NAME, model)
        published = asyncio.run(publisher.publish("policy-v2", tmp_path / "weights", probe))
        assert published.worst < 1e-4 < published.apart
        assert published.is_proven
        assert loaded(version(2), tmp_path, policy, tmp_path).model == tiny_model.NAME
        with pytest.raises(PublishError, match=r"policy-v3 is refused: .*; the server has the weights before again"):
            asyncio.run(publisher.publish("policy-v3", model, probe))  # a stale folder
        asyncio.run(compare(publisher.server, tiny_model.NAME, probe))
        with pytest.raises(PublishError, match=r"policy-v4 is refused: .*; the server has the weights before again"):
            asyncio.run(publisher.publish("policy-v4", tmp_path / "nowhere", probe))
        asyncio.run(compare(publisher.server, tiny_model.NAME, probe))
        with pytest.raises(ConfigError, match="v2 is of kind weights"):
            loaded(version(2), tmp_path, policy.model_copy(update={"base_url": None}), tmp_path)


def test_a_turn_of_all_weights_and_the_server_has_its_own_again(
    installed: Installed, model: Path, tmp_path: Path
) -> None:
    draft = draft_in(tmp_path / "v2")
    with running(installed, model, tmp_path / "log", tiny_model.NAME) as url:
        options = {**SMALL_TURN, "steps_per_turn": 2, "group_size": 4, "learning_rate": 1e-3}
        learning = Learning(**options, model=model, device="cpu")
        host = ServedWeights(learning, Server(url, tiny_model.NAME, 1.0))
        made = WeightsTrainer(algorithm("grpo", {}), learning, host, Admission(unconfined=True), lambda _: Path(), "")
        assert asyncio.run(made.improve(AS_IT_IS, draft, experience(PATTERN))) is not None
        for figures in draft.steps.values():
            assert 0.0 < figures["mismatch/worst"] < 1e-4
        probe = read_probe(draft.folder)
        assert probe.is_proof
        with pytest.raises(PublishError, match="does not answer as it was trained"):  # the turn is over
            asyncio.run(compare(host._publisher.server, tiny_model.NAME, probe))
        published = asyncio.run(host._publisher.publish("policy-v2", draft.folder / "weights", probe))
        assert published.worst < 1e-4


def test_a_reload_of_a_tied_head_answers_200_and_is_refused(installed: Installed, model: Path, tmp_path: Path) -> None:
    config = AutoConfig.from_pretrained(model, tie_word_embeddings=True)
    tied = tmp_path / "tied"
    AutoModelForCausalLM.from_config(config).save_pretrained(tied)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        (tied / name).write_bytes((model / name).read_bytes())
    probe = trained(tied, tmp_path)
    with running(installed, tied, tmp_path / "log", "tied") as url:
        publisher = FullReload(url, "tied", tied)
        asyncio.run(publisher.reload(tmp_path / "weights"))  # the server finds nothing wrong with it
        asyncio.run(publisher.reload(tied))
        with pytest.raises(PublishError, match=r"policy-v2 is refused: .* does not answer as it was trained"):
            asyncio.run(publisher.publish("policy-v2", tmp_path / "weights", probe))


def test_routes_that_run_anything_are_asked_on_loopback_only() -> None:
    with pytest.raises(PublishError, match="let the server listen on"):
        FullReload("http://10.1.2.3:8000/v1", "m", Path())
