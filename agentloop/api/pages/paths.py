"""The paths that are pages, and those of them that anybody may open."""

from __future__ import annotations

ASSETS = "/assets/"
"""Style sheet and scripts, the same for everybody."""
SIGN_IN = "/signin"
SIGN_OUT = "/signout"
REVIEW = "/review"
DOCS = "/docs"
SHARE = "/share"
SHARED = "/shared/"
"""What a read-only link begins with."""
ENTER = "/enter"
"""Where a one-time token becomes a session."""
OPEN_PAGES = frozenset({SIGN_IN, ENTER, DOCS})
"""Pages that show no data."""
_OTHERS = ("/v1/", "/api/", "/e/")
_OTHER = frozenset({"/v1", "/api", "/e", "/healthz", "/readyz", "/metrics", "/openapi.json"})


def is_page(path: str) -> bool:
    """Whether a path belongs to the pages, known or not; all others belong to programs."""
    return path not in _OTHER and not path.startswith(_OTHERS)


def is_open_page(path: str) -> bool:
    """Whether anybody may open a page."""
    return path in OPEN_PAGES or path.startswith((ASSETS, SHARED))
