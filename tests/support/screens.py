"""Pictures of every page of the console and of the chat page: `python -m tests.support.screens`.

With real traffic, and without any, and when the relay is away. They go to build/screens: light and dark, wide
and narrow. Look at them before you call a change done.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlencode

import strata
from strata.protocol import packets
from strata.protocol.documents import method_id
from strata.protocol.ids import Identity
from strata.protocol.keys import rotate_content
from strata.protocol.packets import Packet

from tests.support.bare_client import BareClient, open_client
from tests.support.browsers import SCHEMES, browser, watched
from tests.support.chat_site import chat_site
from tests.support.made_packets import make, new_identity
from tests.support.relay_process import ROOT, RelayProcess

if TYPE_CHECKING:
    from playwright.async_api import Browser, Page, ViewportSize

__all__ = ["publish_samples"]

_TEXTS = (
    "The tide table for Tuesday is up: low water 06:12, high water 12:31.",
    "Has anybody measured how long a resume takes over a satellite link?",
    "Minutes of the harbour meeting, with the two corrections from Ann.",
    "Build 418 is green. The flaky one was a clock, as ever.",
    "Lost: one grey bicycle, basket in front, last seen near the lock.",
    "Rehearsal moves to 19:30, the hall is taken before that.",
    "Water temperature 11.4 °C, wind north-west 4, visibility good.",
    "I have put the scans of the 1931 log book where they can be read.",
)
_SIZES: dict[str, ViewportSize] = {
    "wide": {"width": 1280, "height": 800},
    "narrow": {"width": 390, "height": 844},
}


_DOCUMENTED: dict[str, ViewportSize] = {
    "live": {"width": 1100, "height": 620},
    "packet": {"width": 1100, "height": 620},
    "operator": {"width": 1100, "height": 1080},
}
Act = Callable[["Page"], Awaitable[None]]


def publish_samples(count: int, authors: Sequence[Identity]) -> list[Packet]:
    """Publish packets that look like an ordinary day."""
    made = []
    for number in range(count):
        author, text = authors[number % len(authors)], _TEXTS[number % len(_TEXTS)]
        if number % 7 == 3:
            made.append(
                make(
                    author,
                    type="SENSOR_READING",
                    text="",
                    celsius=round(11.4 + number % 9 / 10, 1),
                    station="north pier",
                )
            )
        elif number % 11 == 5:
            made.append(
                make(author, type="/harbour/1/chat/proto", text="", payload="aGVsbG8=" * (number % 20 + 1))
            )
        else:
            made.append(make(author, text))
    return made


async def _trickle(client: BareClient, authors: Sequence[Identity]) -> None:
    while True:
        await client.publish_all(publish_samples(12, authors))
        await asyncio.sleep(0.5)


async def _nothing(page: Page) -> None:
    """Do nothing on the page."""


async def _draft(page: Page) -> None:
    if not await page.locator(".card .did").count():
        await page.get_by_role("button", name="Make a new identity").click()
    await page.get_by_label("Text", exact=True).fill(_TEXTS[2])
    await page.get_by_role("button", name="Show what will be sent").click()
    await page.get_by_role("button", name="Publish", exact=True).click()
    await page.get_by_label("Text", exact=True).fill(_TEXTS[5])
    await page.get_by_role("button", name="Show what will be sent").click()


async def _pause(page: Page) -> None:
    await page.get_by_label("Filter").fill("")
    await page.get_by_role("button", name="Pause").click()
    await page.wait_for_timeout(1500)


async def _filter(page: Page) -> None:
    await page.get_by_label("Filter").fill("no such words")


def _operate(operator: Identity) -> Act:
    async def act(page: Page) -> None:
        if not await page.get_by_label("Log of rulings").count():
            await page.get_by_role("button", name="Use a key file…").click()
            key = json.dumps({"did": operator.did, "seed": f"0x{operator.seed.hex()}"})
            file: Any = {"name": "key.json", "mimeType": "application/json", "buffer": key.encode()}
            await page.locator("input[type=file]").set_input_files(file)
            await page.locator(".card .did", has_text=operator.did).wait_for()
            await page.get_by_role("button", name="Authenticate").click()
        await page.get_by_label("Log of rulings").wait_for()
        await page.get_by_text("open in all").wait_for()

    return act


def _close(operator: Identity) -> Act:
    async def act(page: Page) -> None:
        await _operate(operator)(page)
        await page.get_by_role("button", name="Close the session").first.click()

    return act


@dataclass(frozen=True)
class _Stop:
    """A page, and the actions on it before its picture is taken."""

    title: str
    place: str
    act: Act = _nothing
    is_whole: bool = True
    """Whether the picture is as long as the page; a list that fills the window is not."""


def _stops(operator: Identity, packet: Packet, rotated: Identity) -> list[_Stop]:
    return [
        _Stop("live", "", is_whole=False),
        _Stop("live-none-match", "", _filter, is_whole=False),
        _Stop("live-paused", "", _pause, is_whole=False),
        _Stop("search", "search?q=SENSOR_READING", is_whole=False),
        _Stop("search-not-understood", "search?q=0x12+yesterday"),
        _Stop("search-nothing", "search?q=NO_SUCH_TYPE"),
        _Stop("packet", f"packet/{packet.packet_id}"),
        _Stop("packet-unknown", "packet/0x" + "00" * 32),
        _Stop("identity", f"identity/{rotated.did}"),
        _Stop("identity-unknown", f"identity/{new_identity().did}"),
        _Stop("overview", "overview"),
        _Stop("topics", "topics"),
        _Stop("publish-first", "publish"),
        _Stop("operator-first", "operator"),
        _Stop("publish", "publish", _draft),
        _Stop("operator", "operator", _operate(operator)),
        _Stop("operator-closing", "operator", _close(operator)),
        _Stop("nowhere", "nowhere"),
    ]


async def _rule(relay: RelayProcess, operator: Identity, samples: Sequence[Packet]) -> None:
    """Rulings for the operator's page."""
    async with open_client(relay.ws) as client:
        await client.authenticate(operator)
        rulings = [
            ("author", new_identity().did, "the same advertisement, 400 times"),
            ("packet", samples[9].packet_id, "report 118: somebody's address"),
            ("network", "203.0.113.0/24", "a flood on Saturday night"),
        ]
        for kind, subject, reason in rulings:
            ban = {"action": "ban", "kind": kind, "subject": subject, "reason": reason}
            await client.ask({"type": "MODERATE", **ban})


