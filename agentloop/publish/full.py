"""Replaces all weights of a running vLLM server: pauses it, reloads from the new folder, clears its cache, resumes.

A server answers 200 to a reload even if it keeps part of the old weights: with tied embeddings on a CPU it keeps the
old head. So its answers are compared with torch's after every reload, and the previous weights are restored if they
differ. Such a server needs VLLM_SERVER_DEV_MODE=1, whose routes execute arbitrary requests, so it must listen on
loopback only.
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
from agentloop.protocols import Fingerprint
from agentloop.publish.check import compare
from agentloop.publish.probe import furthest
from agentloop.publish.server import VLLMControl
from agentloop.publish.tensors import refuse_not_finite
from agentloop.types import Published

RELOAD_S = 600.0
"""Timeout of a reload in seconds, including the answers in progress that it waits for."""


class FullReload:
    """See `protocols.Publisher`: replaces the whole model of one server, which keeps its name.

    Answers in progress finish with the weights that they began with, and new ones wait. Answers between the reload and
    the end of its check, some milliseconds, come from weights that the check may reject.
    """

    name = "full"

    def __init__(self, base_url: str, model: str, folder: Path, *, api_key: SecretStr | None = None) -> None:
        """model: its name at the server. folder: of its current weights. Raises PublishError unless the server is on
        loopback."""
        host = urlsplit(base_url).hostname
        if host not in LOOPBACK:
            raise PublishError(
                f"{base_url}: weights are reloaded through routes that run whatever they are asked; let the server "
                f"listen on {LOOPBACK[0]}, or serve the new weights with a restart"
            )
        self.server = VLLMControl(base_url, api_key, timeout_s=RELOAD_S)
        self.model = model
        self.folder = folder
        """Folder of the server's current weights."""

    async def publish(self, name: str, folder: Path, probe: Fingerprint) -> Published:
        """See `protocols.Publisher`. folder: of whole weights. name: of the version, for messages only."""
        started = time.perf_counter()
        # The folder is read before the pause, so a bad one costs the users of the server nothing.
        await asyncio.to_thread(_refuse_not_finite, folder)
        await self._check_free()
        before = probe.at(await self.server.logprobs(self.model, probe.sequences))
        try:
            await self.reload(folder)
            worst = await compare(self.server, self.model, probe)
        # A cancelled publication restores the weights, too: it may end in the middle of a reload.
        except BaseException as error:
            problem = await self._restored(probe, before)
            if isinstance(error, PublishError):
                raise PublishError(f"{name} is refused: {error}; {problem}") from None
            raise
        self.folder = folder
        return Published(self.model, time.perf_counter() - started, worst, probe.apart, probe.is_proof)

    async def retract(self, name: str) -> None:
        """See `protocols.Publisher`. Does nothing: the next version replaces this one."""

    async def _check_free(self) -> None:
        """Raises PublishError if the server has another model, or adapters, which depend on its current weights."""
        models = await self.server.models()
        if self.model not in models:
            raise PublishError(f"{self.server.base_url} serves no model {self.model!r} (models: {', '.join(models)})")
        adapters = [name for name, parent in models.items() if parent is not None]
        if adapters:
            raise PublishError(
                f"{self.server.base_url}: {', '.join(sorted(adapters))} stand on the present weights; unload them first"
            )

    async def reload(self, folder: Path) -> None:
        """Replace the weights without a check. The server always resumes.

        Raises PublishError if the server lacks these routes or cannot read the folder.
        """
        try:
            # With `mode=keep`, an answer in progress would mix tokens of two versions.
            await self.server.post("pause?mode=wait")
        except PublishError as error:
            # vLLM registers these routes only in its development mode.
            if "HTTP 404" in str(error):
                raise PublishError(
                    f"{self.server.base_url} cannot reload weights; start it again on loopback with "
                    "VLLM_SERVER_DEV_MODE=1 in its environment"
                ) from None
            raise
        try:
            place = await asyncio.to_thread(folder.resolve)
            settings = {"method": "reload_weights", "kwargs": {"weights_path": str(place)}}
            await self.server.post("collective_rpc", settings)
            # The cached keys and values come from the old weights, and new prompts would reuse them.
            await self.server.post("reset_prefix_cache")
        finally:
            await self.server.post("resume")

    async def _restored(self, probe: Fingerprint, before: list[float]) -> str:
        """Restores the previous weights. Returns the result in words."""
        # A failure of the restore must not hide why the version is refused, so it only changes the words.
        with suppress(PublishError):
            await self.reload(self.folder)
            now = probe.at(await self.server.logprobs(self.model, probe.sequences))
            if furthest(now, before) <= probe.tolerance:
                return "the server has the weights before again"
        return f"the weights before did not come back: start the server again on {self.folder}"


def _refuse_not_finite(folder: Path) -> None:
    for path in sorted(folder.glob("*.safetensors")):
        refuse_not_finite(path)
