"""The console on its own relay, and what a person does and sees there."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from strata.protocol.packets import Packet

from tests.support.browsers import Watch, watched
from tests.support.made_packets import new_identity
from tests.support.ports import free_port
from tests.support.relay_process import RelayProcess

if TYPE_CHECKING:
    from playwright.async_api import Browser, Page

__all__ = ["OPERATOR", "House", "console", "key_file", "of", "rows", "says", "shows", "take_key"]

OPERATOR = new_identity()


class House:
    """The relay, its settings file, and the changes that tests make to both."""

    def __init__(self, folder: Path) -> None:
        self.file = folder / "relayd.toml"
        self.write()
        self.relay = RelayProcess(folder / "relay", arguments=("--config", str(self.file)), port=free_port())

    def write(self, **settings: object) -> None:
        values = {"operators": [OPERATOR.did], **settings}
        self.file.write_text("".join(f"{name} = {json.dumps(value)}\n" for name, value in values.items()))

    @contextlib.contextmanager
    def set(self, **settings: object) -> Iterator[None]:
        """Apply other settings for the duration of the block."""
        self._reload(**settings)
        try:
            yield
        finally:
            self._reload()

    def _reload(self, **settings: object) -> None:
        before = self.relay.logged("reloaded")
        self.write(**settings)
        os.kill(self.relay.pid, signal.SIGHUP)
        deadline = 4000
        while self.relay.logged("reloaded") == before and deadline:
            deadline -= 1
            signal.sigtimedwait([], 0.005)
        assert deadline, self.relay.last_words()


@contextlib.asynccontextmanager
async def console(
    house: House, chromium: Browser, place: str = "", *, url: str | None = None, **options: Any
) -> AsyncIterator[tuple[Page, Watch]]:
    """The console at this place; a page that violates the policy or contacts another host fails the test."""
    address = url or house.relay.http
    async with watched(chromium, address, **options) as (page, watch):
        page.set_default_timeout(20_000)
        await page.goto(f"{address}/#/{place}")
        yield page, watch
        assert not watch.errors
        assert not watch.foreign


def of(packets: Sequence[Packet]) -> list[str]:
    return [packet.packet_id for packet in packets]


async def rows(page: Page) -> list[str]:
    """The ids of the rows in view, newest first."""
    found: list[str] = await page.evaluate(
        "[...document.querySelectorAll('.list .row')].map((row) => row.dataset.row)"
    )
    return found


async def shows(page: Page, ids: list[str]) -> None:
    """Wait until the newest rows are these."""
    await page.wait_for_function(
        "(ids) => [...document.querySelectorAll('.list .row')].slice(0, ids.length)"
        ".map((row) => row.dataset.row).join() === ids.join()",
        arg=ids,
    )


async def says(page: Page, text: str | re.Pattern[str]) -> None:
    await page.get_by_text(text).first.wait_for()


async def take_key(page: Page, members: dict[str, str]) -> None:
    """Import a key file, as a person would."""
    await page.get_by_role("button", name="Use a key file…").click()
    content = {"name": "key.json", "mimeType": "application/json", "buffer": json.dumps(members).encode()}
    await page.locator("input[type=file]").set_input_files(content)  # type: ignore[arg-type]
    await page.locator(".card .did", has_text=members["did"]).wait_for()


def key_file(identity: Any) -> dict[str, str]:
    return {"did": identity.did, "seed": f"0x{identity.seed.hex()}"}
