"""The console in a real Firefox: it reads, checks, makes a key, publishes, and follows its policy.

It runs only with RELAYD_FIREFOX=1: the tests in Chromium cover the rest, and another browser costs half a
minute.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tests.support.bare_client import open_client
from tests.support.firefox import firefox, firefox_missing
from tests.support.made_packets import make, new_identity
from tests.support.ports import free_port
from tests.support.relay_process import RelayProcess, running

pytestmark = [
    pytest.mark.timeout(400),
    pytest.mark.skipif(firefox_missing() is not None, reason=f"the console: {firefox_missing()}"),
]


def press(name: str) -> str:
    """Presses the button of this name; the value is whether there is an enabled one."""
    return (
        "(() => { const found = [...document.querySelectorAll('button')]"
        f".find((each) => each.textContent.trim() === {name!r} && !each.disabled);"
        " found?.click(); return found !== undefined; })()"
    )


async def test_packets_come_and_are_checked_and_one_is_signed_and_published(tmp_path: Path):
    packet = make(new_identity(), "seen in another browser")
    profile = tmp_path / "profile"
    profile.mkdir()
    with running(RelayProcess(tmp_path / "relay", port=free_port())) as relay:
        async with open_client(relay.ws) as client, firefox(profile) as page:
            await client.publish(packet)
            await page.go(relay.http)
            await page.until(
                f"document.querySelector('[data-row=\"{packet.packet_id}\"] .badge.good') !== null"
            )
            later = make(new_identity(), "and this one live")
            await client.publish(later)
            await page.until(f"document.querySelector('.row')?.dataset.row === '{later.packet_id}'")
            await page.evaluate("location.hash = '#/publish'")
            await page.until(press("Make a new identity"))
            await page.until("document.querySelector('.card .did') !== null")
            await page.until(
                "(() => { const text = document.querySelector('textarea');"
                " if (text.value === 'written in Firefox') return true;"
                " text.value = 'written in Firefox';"
                " text.dispatchEvent(new Event('input', { bubbles: true })); return false; })()"
            )
            await page.until(f"{press('Publish')} || ({press('Show what will be sent')}, false)")
            await page.until("document.querySelector('.outbox .stored') !== null")
            events, _ = await client.subscribe("s", {"types": ["POST"], "limit": 1, "order": "desc"})
            assert events[0]["packet"]["content"]["text"] == "written in Firefox"
            assert await page.evaluate("indexedDB.databases().then((all) => all.length > 0)")
            # A stored key comes back with the page.
            await page.go(f"{relay.http}/#/publish")
            await page.until("document.querySelector('.card .did') !== null")
            assert not page.said
            await asyncio.to_thread(relay.kill)
            await page.until("document.querySelector('.state.offline') !== null")
            await asyncio.to_thread(relay.start)
            await page.until("document.querySelector('.state.online') !== null")
