"""One conversation between the chat page in a real Chromium and a Python program, over one relay.

The page is `web/examples/chat`: a reliable channel of @waku/sds on the TypeScript client. It loses a share of
what it sends and receives, determined by a seed. It needs node, `make web`, playwright and a Chromium;
RELAYD_REQUIRE_NODE and RELAYD_REQUIRE_CHROMIUM turn their absence into a failure.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlencode

import pytest
import strata
from strata.protocol.ids import Identity

from tests.support.browsers import SCHEMES, axe_missing, missing, violations, watched
from tests.support.chat_site import chat_site
from tests.support.node_package import require_node
from tests.support.ports import free_port
from tests.support.relay_process import RelayProcess, running

if TYPE_CHECKING:
    from playwright.async_api import Browser, Page, ViewportSize

pytestmark = [
    pytest.mark.timeout(400),
    pytest.mark.asyncio(loop_scope="session"),
    pytest.mark.skipif(missing() is not None, reason=f"the chat page: {missing()}"),
]

TOPIC = "/chat/1/room/proto"
EACH = 6
"""The number of messages of each in each of the three parts: before the reload, before and after the kill."""
LOSS = 0.25
SEED = 7
PYTHON: dict[str, Any] = {
    "acknowledgement_timeout_ms": 1_000,
    "max_retransmissions": 50,
    "sync_min_interval_ms": 1_000,
    "repair_t_min_ms": 1_000,
    "repair_t_max_ms": 4_000,
}


@pytest.fixture(scope="module")
def site() -> Iterator[str]:
    require_node()
    with chat_site() as address:
        yield address


async def say(page: Page, words: str) -> None:
    """Write a message as a person would; it is in the page's store when this returns."""
    before = await page.evaluate("chat.channel.messages.filter((each) => each.isOwn).length")
    await page.locator("#text").fill(words)
    await page.keyboard.press("Enter")
    more = "(before) => chat.channel.messages.filter((each) => each.isOwn).length > before"
    await holds(page, more, before)


async def holds(page: Page, condition: str, argument: object = None) -> None:
    """Wait until this holds in the page. Polling each frame, the default, would draw sixty times a second."""
    await page.wait_for_function(condition, arg=argument, polling=50)


async def entered(page: Page) -> None:
    await holds(page, "() => globalThis.chat?.channel !== undefined")
    await page.locator("#link.good").wait_for()


async def messages(page: Page) -> list[dict[str, Any]]:
    """The messages of the page's channel, in its order."""
    found: list[dict[str, Any]] = await page.evaluate(
        """chat.channel.messages.map(({ id, payload, author, isOwn, state, follows }) =>
            ({ id, author, isOwn, state, follows, text: new TextDecoder().decode(payload) }))"""
    )
    return found


async def check_handed_over(page: Page) -> None:
    """Check that in this life of the page each message was delivered once, after those that it follows."""
    handed: list[str] = await page.evaluate("chat.handed")
    assert len(handed) == len(set(handed))
    follows = {each["id"]: each["follows"] for each in await messages(page)}
    place = {id_: at for at, id_ in enumerate(handed)}
    for id_, at in place.items():
        assert all(place.get(before, -1) < at for before in follows[id_])


async def test_a_page_and_a_program_hold_one_conversation_through_loss_a_reload_and_a_killed_relay(
    site: str, chromium: Browser, tmp_path: Path
) -> None:
    taken: list[tuple[str, str | None]] = []
    confirmed: set[str] = set()
    said: list[str] = []
    typed: list[str] = []
    me = Identity.from_seed(b"\x51" * 32)
    with running(RelayProcess(tmp_path / "relay", port=free_port())) as process:
        where = {"relay": process.ws, "room": "room", "loss": LOSS, "seed": SEED, "pace": 0.1}
        options = strata.Options(backoff_cap=0.5)
        async with (
            watched(chromium, site) as (page, watch),
            strata.connect(process.ws, identity=me, options=options) as relay,
            relay.channel("room", topic=TOPIC, **PYTHON) as room,
        ):
            page.set_default_timeout(150_000)  # beside the Spark tests a browser gets little processor time
            room.message_events.on(
                "message-received", lambda event: taken.append((event.payload.decode(), event.author))
            )
            room.message_events.on(
                "reliable:message:delivered", lambda event: confirmed.add(event.request_id)
            )
            await page.goto(f"{site}/?{urlencode(where)}")

            async def talk(part: str) -> None:
                for number in range(EACH):
                    said.append(await room.send(f"program, {part} {number}".encode()))
                    typed.append(f"page, {part} {number}")
                    await say(page, typed[-1])

            await entered(page)
            await talk("before the reload")
            await check_handed_over(page)
            await page.reload()
            await entered(page)
            process.kill()
            await talk("while there is no relay")
            await asyncio.to_thread(process.start)
            await talk("after the kill")

            await holds(
                page,
                """(all) => chat.channel.messages.length >= all && chat.channel.status.heldBack === 0
                    && chat.channel.status.unacknowledged === 0""",
                2 * len(said),
            )
            async with asyncio.timeout(60):
                while len(taken) < len(typed) or not confirmed.issuperset(said):  # noqa: ASYNC110
                    await asyncio.sleep(0.05)

            assert sorted(text for text, _ in taken) == sorted(typed), "each once"
            own = await page.evaluate("chat.channel.sender")
            assert {author for _, author in taken} == {own.partition("#")[0]}
            found = await messages(page)
            assert len(found) == len({each["id"] for each in found}) == 2 * len(said)
            assert {each["text"] for each in found if each["isOwn"]} == set(typed)
            assert {each["state"] for each in found} == {"acknowledged", "received"}
            assert {each["author"] for each in found if not each["isOwn"]} == {me.did}
            assert [each["id"] for each in found] == room.log(), "in one order on both sides"
            seen: set[str] = set()
            for each in found:
                assert seen.issuperset(each["follows"]), "after all that it follows"
                seen.add(each["id"])
            await check_handed_over(page)
            shown = await page.evaluate(
                "[...document.querySelectorAll('#messages li')].map((row) => row.dataset.id)"
            )
            assert shown == room.log()
            lost = await page.evaluate("chat.losses")
            print(lost, await page.evaluate("chat.channel.status"))
            assert lost["in"] > 0 and lost["out"] > 0
            assert not watch.errors


@pytest.mark.skipif(axe_missing() is not None, reason=f"the chat page: {axe_missing()}")
async def test_the_page_is_accessible_fits_a_phone_and_takes_messages_without_a_relay(
    site: str, chromium: Browser
) -> None:
    nobody = urlencode({"relay": f"ws://127.0.0.1:{free_port()}/strata", "room": "room"})
    size: ViewportSize = {"width": 390, "height": 760}
    async with watched(chromium, site, viewport=size) as (page, _):
        for address in (site, f"{site}/?{nobody}"):
            await page.goto(address)
            if address != site:
                await holds(page, "() => globalThis.chat?.channel !== undefined")
                await say(page, "A word. " * 40)
                await page.reload()
                await page.locator("[data-state=sending]").wait_for()
                await page.locator("summary").click()
            assert await page.evaluate("document.documentElement.scrollWidth") <= size["width"]
            for scheme in SCHEMES:
                await page.emulate_media(color_scheme=scheme)
                assert not await violations(page), f"{address}, {scheme}"
