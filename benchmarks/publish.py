"""How fast an adapter becomes live on a running vLLM server, checked, and whether a broken one is ever accepted.

    python benchmarks/publish.py --model MODEL --python ENV/bin/python

MODEL: folder of a small model with two layers or more; ENV has vLLM. The benchmark starts a server of its own. Each of
30 adapters is loaded, checked against torch and announced. Then each of 20 faults is injected; torch says by how much
it changes a log-probability, and the version must be refused while the version before still answers. The last line is
JSON; exits 1 when half of the publishes took over 100 ms, a sound adapter is refused, a fault is accepted, or torch
finds one harmless.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shutil
import socket
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import NamedTuple

import numpy as np
import torch
from peft import PeftModel
from safetensors import SafetensorError
from transformers import AutoModelForCausalLM

from agentloop.errors import PublishError
from agentloop.policies.engine import find_vllm, vllm_command
from agentloop.policies.serving import VLLMServer
from agentloop.publish.check import compare
from agentloop.publish.lora import LoraHotSwap
from agentloop.publish.probe import Probe, furthest
from agentloop.registry.artifacts import weights_hash
from agentloop.train.data.row import Row
from agentloop.train.model import Lora, Placement, Trainable
from agentloop.train.probes import make_probe
from benchmarks.publish_faults import broken_folders

NAME = "base"
LORA = Lora(rank=4, alpha=8)
MAX_MS = 100.0
START_S = 400.0
N_ROWS, N_TOKENS = 64, 48
STEP = 0.01
"""Standard deviation of what an update adds to B."""
KEPT = 2
"""Adapters that stay loaded while the next is published."""


class Version(NamedTuple):
    """An adapter with its probe."""

    folder: Path
    probe: Probe


class Outcome(NamedTuple):
    """What came of a fault."""

    fault: str
    changes: float | None
    """Largest difference in nats by torch; None where nothing can be loaded, or nothing answers."""
    refusal: str | None
    """None: it was accepted."""
    is_intact: bool
    """Whether the version before still answers as it was trained, where a server is left."""


class Trainer:
    """Makes versions one after the other: each is an update of the one before."""

    def __init__(self, model: Path, folder: Path, seed: int = 0) -> None:
        self._model = Trainable.load(model, lora=LORA, placement=Placement(device="cpu"))
        self._base_hash = weights_hash(model)
        self._folder = folder
        self._generator = torch.Generator().manual_seed(seed)
        rng = np.random.default_rng(seed)
        self._rows = [_row(rng.integers(5, self._model.n_vocab, N_TOKENS)) for _ in range(N_ROWS)]
        self._n = 0

    def next(self) -> Version:
        """Stands for an update: B gets values of its own."""
        parent = self._model.state()
        with torch.no_grad():
            for name, value in self._model.parameters():
                if "lora_B" in name:
                    value.add_(STEP * torch.randn(value.shape, generator=self._generator))
        self._n += 1
        place = self._folder / str(self._n)
        self._model.save(place)
        probe = make_probe(self._model, self._rows, parent, base_hash=self._base_hash)
        return Version(place / "adapter", probe)


def _row(ids: np.ndarray) -> Row:
    mask = np.ones(len(ids), dtype=np.bool_)
    mask[0] = False
    return Row("benchmark", None, None, "", ids.astype(np.int32), mask, None, 1.0, (), None)


def changed(model: Path, folder: Path, probe: Probe) -> float | None:
    """Largest difference in nats between torch with the adapter in `folder` and the probe; None if it does not load."""
    base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, local_files_only=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            whole = PeftModel.from_pretrained(base, str(folder)).eval()
        except (OSError, ValueError, RuntimeError, SafetensorError):
            return None
    with torch.no_grad():
        scores = []
        for ids in probe.sequences:
            logprobs = whole(input_ids=torch.tensor([ids])).logits[0].log_softmax(-1)
            own = logprobs[:-1].gather(1, torch.tensor(ids[1:])[:, None])[:, 0]
            scores.append([float("nan"), *own.tolist()])
    return furthest(probe.at(scores), probe.logprobs)


def other_model(model: Path, place: Path, *, seed: int | None = None) -> Path:
    """A base like `model`, with noise of that seed; without one, with the words of its vocabulary in another order."""
    other = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, local_files_only=True)
    with torch.no_grad():
        if seed is not None:
            generator = torch.Generator().manual_seed(seed)
            for value in other.parameters():
                value.add_(0.02 * torch.randn(value.shape, generator=generator))
        else:
            for layer in (other.get_input_embeddings(), other.get_output_embeddings()):
                layer.weight.copy_(layer.weight.flip(0))
    other.save_pretrained(place)
    return place


async def timed(publisher: LoraHotSwap, trainer: Trainer, n: int) -> tuple[list[float], float, Version]:
    """(seconds of each publish, worst difference between torch and the server, the last version)."""
    seconds = []
    worst = 0.0
    for number in range(1, n + 1):
        version = trainer.next()
        published = await publisher.publish(f"policy-v{number}", *version)
        seconds.append(published.seconds)
        worst = max(worst, published.worst)
        if not published.is_proven:
            raise PublishError(f"policy-v{number} could not be told from its parent")
        if number > KEPT:
            await publisher.retract(f"policy-v{number - KEPT}")
    return seconds, worst, version


async def injected(
    publisher: LoraHotSwap, server: VLLMServer, trainer: Trainer, parent: Version, model: Path, folder: Path, live: str
) -> list[Outcome]:
    """Publish each broken version while `live` is served, which is `parent`."""
    version = trainer.next()
    outcomes = []

    async def attempt(fault: str, name: str, broken: Version) -> None:
        refusal = None
        try:
            await publisher.publish(name, *broken)
        except PublishError as error:
            refusal = str(error)
        is_intact = await intact(publisher, live, parent) and (name == live or not await publisher.serves(name))
        outcomes.append(Outcome(fault, changed(model, broken.folder, broken.probe), refusal, is_intact))

    for n, (fault, damage) in enumerate(broken_folders(LORA.rank, LORA.alpha).items()):
        copy = folder / "broken" / str(n)
        shutil.copytree(version.folder, copy)
        damage(copy, parent.folder)
        await attempt(fault, f"broken-{n}", Version(copy, version.probe))
    others = {"other base": 1, "other tokenizer": None}
    for fault, seed in others.items():
        place = folder / fault.replace(" ", "-")
        base = other_model(model, place / "model", seed=seed)
        await attempt(fault, place.name, Trainer(base, place).next())
    await attempt("name taken", live, version)
    outcomes[-1] = outcomes[-1]._replace(changes=changed(model, parent.folder, version.probe))
    outcomes.append(await killed(publisher, server, version))
    return outcomes


async def intact(publisher: LoraHotSwap, live: str, version: Version) -> bool:
    """Whether `live` answers as `version` was trained."""
    try:
        await compare(publisher.server, live, version.probe)
    except PublishError:
        return False
    return True


async def killed(publisher: LoraHotSwap, server: VLLMServer, version: Version) -> Outcome:
    """The server ends between the load and the check."""
    load = publisher.server.load

    async def last(name: str, folder: Path) -> None:
        await load(name, folder)
        await asyncio.to_thread(server.stop)

    publisher.server.load = last  # type: ignore[method-assign]
    try:
        await publisher.publish("killed", *version)
    except PublishError as error:
        return Outcome("server killed midway", None, str(error), True)
    return Outcome("server killed midway", None, None, True)


def show(outcomes: Sequence[Outcome]) -> None:
    for each in outcomes:
        changes = "no answer" if each.changes is None else f"{each.changes:.2g} nats"
        verdict = "ACCEPTED" if each.refusal is None else "refused"
        print(
            f"{each.fault:26} {changes:12} {verdict:9} {'' if each.is_intact else 'NOT INTACT '}{each.refusal or ''}"[
                :180
            ]
        )


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, type=Path, help="folder of the base model")
    parser.add_argument("--python", required=True, help="interpreter of the environment that has vLLM")
    parser.add_argument("--publishes", type=int, default=30)
    options = parser.parse_args(arguments)
    with TemporaryDirectory() as name:
        folder = Path(name)
        with socket.create_server(("127.0.0.1", 0)) as probe:
            port = probe.getsockname()[1]
        more = ["--max-model-len", "1024", "--max-num-seqs", "32"]
        command, variables = vllm_command(
            find_vllm(options.python), options.model, NAME, host="127.0.0.1", port=port, more=more
        )
        server = VLLMServer(command, f"http://127.0.0.1:{port}", log=folder / "log", variables=variables)
        server.start()
        try:
            server.wait(START_S)
            publisher = LoraHotSwap(f"{server.url}/v1", NAME)
            trainer = Trainer(options.model, folder / "versions")
            seconds, worst, last = asyncio.run(timed(publisher, trainer, options.publishes))
            load = os.getloadavg()[0]
            live = f"policy-v{options.publishes}"
            outcomes = asyncio.run(injected(publisher, server, trainer, last, options.model, folder, live))
        finally:
            server.stop()
    show(outcomes)
    tolerance = last.probe.tolerance
    figures = {
        "publishes": len(seconds),
        "p50_ms": round(1000 * median(seconds), 1),
        "p95_ms": round(1000 * float(np.quantile(seconds, 0.95)), 1),
        "first_ms": round(1000 * seconds[0], 1),
        "worst_difference": worst,
        "tolerance": tolerance,
        "faults": len(outcomes),
        "refused": sum(each.refusal is not None for each in outcomes),
        "harmless": sum(each.changes is not None and each.changes <= tolerance for each in outcomes),
        "intact": sum(each.is_intact for each in outcomes),
        "load": round(load, 1),
    }
    print(json.dumps(figures))
    is_safe = figures["refused"] == figures["intact"] == len(outcomes) and not figures["harmless"]
    return int(not (is_safe and figures["p50_ms"] <= MAX_MS))


if __name__ == "__main__":
    sys.exit(main())
