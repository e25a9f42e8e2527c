"""Pictures of every page of the console, with real traffic: `python -m tests.support.screens`.

They go to build/screens: light and dark, wide and narrow. Look at them before you call a change done.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from strata.protocol import packets
from strata.protocol.documents import method_id
from strata.protocol.ids import Identity
from strata.protocol.keys import rotate_content
from strata.protocol.packets import Packet

from tests.support.bare_client import BareClient, open_client
from tests.support.browsers import browser, watched
from tests.support.made_packets import make, new_identity
from tests.support.relay_process import ROOT, RelayProcess

if TYPE_CHECKING:
    from playwright.async_api import Page

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
_SIZES = {"wide": {"width": 1280, "height": 800}, "narrow": {"width": 390, "height": 844}}


def publish_samples(count: int, authors: Sequence[Identity]) -> list[Packet]:
    """Packets that look like somebody's day."""
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


class _Tour:
    """What is done on a page before its picture is taken."""

    def __init__(self, operator: Identity, packet: Packet, rotated: Identity) -> None:
        self.operator = operator
        self.places = {
            "live": "",
            "search": "search?q=SENSOR_READING",
            "packet": f"packet/{packet.packet_id}",
            "identity": f"identity/{rotated.did}",
            "overview": "overview",
            "topics": "topics",
            "publish": "publish",
            "operator": "operator",
        }

    async def prepare(self, title: str, page: Page) -> None:
        if title == "publish":
            if not await page.locator(".card .did").count():
                await page.get_by_role("button", name="Make a new identity").click()
            await page.get_by_label("Text", exact=True).fill(_TEXTS[2])
            await page.get_by_role("button", name="Show what will be sent").click()
            await page.get_by_role("button", name="Publish", exact=True).click()
            await page.get_by_label("Text", exact=True).fill(_TEXTS[5])
            await page.get_by_role("button", name="Show what will be sent").click()
        elif title == "operator":
            await page.get_by_role("button", name="Use a key file…").click()
            key = json.dumps({"did": self.operator.did, "seed": f"0x{self.operator.seed.hex()}"})
            file: Any = {"name": "key.json", "mimeType": "application/json", "buffer": key.encode()}
            await page.locator("input[type=file]").set_input_files(file)
            await page.locator(".card .did", has_text=self.operator.did).wait_for()
            await page.get_by_role("button", name="Authenticate").click()
            await page.get_by_label("Log of rulings").wait_for()


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


async def _take(relay: RelayProcess, operator: Identity, folder: Path, only: str | None) -> None:
    authors = [new_identity() for _ in range(7)]
    samples = publish_samples(160, authors)
    async with open_client(relay.ws) as client, browser() as chromium:
        await client.publish_all(samples)
        rotated = await _rotate(client)
        await _rule(relay, operator, samples)
        tour = _Tour(operator, samples[0], rotated)
        traffic = asyncio.create_task(_trickle(client, authors))
        for scheme in ("light", "dark"):
            for name, size in _SIZES.items():
                async with watched(chromium, relay.http, viewport=size, color_scheme=scheme) as (page, watch):
                    for title, place in tour.places.items():
                        if only is None or title == only:
                            await page.goto(f"{relay.http}/#/{place}")
                            await tour.prepare(title, page)
                            await page.wait_for_timeout(9000 if title == "overview" else 1500)
                            await page.screenshot(path=folder / f"{title}-{scheme}-{name}.png")
                    for problem in (*watch.errors, *watch.foreign):
                        print(f"{scheme} {name}: {problem}")
        traffic.cancel()


def main() -> None:
    """Make them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--page", help="only this page")
    parser.add_argument("--folder", type=Path, default=ROOT / "build/screens")
    chosen = parser.parse_args()
    chosen.folder.mkdir(parents=True, exist_ok=True)
    operator = new_identity()
    with tempfile.TemporaryDirectory() as folder:
        relay = RelayProcess(Path(folder), operators=[operator.did]).start()
        try:
            asyncio.run(_take(relay, operator, chosen.folder, chosen.page))
        finally:
            relay.kill()
    print(chosen.folder)


if __name__ == "__main__":
    main()
