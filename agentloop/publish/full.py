"""All weights of a running vLLM server are replaced: it is paused, reads the new folder, forgets its cache, goes on.

A server answers 200 to a reload and may serve part of the old weights: with tied embeddings on a CPU it keeps the old
head. So its answers are compared with torch's after every reload, and the weights before come back where they differ.
Such a server needs VLLM_SERVER_DEV_MODE=1, whose routes run whatever they are asked: it must listen on loopback only.
"""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress
from pathlib import Path
from urllib.parse import urlsplit

from pydantic import SecretStr

from agentloop.errors import PublishError
from agentloop.policies.engine import LOOPBACK
from agentloop.publish.check import compare
from agentloop.publish.probe import Probe, furthest
from agentloop.publish.publisher import Published
from agentloop.publish.server import VLLMControl

RELOAD_S = 600.0
"""Wall time of a reload, and of the answers under way that it waits for."""


class FullReload:
    """See `publisher.Publisher`: the whole model of one server, which keeps its name.

    Answers under way end with the weights that they began with, and new ones wait. Those between the reload and the end
    of its check, some milliseconds, are answered by what the check may refuse.
    """

    name = "full"

    def __init__(self, base_url: str, model: str, folder: Path, *, api_key: SecretStr | None = None) -> None:
        """model: what the server calls it. folder: of the weights that it has now. Raises PublishError off loopback."""
        host = urlsplit(base_url).hostname
        if host not in LOOPBACK:
            raise PublishError(
                f"{base_url}: weights are reloaded through routes that run whatever they are asked; let the server "
                f"listen on {LOOPBACK[0]}, or serve the new weights with a restart"
            )
        self.server = VLLMControl(base_url, api_key, timeout_s=RELOAD_S)
        self.model = model
        self.folder = folder
        """Of the weights that the server has."""

    async def publish(self, name: str, folder: Path, probe: Probe) -> Published:
        """See `publisher.Publisher`. folder: of whole weights. name: of the version, for messages alone."""
        started = time.perf_counter()
        await self._check_free()
        before = probe.at(await self.server.logprobs(self.model, probe.sequences))
        try:
            await self._reload(folder)
            worst = await compare(self.server, self.model, probe)
        except BaseException as error:
            problem = await self._restored(probe, before)
            if isinstance(error, PublishError):
                raise PublishError(f"{name} is refused: {error}; {problem}") from None
            raise
        self.folder = folder
        return Published(self.model, time.perf_counter() - started, worst, probe.apart, probe.is_proof)

    async def retract(self, name: str) -> None:
        """See `publisher.Publisher`. Nothing is to be freed: the next version takes the place of this one."""

    async def _check_free(self) -> None:
        """Raises PublishError where the server has another model, or adapters, which stand on its present weights."""
        models = await self.server.models()
        if self.model not in models:
            raise PublishError(f"{self.server.base_url} serves no model {self.model!r} (models: {', '.join(models)})")
        adapters = [name for name, parent in models.items() if parent is not None]
        if adapters:
            raise PublishError(
                f"{self.server.base_url}: {', '.join(sorted(adapters))} stand on the present weights; unload them first"
            )

    async def _reload(self, folder: Path) -> None:
        """Raises PublishError where the server has no such routes or cannot read the folder; it goes on either way."""
        try:
            await self.server.post("pause?mode=wait")
        except PublishError as error:
            if "HTTP 404" in str(error):
                raise PublishError(
                    f"{self.server.base_url} cannot reload weights; start it with `agentloop policies serve` on "
                    "loopback, or with VLLM_SERVER_DEV_MODE=1 there"
                ) from None
            raise
        try:
            place = await asyncio.to_thread(folder.resolve)
            settings = {"method": "reload_weights", "kwargs": {"weights_path": str(place)}}
            await self.server.post("collective_rpc", settings)
            await self.server.post("reset_prefix_cache")
        finally:
            await self.server.post("resume")

    async def _restored(self, probe: Probe, before: list[float]) -> str:
        """Bring the weights before back; in words, how that went."""
        with suppress(PublishError):
            await self._reload(self.folder)
            now = probe.at(await self.server.logprobs(self.model, probe.sequences))
            if furthest(now, before) <= probe.tolerance:
                return "the server has the weights before again"
        return f"the weights before did not come back: start the server again on {self.folder}"
