"""A version whose weights a vLLM server has: its adapter is loaded there on demand, and its answers are checked.

The folder of such a version has `probe.json`: torch's word on some tokens. No version answers for another because a
server kept an old file, was started with other weights, or has another project's adapter under the same name.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from agentloop.config.sections import PolicySection
from agentloop.errors import ConfigError, PublishError
from agentloop.gateway.routes import version_model
from agentloop.publish.check import compare
from agentloop.publish.lora import LoraHotSwap
from agentloop.publish.probe import Probe, read_probe
from agentloop.publish.server import VLLMControl
from agentloop.registry.artifacts import ADAPTER
from agentloop.types import PolicyVersion, VersionKind

OF_WEIGHTS = (VersionKind.weights, VersionKind.adapter)
"""Kinds of versions that have tensors of ours."""
VLLM = "vllm"


def loaded(version: PolicyVersion, folder: Path, policy: PolicySection) -> PolicySection:
    """`policy` with the name under which its server answers as `version`, which is in `folder`.

    An adapter that the server does not list is loaded. Raises ConfigError where the server does not answer as the
    version was trained.
    """
    if policy.kind != VLLM or policy.base_url is None:
        raise ConfigError(
            f"v{version.number} is of kind {version.kind}, which a vLLM server answers for, and its [policy] kind is "
            f"{policy.kind!r}; name that server: [policy] kind = {VLLM!r}, base_url and model"
        )
    try:
        probe = read_probe(folder)
        if version.kind is VersionKind.adapter:
            _check_base(version, folder, probe)
            name = _wait_for(_adapter(version, folder, policy, probe))
        else:
            name = _wait_for(_weights(version, policy, probe))
    except PublishError as error:
        raise ConfigError(f"v{version.number} cannot act: {error}") from None
    return policy.model_copy(update={"model": name})


async def _adapter(version: PolicyVersion, folder: Path, policy: PolicySection, probe: Probe) -> str:
    name = version_model(version.number)
    publisher = LoraHotSwap(policy.base_url or "", policy.model or "", api_key=policy.api_key)
    if not await publisher.serves(name):
        try:
            await publisher.publish(name, folder / ADAPTER, probe)
        except PublishError:
            if not await publisher.serves(name):  # else another process has loaded it in the meantime
                raise
        else:
            return name
    try:
        await compare(publisher.server, name, probe)
    except PublishError as error:
        raise PublishError(f"{error}; unload it there, and ask again") from None
    return name


async def _weights(version: PolicyVersion, policy: PolicySection, probe: Probe) -> str:
    server = VLLMControl(policy.base_url or "", policy.api_key)
    models = await server.models()
    name = version_model(version.number)
    remedy = f"`agentloop policies serve v{version.number}` serves it"
    if name not in models:  # it may be the base model by now: a server can load other weights under its name
        if policy.model not in models:
            raise PublishError(f"{server.base_url} serves {', '.join(models)}, and not {name}; {remedy}")
        name = policy.model or ""
    try:
        await compare(server, name, probe)
    except PublishError as error:
        raise PublishError(f"{error}; {remedy}") from None
    return name


def _check_base(version: PolicyVersion, folder: Path, probe: Probe) -> None:
    """Raises PublishError where the registry and the folder name two base models."""
    if version.lineage is not None and version.lineage.base != probe.base_hash:
        raise PublishError(f"{folder} has the probe of an adapter on another base model; bring back what was there")


def _wait_for(answer: Coroutine[object, object, str]) -> str:
    """In a thread of its own, because the caller's may run an event loop."""
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(asyncio.run, answer).result()
