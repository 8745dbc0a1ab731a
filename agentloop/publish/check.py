"""Does a server answer as torch said that it would?"""

from __future__ import annotations

from agentloop.errors import PublishError
from agentloop.publish.probe import Probe, furthest
from agentloop.publish.server import VLLMControl


async def compare(server: VLLMControl, name: str, probe: Probe) -> float:
    """Largest difference in nats over the probe's tokens between the server's model `name` and torch.

    Raises PublishError where precision does not explain it.
    """
    served = probe.at(await server.logprobs(name, probe.sequences))
    worst = furthest(served, probe.logprobs)
    if worst <= probe.tolerance:
        return worst
    is_parent = furthest(served, probe.parent) <= probe.tolerance
    finding = "it answers as the version before" if is_parent else f"log-probabilities differ by {worst:.2g}"
    raise PublishError(
        f"{server.base_url}: {name} does not answer as it was trained: {finding} (tolerance {probe.tolerance:.0e}, "
        f"{len(probe.positions)} tokens)"
    )