@contextlib.asynccontextmanager
async def _guests(relay: RelayProcess, authors: Sequence[Identity]) -> AsyncIterator[None]:
    """Sessions for the operator's page to show."""
    async with contextlib.AsyncExitStack() as stack:
        for number, address in enumerate(("198.51.100.7", "203.0.113.61", "2001:db8::5:1", "192.0.2.140")):
            way = open_client(relay.ws, additional_headers={"X-Forwarded-For": address})
            guest = await stack.enter_async_context(way)
            if number != 2:
                await guest.authenticate(authors[number])
                await guest.publish_all(publish_samples(number, authors[number : number + 1]))
            for each in range(number):
                await guest.subscribe(f"s{each}", {"limit": 3})
        yield


async def _rotate(client: BareClient) -> Identity:
    """An identity that has replaced its key."""
    who, new = new_identity(), new_identity()
    now = int(time.time())
    await client.publish_all([make(who, _TEXTS[0], age=50)])
    content = rotate_content(
        method_id(who.did, "keys-2"), new.public_key, valid_from=now - 20, replaces=method_id(who.did)
    )
    await client.publish(packets.build(who, content, timestamp=now))
    renewed = Identity(new.seed, who.did)
    await client.publish_all([make(renewed, text) for text in _TEXTS[3:6]])
    return who


