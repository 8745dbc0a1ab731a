"""Does a server answer as torch said that it would?"""

from __future__ import annotations

import logging

from agentloop.errors import PublishError
from agentloop.publish.probe import MIN_APART, Probe, furthest
from agentloop.publish.server import VLLMControl

_log = logging.getLogger("agentloop")


async def compare(server: VLLMControl, name: str, probe: Probe) -> float:
    """Largest difference in nats over the probe's tokens between the server's model `name` and torch.

    Raises PublishError where precision does not explain it. Equal answers of a version that its parent is too like are
    no proof, which a warning says.
    """
    served = probe.at(await server.logprobs(name, probe.sequences))
    worst = furthest(served, probe.logprobs)
    if worst <= probe.tolerance:
        if not probe.is_proof:
            _log.warning(
                "%s: nobody can tell whether %s answers as it was trained or as the version before: they differ by "
                "%.1e nats, and %.0e would tell; train for longer, or with a larger learning_rate",
                server.base_url,
                name,
                probe.apart,
                MIN_APART * probe.tolerance,
            )
        return worst
    is_parent = furthest(served, probe.parent) <= probe.tolerance
    finding = "it answers as the version before" if is_parent else f"log-probabilities differ by {worst:.2g}"
    raise PublishError(
        f"{server.base_url}: {name} does not answer as it was trained: {finding} (tolerance {probe.tolerance:.0e}, "
        f"{len(probe.positions)} tokens)"
    )
