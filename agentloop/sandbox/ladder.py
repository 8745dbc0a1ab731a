"""Which backend makes the boxes: docker when an engine answers, else bubblewrap, else none.

There is no third step down: commands of an agent are never run unconfined because nothing better
was found.
"""

from __future__ import annotations

from agentloop.errors import SandboxUnavailable
from agentloop.plugins import load_part
from agentloop.protocols import SandboxBackend

LADDER = ("docker", "bubblewrap")


def choose_backend(kind: str) -> SandboxBackend:
    """The backend named `kind`, or for `auto` the first of the ladder that works here.

    Raises SandboxUnavailable with each reason and remedy, PluginError for a name that is not installed.
    """
    reasons = []
    for name in LADDER if kind == "auto" else (kind,):
        backend: SandboxBackend = load_part("sandboxes", name)
        reason = backend.probe()
        if reason is None:
            return backend
        reasons.append(f"{name}: {reason}")
    raise SandboxUnavailable("no sandbox can be made here. " + ". ".join(reasons))
