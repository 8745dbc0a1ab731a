"""The security headers of every page, and of the API, which a browser with a session reads, too.

A trace is hostile text: even if it became HTML, no browser would run it.
"""

from __future__ import annotations

from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from agentloop.api.pages.paths import ASSETS, is_page
from agentloop.api.pages.site import PageSite

# No inline styles either: templates draw widths and positions as attributes of SVG.
CONTENT_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
)
API_POLICY = "default-src 'none'; form-action 'none'; base-uri 'none'; frame-ancestors 'none'; sandbox"
"""The API's answers are for programs; one that is opened as a document loads and runs nothing."""
_API = "/api/"
_HEADERS = {
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
}
FOREVER = "public, max-age=31536000, immutable"
"""Cache-Control of assets, whose paths contain the hash of their content."""


class PageHeaders:
    """ASGI middleware that adds the headers, and tells errors the site that draws them. Data is never cached."""

    def __init__(self, app: ASGIApp, site: PageSite) -> None:
        self.app = app
        self._site = site

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI."""
        is_api = scope["type"] == "http" and scope["path"].startswith(_API)
        if scope["type"] != "http" or not (is_api or is_page(scope["path"])):
            await self.app(scope, receive, send)
            return
        if not is_api:
            scope.setdefault("state", {})["site"] = self._site

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                # The page to sign in sets its own (`signing_in.py`).
                policy = headers.get("Referrer-Policy", "no-referrer")
                headers.update(_HEADERS)
                headers["Content-Security-Policy"] = API_POLICY if is_api else CONTENT_POLICY
                headers["Referrer-Policy"] = policy
                is_asset = scope["path"].startswith(ASSETS) and message["status"] == 200
                headers["Cache-Control"] = FOREVER if is_asset else "no-store"
            await send(message)

        await self.app(scope, receive, send_with_headers)
