"""A real browser: Debian's Chromium, driven by Playwright."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from parts import lacking
from playwright.sync_api import Browser, BrowserContext, Page, sync_playwright


class Opened(NamedTuple):
    """A tab, with what its browser reported while it was used."""

    page: Page
    console: list[str]
    """Messages of the console, refusals of the content policy among them."""
    requests: list[str]
    """Addresses of everything that was requested."""


@contextmanager
def chromium() -> Iterator[Browser]:
    """A browser without a window; skips where there is none."""
    program = shutil.which("chromium") or shutil.which("chromium-browser")
    if program is None:
        lacking("no chromium here; install Debian's package `chromium`")
    # As root, and in containers, Chromium's own sandbox cannot start.
    options = ["--no-sandbox", "--disable-dev-shm-usage"] if os.geteuid() == 0 else []
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=options)
        try:
            yield browser
        finally:
            browser.close()


@contextmanager
def opened(browser: Browser, address: str, **options: Any) -> Iterator[Opened]:
    """A tab of its own profile at `address`. options: of Playwright's `new_context`."""
    context: BrowserContext = browser.new_context(**options)
    try:
        page = context.new_page()
        tab = Opened(page, [], [])
        page.on("console", lambda message: tab.console.append(message.text))
        page.on("pageerror", lambda error: tab.console.append(str(error)))
        page.on("request", lambda request: tab.requests.append(request.url))
        page.goto(address)
        yield tab
    finally:
        context.close()
