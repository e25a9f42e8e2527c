"""A real Firefox, driven over WebDriver BiDi: a WebSocket that Firefox itself opens, without a driver."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import re
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Final

from websockets.asyncio.client import ClientConnection

from tests.support.sockets import connect

__all__ = ["Firefox", "firefox", "firefox_missing"]

REQUIRED: Final = "RELAYD_FIREFOX"
"""If set, the tests with Firefox run; the value is the browser to use, or 1 for that of the system."""
_NAMES: Final = ("firefox-esr", "firefox")
_LISTENS: Final = re.compile(rb"WebDriver BiDi listening on (ws://\S+)")


def _executable() -> str | None:
    named = os.environ.get(REQUIRED, "")
    return named if "/" in named else next(filter(None, map(shutil.which, _NAMES)), None)


def firefox_missing() -> str | None:
    """Why there is no Firefox to test with; None if the tests are wanted."""
    if not os.environ.get(REQUIRED):
        return f"set {REQUIRED}=1 to test with Firefox"
    return None


class Firefox:
    """One tab. Every command has a minute to finish."""

    def __init__(self, socket: ClientConnection) -> None:
        self._socket = socket
        self._numbers = itertools.count(1)
        self._tab = ""
        self.said: list[str] = []
        """Errors of the page: from scripts, and violations of its policy."""

    async def begin(self) -> None:
        """Open the session and find the tab."""
        await self.command("session.new", capabilities={})
        await self.command("session.subscribe", events=["log.entryAdded"])
        tree = await self.command("browsingContext.getTree")
        self._tab = tree["contexts"][0]["context"]

    async def go(self, url: str) -> None:
        """Open this page; return when it is loaded."""
        await self.command("browsingContext.navigate", context=self._tab, url=url, wait="complete")

    async def evaluate(self, expression: str) -> Any:
        """The value of an expression in the page, awaited if it is a promise, passed as JSON."""
        answer = await self.command(
            "script.evaluate",
            expression=f"(async () => JSON.stringify(await ({expression})))()",
            target={"context": self._tab},
            awaitPromise=True,
        )
        assert answer["type"] == "success", answer
        return json.loads(answer["result"].get("value", "null"))

    async def until(self, condition: str) -> None:
        """Wait until an expression is true."""
        deadline = asyncio.get_running_loop().time() + 60
        while not await self.evaluate(condition):
            assert asyncio.get_running_loop().time() < deadline, (
                f"not in a minute: {condition}; {self.said}; {await self.evaluate('document.body.innerText')}"
            )

    async def command(self, method: str, **params: object) -> dict[str, Any]:
        """Send a command, and wait for its result."""
        number = next(self._numbers)
        await self._socket.send(json.dumps({"id": number, "method": method, "params": params}))
        async with asyncio.timeout(60):
            while True:
                message: dict[str, Any] = json.loads(await self._socket.recv())
                if message.get("method") == "log.entryAdded" and message["params"]["level"] == "error":
                    self.said.append(str(message["params"]["text"]))
                if message.get("id") == number:
                    assert message["type"] == "success", message
                    result: dict[str, Any] = message["result"]
                    return result


@contextlib.asynccontextmanager
async def firefox(profile: Path) -> AsyncIterator[Firefox]:
    """A headless Firefox with this empty folder as its profile."""
    executable = _executable()
    assert executable is not None, f"{REQUIRED} is set, and there is no Firefox"
    process = await asyncio.create_subprocess_exec(
        executable,
        "--headless",
        "--no-remote",
        "--remote-debugging-port=0",
        "--profile",
        str(profile),
        stderr=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.DEVNULL,
        env=os.environ | {"HOME": str(profile)},
    )
    assert process.stderr is not None
    try:
        async with asyncio.timeout(120):
            while (found := _LISTENS.search(await process.stderr.readline())) is None:
                pass
        drained = asyncio.create_task(process.stderr.read())
        try:
            async with connect(f"{found[1].decode()}/session", max_size=None) as socket:
                driven = Firefox(socket)
                await driven.begin()
                yield driven
        finally:
            drained.cancel()
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()
