"""The console in a real Chromium: Debian's, driven by playwright.

If either is missing, tests are skipped, unless RELAYD_REQUIRE_CHROMIUM forbids it.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import shutil
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal
from urllib.parse import urlsplit

from tests.support.relay_process import ROOT

if TYPE_CHECKING:
    from playwright.async_api import Browser, BrowserContext, Page

__all__ = ["SCHEMES", "Watch", "axe_missing", "browser", "missing", "violations", "watched"]

REQUIRED = "RELAYD_REQUIRE_CHROMIUM"
SCHEMES: tuple[Literal["light", "dark"], ...] = ("light", "dark")
_AXE = ROOT / "web/node_modules/axe-core/axe.min.js"
_NAMES = ("chromium", "chromium-browser", "google-chrome-stable", "google-chrome")
_EXPECTED = (
    "Failed to load resource",  # an answer such as 404
    "WebSocket connection",  # to a relay that is away
    "Cross-Origin-Opener-Policy header has been ignored",  # always the case over plain http
)
_REPORTS = """
addEventListener("securitypolicyviolation", ({ violatedDirective, blockedURI }) =>
    console.error(`CSP: ${violatedDirective} ${blockedURI}`));
"""


def executable() -> str | None:
    """The browser to use: the one named by CHROMIUM, or one of the system."""
    return os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, _NAMES)), None)


def missing() -> str | None:
    """Why there is no browser to test with; None if there is one, or if its absence is a failure."""
    if os.environ.get(REQUIRED):
        return None
    if importlib.util.find_spec("playwright") is None:
        return "the package playwright is not installed"
    return None if executable() else "there is no Chromium: install it, or name it in CHROMIUM"


def axe_missing() -> str | None:
    """Why accessibility cannot be checked; None if it can, or if that is a failure."""
    if _AXE.exists() or os.environ.get(REQUIRED):
        return None
    return "axe-core is missing: `npm ci` in web/"


async def violations(page: Page) -> list[str]:
    """The violations that axe-core finds on the page in its present state; it is loaded into a page once."""
    if not await page.evaluate("globalThis.axe !== undefined"):
        await page.evaluate(_AXE.read_text())
    # During a transition, a colour has neither the old contrast nor the new.
    await page.evaluate("Promise.allSettled(document.getAnimations().map(({ finished }) => finished))")
    found: list[str] = await page.evaluate(
        "axe.run().then((found) => found.violations.map("
        "({id, nodes}) => `${id}: ${nodes.map((node) => node.html).slice(0, 3).join(' ')}`))"
    )
    return found


@contextlib.asynccontextmanager
async def browser(*arguments: str) -> AsyncIterator[Browser]:
    """A headless Chromium, with these command line options."""
    from playwright.async_api import async_playwright

    async with async_playwright() as playwright:
        opened = await playwright.chromium.launch(
            executable_path=executable(), args=["--no-sandbox", "--disable-dev-shm-usage", *arguments]
        )
        try:
            yield opened
        finally:
            await opened.close()


@dataclass
class Watch:
    """Things that a page did and a page of ours must not do."""

    host: str
    foreign: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)

    def requested(self, url: str) -> None:
        parts = urlsplit(url)
        if parts.netloc != self.host and parts.scheme not in ("blob", "data"):
            self.foreign.append(url)

    def said(self, kind: str, text: str) -> None:
        if kind == "error" and not any(words in text for words in _EXPECTED):
            self.errors.append(text)


@contextlib.asynccontextmanager
async def watched(browser: Browser, url: str, **options: Any) -> AsyncIterator[tuple[Page, Watch]]:
    """A page with a fresh profile. Requests to other hosts, script errors and violations of the policy are
    recorded for the caller to check."""
    watch = Watch(urlsplit(url).netloc)
    size = {"viewport": {"width": 1280, "height": 800}}
    context: BrowserContext = await browser.new_context(**{**size, **options})
    try:
        await context.add_init_script(_REPORTS)
        page = await context.new_page()
        page.on("request", lambda request: watch.requested(request.url))
        page.on("websocket", lambda socket: watch.requested(socket.url))
        page.on("console", lambda message: watch.said(message.type, message.text))
        page.on("pageerror", lambda error: watch.errors.append(str(error)))
        yield page, watch
    finally:
        await context.close()