class _Camera:
    """Takes pictures in every size and colour scheme."""

    def __init__(self, chromium: Browser, folder: Path, only: str | None) -> None:
        self._chromium = chromium
        self._folder = folder
        self._only = only

    def wants(self, title: str) -> bool:
        return self._only is None or title.startswith(self._only)

    async def document(self, url: str, stops: Sequence[_Stop]) -> None:
        """The pictures of the documentation."""
        for stop in stops:
            size = _DOCUMENTED.get(stop.title)
            if size is not None:
                async with watched(self._chromium, url, viewport=size) as (page, _):
                    await page.goto(f"{url}/#/{stop.place}")
                    await stop.act(page)
                    await page.wait_for_timeout(2000)
                    await page.screenshot(path=ROOT / f"docs/images/console-{stop.title}.png")

    async def tour(self, url: str, stops: Sequence[_Stop], **options: Any) -> None:
        """Each stop in each size and scheme; a profile's identities persist from stop to stop."""
        for scheme in SCHEMES:
            for name, size in _SIZES.items():
                async with watched(self._chromium, url, viewport=size, color_scheme=scheme, **options) as (
                    page,
                    watch,
                ):
                    for stop in stops:
                        if self.wants(stop.title):
                            await page.goto(f"{url}/#/{stop.place}")
                            await stop.act(page)
                            await page.wait_for_timeout(9000 if stop.title == "overview" else 1200)
                            await self.shoot(page, f"{stop.title}-{scheme}-{name}", whole=stop.is_whole)
                    for problem in (*watch.errors, *watch.foreign):
                        print(f"{scheme} {name}: {problem}")

    async def shoot(self, page: Page, title: str, *, whole: bool = False) -> None:
        size = page.viewport_size
        assert size is not None
        if whole:
            rest: int = await page.evaluate(
                "(({ scrollHeight, clientHeight }) => scrollHeight - clientHeight)"
                "(document.querySelector('main'))"
            )
            await page.set_viewport_size({"width": size["width"], "height": size["height"] + rest})
            await page.wait_for_timeout(200)
        await page.screenshot(path=self._folder / f"{title}.png")
        await page.set_viewport_size(size)

    async def away(self, relay: RelayProcess) -> None:
        """The page when the relay has been killed, in every size and scheme; the relay stays away."""
        async with contextlib.AsyncExitStack() as stack:
            pages = []
            for scheme in SCHEMES:
                for name, size in _SIZES.items():
                    way = watched(self._chromium, relay.http, viewport=size, color_scheme=scheme)
                    page, _ = await stack.enter_async_context(way)
                    await page.goto(relay.http)
                    await page.get_by_text("Connected").first.wait_for()
                    pages.append((f"offline-{scheme}-{name}", page))
            relay.kill()
            for title, page in pages:
                await page.get_by_text("Offline").first.wait_for()
                await self.shoot(page, title)

    async def chat(self, relay: RelayProcess) -> None:
        """The page of the example, and a program that chats with it."""
        me = new_identity()
        with chat_site() as site:
            where = urlencode({"relay": relay.ws, "room": "harbour"})
            async with (
                strata.connect(relay.ws, identity=me) as connection,
                connection.channel("harbour", topic="/chat/1/harbour/proto") as room,
            ):
                for scheme in SCHEMES:
                    for name, size in _SIZES.items():
                        way = watched(self._chromium, site, viewport=size, color_scheme=scheme)
                        async with way as (page, watch):
                            await page.goto(site)
                            await page.wait_for_timeout(500)
                            await self.shoot(page, f"chat-join-{scheme}-{name}")
                            await page.goto(f"{site}/?{where}")
                            await page.locator("#link.good").wait_for()
                            for text in _TEXTS[:4]:
                                await room.send(text.encode())
                                await page.locator("#text").fill(f"{text.split(',')[0]}? Noted.")
                                await page.keyboard.press("Enter")
                            await page.wait_for_timeout(3000)
                            await self.shoot(page, f"chat-{scheme}-{name}")
                            for problem in watch.errors:
                                print(f"chat {scheme} {name}: {problem}")


async def _take(
    relay: RelayProcess, operator: Identity, folder: Path, only: str | None, *, documents: bool
) -> None:
    authors = [new_identity() for _ in range(7)]
    samples = publish_samples(160, authors)
    async with browser("--host-resolver-rules=MAP relay.test 127.0.0.1") as chromium:
        camera = _Camera(chromium, folder, only)
        empty = [_Stop(f"empty-{place}", place) for place in ("live", "topics", "search")]
        if not documents:
            await camera.tour(relay.http, empty)
        async with open_client(relay.ws) as client, _guests(relay, authors):
            await client.publish_all(samples)
            rotated = await _rotate(client)
            await _rule(relay, operator, samples)
            traffic = asyncio.create_task(_trickle(client, authors))
            try:
                stops = _stops(operator, samples[0], rotated)
                if documents:
                    await camera.document(relay.http, stops)
                    return
                await camera.tour(relay.http, stops)
                insecure = relay.http.replace("127.0.0.1", "relay.test")
                await camera.tour(insecure, [_Stop("insecure", "publish")])
            finally:
                traffic.cancel()
        if camera.wants("chat"):
            await camera.chat(relay)
        if camera.wants("offline"):
            await camera.away(relay)


def main() -> None:
    """Take the pictures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--page", help="only pages whose title begins so")
    parser.add_argument("--docs", action="store_true", help="renew the pictures in docs/images instead")
    parser.add_argument("--folder", type=Path, default=ROOT / "build/screens")
    chosen = parser.parse_args()
    chosen.folder.mkdir(parents=True, exist_ok=True)
    operator = new_identity()
    with tempfile.TemporaryDirectory() as folder:
        proxied: dict[str, Any] = {"trusted_proxies": ["127.0.0.0/8"], "operators": [operator.did]}
        relay = RelayProcess(Path(folder), **proxied).start()
        try:
            asyncio.run(_take(relay, operator, chosen.folder, chosen.page, documents=chosen.docs))
        finally:
            relay.kill()
    print(chosen.folder)


if __name__ == "__main__":
    main()
