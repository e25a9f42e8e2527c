"""Pictures of every page of the console, with real traffic: `python -m tests.support.screens`.

They go to build/screens: light and dark, wide and narrow. Look at them before you call a change done.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
from collections.abc import Sequence
from pathlib import Path

from strata.protocol.ids import Identity
from strata.protocol.packets import Packet

from tests.support.bare_client import BareClient, open_client
from tests.support.browsers import browser, watched
from tests.support.made_packets import make, new_identity
from tests.support.relay_process import ROOT, RelayProcess, running

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


async def _take(relay: RelayProcess, folder: Path, only: str | None) -> None:
    authors = [new_identity() for _ in range(7)]
    samples = publish_samples(160, authors)
    async with open_client(relay.ws) as client, browser() as chromium:
        await client.publish_all(samples)
        pages = {
            "live": "#/",
            "search": "#/search?q=SENSOR_READING",
            "packet": f"#/packet/{samples[0].packet_id}",
            "identity": f"#/identity/{authors[1].did}",
            "overview": "#/overview",
            "topics": "#/topics",
            "publish": "#/publish",
            "operator": "#/operator",
        }
        traffic = asyncio.create_task(_trickle(client, authors))
        for scheme in ("light", "dark"):
            for name, size in _SIZES.items():
                async with watched(
                    chromium, relay.http, viewport=size, color_scheme=scheme, device_scale_factor=1
                ) as (page, watch):
                    for title, place in pages.items():
                        if only is not None and title != only:
                            continue
                        await page.goto(f"{relay.http}/{place}")
                        await page.wait_for_timeout(2500)
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
    with tempfile.TemporaryDirectory() as folder, running(RelayProcess(Path(folder))) as relay:
        asyncio.run(_take(relay, chosen.folder, chosen.page))
    print(chosen.folder)


if __name__ == "__main__":
    main()
