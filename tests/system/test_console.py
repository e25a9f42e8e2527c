"""The console in a real Chromium, on a real relay: one browser and one relay for all tests.

They need the package playwright and a Chromium (Debian's will do); if either is missing, the tests are
skipped, unless RELAYD_REQUIRE_CHROMIUM is set.
"""

from __future__ import annotations

import asyncio
import datetime
import json
import re
import time
from collections.abc import AsyncIterator, Iterator
from typing import TYPE_CHECKING, Any

import pytest
import pytest_asyncio
from strata.protocol import packets
from strata.protocol.documents import RecoveryPolicy, VerificationMethod, build_document, method_id
from strata.protocol.keys import document_content, revoke_content, rotate_content
from websockets.exceptions import ConnectionClosed

from relayd.http.console import FOLDER
from tests.support.bare_client import open_client
from tests.support.browsers import SCHEMES, Watch, axe_missing, missing, violations, watched
from tests.support.console_load import opened
from tests.support.consoles import OPERATOR, House, console, key_file, of, rows, says, shows, take_key
from tests.support.made_packets import ids_of, make, new_identity
from tests.support.relay_process import ROOT
from tests.support.waiting import until

if TYPE_CHECKING:
    from playwright.async_api import Browser, Page, ViewportSize

pytestmark = [
    pytest.mark.asyncio(loop_scope="session"),
    pytest.mark.skipif(missing() is not None, reason=f"the console: {missing()}"),
]

PHONE: ViewportSize = {"width": 390, "height": 844}
WIDE: ViewportSize = {"width": 1280, "height": 800}
PLACES = ("live", "search", "overview", "topics", "publish", "operator")
CORPUS = (
    "<img src=x onerror=alert(1)>",
    "<script>alert(1)</script>",
    '"><svg/onload=alert(1)>',
    "javascript:alert(1)//",
    "</pre><iframe src=//evil.example>",
    "{{constructor.constructor('alert(1)')()}}",
    "\u202egnp.exe\u2066\u200b\ufeff",
)


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory) -> Iterator[House]:
    # The duration of its steps is checked elsewhere (test_http.py): beside a browser that draws, processor
    # time means nothing.
    found = House(tmp_path_factory.mktemp("console"))
    try:
        found.relay.start()
        yield found
        assert not found.relay.complaints()
    finally:
        found.relay.kill()


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def shared(house: House, chromium: Browser) -> AsyncIterator[tuple[Page, Watch]]:
    """A page that is loaded once: loading is most of the cost of a console test."""
    async with console(house, chromium) as (page, watch):
        yield page, watch


@pytest.fixture
def tab(shared: tuple[Page, Watch], house: House) -> Iterator[Page]:
    """The page that tests share; its errors fail the test that is ending."""
    page, watch = shared
    yield page
    wrong = [*watch.errors, *watch.foreign]
    watch.errors.clear()
    watch.foreign.clear()
    assert not wrong


async def test_an_empty_relay_says_how_to_begin_and_then_shows_what_comes(house: House, chromium: Browser):
    async with console(house, chromium) as (page, _), open_client(house.relay.ws) as client:
        await says(page, "Nothing has been published here yet")
        assert f'strata publish --text "hello" --relay {house.relay.ws}' in await page.inner_text("main")
        packets = [make(new_identity(), f"first {number}") for number in range(3)]
        await client.publish_all(packets)
        await shows(page, of(packets)[::-1])
        await page.locator(".row .badge.good").nth(2).wait_for()


async def test_every_page_keeps_to_its_policy_and_to_its_host(
    house: House, tab: Page, shared: tuple[Page, Watch]
):
    author = new_identity()
    packet = make(author, "seen")
    async with open_client(house.relay.ws) as client:
        await client.publish(packet)
    await tab.set_viewport_size(PHONE)
    for place in (*PLACES, f"packet/{packet.packet_id}", f"identity/{author.did}", "nowhere"):
        await tab.goto(f"{house.relay.http}/#/{place}")
        await tab.locator("h1").wait_for()
        await tab.get_by_text("Reading…").first.wait_for(state="detached")
        if place.startswith("packet"):
            await tab.locator(".steps .good").nth(3).wait_for()
        wide = await tab.evaluate("document.documentElement.scrollWidth")
        assert wide <= PHONE["width"], f"{place} is wider than a phone"
    await tab.set_viewport_size(WIDE)
    _, watch = shared
    assert not watch.errors
    assert not watch.foreign
    refused = await tab.evaluate(
        """async () => {
            const image = document.createElement("img");
            const outcome = new Promise((resolve) => (image.onerror = () => resolve("refused")));
            image.src = "http://evil.example/x.png";
            try { document.body.innerHTML = "<b>x</b>"; return "taken" } catch { return await outcome }
        }"""
    )
    assert refused == "refused"
    assert any("img-src" in error for error in watch.errors), "the policy reports nothing"
    watch.errors.clear()
    watch.foreign.clear()


@pytest.mark.skipif(axe_missing() is not None, reason=f"the console: {axe_missing()}")
async def test_the_pages_are_accessible_in_the_light_and_in_the_dark(house: House, tab: Page):
    author = new_identity()
    packet = make(author, "accessible")
    async with open_client(house.relay.ws) as client:
        await client.publish(packet)
    for place in (*PLACES, f"packet/{packet.packet_id}", f"identity/{author.did}"):
        await tab.goto(f"{house.relay.http}/#/{place}")
        await tab.locator("h1").wait_for()
        await tab.get_by_text("Reading…").first.wait_for(state="detached")
        await says(tab, "Connected")
        if place.startswith("packet"):
            await tab.locator(".steps .good").nth(3).wait_for()
        for scheme in SCHEMES:
            await tab.emulate_media(color_scheme=scheme)
            assert not await violations(tab), f"{place}, {scheme}"


@pytest.mark.parametrize("width", [320, 640, 861])
async def test_nothing_is_lost_where_the_window_is_narrow_or_enlarged(house: House, tab: Page, width: int):
    """A window of 1280 pixels enlarged to 200 % has 640 (WCAG 1.4.4), and to 400 % 320 (1.4.10)."""
    author = new_identity()
    packets = [make(author, f"here to be seen: {number}", type="W" * 120) for number in range(3)]
    async with open_client(house.relay.ws) as client:
        await client.publish_all(packets)
    await tab.set_viewport_size({"width": width, "height": 640})
    try:
        for place in (*PLACES, f"packet/{packets[0].packet_id}", f"identity/{author.did}"):
            await tab.goto(f"{house.relay.http}/#/{place}")
            await tab.locator("h1").wait_for()
            await tab.get_by_text("Reading…").first.wait_for(state="detached")
            wide = await tab.evaluate(
                "Math.max(...['html', 'main'].map((name) => document.querySelector(name))"
                ".map(({ scrollWidth, clientWidth }) => scrollWidth - clientWidth))"
            )
            assert wide <= 0, f"{place} is wider than its window"
        assert await tab.evaluate(
            "[...document.querySelectorAll('nav a')].every((a) => {"
            "    const { left, right } = a.getBoundingClientRect();"
            "    const bar = a.parentElement.getBoundingClientRect();"
            "    return left >= bar.left && right <= bar.right + 1;"
            "})"
        ), "the menu is cut off"
        await tab.goto(f"{house.relay.http}/#/live")
        for packet in packets:
            words = tab.locator(f'[data-row="{packet.packet_id}"] .preview')
            box = await words.bounding_box()
            assert box is not None
            assert box["width"] > 100
    finally:
        await tab.set_viewport_size(WIDE)


async def test_a_page_is_printed_whole(house: House, tab: Page):
    packet = make(new_identity(), "\n".join(f"line {number}" for number in range(1500)))
    async with open_client(house.relay.ws) as client:
        await client.publish(packet)
    await tab.goto(f"{house.relay.http}/#/packet/{packet.packet_id}")
    await tab.locator(".steps .good").nth(3).wait_for()
    cut = """[...document.querySelectorAll("html, body, #app, main, main :not(.hidden)")]
        .filter((each) => getComputedStyle(each).overflowY !== "visible")
        .filter(({ scrollHeight, clientHeight }) => scrollHeight > clientHeight + 1)
        .map(({ tagName, className }) => `${tagName} ${className}`)"""
    assert await tab.evaluate(cut), "nothing is longer than the window"
    await tab.emulate_media(media="print")
    try:
        assert await tab.evaluate(cut) == []
        await tab.goto(f"{house.relay.http}/#/live")
        await shows(tab, [packet.packet_id])
        assert await tab.evaluate(cut) == []
        assert await tab.evaluate("document.querySelector('.list ol').clientHeight") < 60 * 92, (
            "rows not drawn take room"
        )
    finally:
        await tab.emulate_media(media="screen")


async def test_nothing_in_a_packet_is_taken_for_a_page(house: House, tab: Page):
    author = new_identity()
    packets = [
        make(author, text, type=text, title=text, media_note=[{text: text}], extra={text: {text: text}})
        for text in CORPUS
    ]
    async with open_client(house.relay.ws) as client:
        answers = await client.publish_all(packets)
        assert {answer["type"] for answer in answers} == {"OK"}
    page, dialogs = tab, []
    page.once("dialog", lambda dialog: dialogs.append(dialog.message))
    await page.goto(f"{house.relay.http}/#/live")
    await shows(page, of(packets)[::-1])
    for place in ("live", f"search?q={author.did}", "topics", f"identity/{author.did}"):
        await page.goto(f"{house.relay.http}/#/{place}")
        await says(page, "<img src=x onerror")
        assert not await page.locator("#app :is(img, script, iframe, object, embed)").count()
        assert "\u202e" not in await page.inner_text("body")
    for packet, text in zip(packets, CORPUS, strict=True):
        await page.goto(f"{house.relay.http}/#/packet/{packet.packet_id}")
        await page.locator(".subject", has_text=packet.packet_id).wait_for()
        await page.locator(".steps .good").nth(3).wait_for()
        body = await page.inner_text("main")
        assert not set("\u202e\u2066\u200b\ufeff") & set(body)
        if text.isascii():
            assert json.dumps(text) in body
        else:
            assert "⟨U+202E⟩gnp.exe" in body
        hrefs = await page.evaluate("[...document.querySelectorAll('main a')].map((a) => a.protocol)")
        assert set(hrefs) <= {"http:"}
    assert not dialogs


async def test_the_keyboard_is_enough(house: House, chromium: Browser):
    author = new_identity()
    packets = [make(author, f"by hand, {name}") for name in ("wren", "robin", "heron", "swift")]
    async with open_client(house.relay.ws) as client:
        await client.publish_all(packets)
        newest = of(packets)[::-1]
        async with console(house, chromium, reduced_motion="reduce") as (page, _):
            await shows(page, newest)
            press = page.keyboard.press
            await press("Tab")
            assert await page.evaluate("document.activeElement.textContent") == "Skip to the page"
            await press("Enter")
            assert await page.evaluate("document.activeElement.id") == "main"
            await press("j")
            await press("j")
            await press("j")
            await press("k")
            assert await page.evaluate("document.activeElement.dataset.row") == newest[1]
            await press("Enter")
            await says(page, newest[1])
            await page.locator("h1", has_text="Packet").wait_for()
            await press("Escape")
            await page.locator("h1", has_text="Live").wait_for()
            await press(" ")
            await says(page, "Resume")
            late = make(author, "while paused")
            await client.publish(late)
            await says(page, "1 new")
            assert late.packet_id not in await rows(page)
            await press(" ")
            await shows(page, [late.packet_id, *newest])
            await press("/")
            await page.keyboard.type("hand, heron")
            await shows(page, [packets[2].packet_id])
            assert len(await rows(page)) == 1
            await press("Escape")
            assert await page.evaluate("document.activeElement === document.body")
            await page.get_by_role("button", name="Switch single keys off").press("Enter")
            await page.reload()  # it is remembered
            await shows(page, [late.packet_id, *newest])
            for key in ("j", "/", " "):
                await press(key)
            assert await page.evaluate("document.activeElement === document.body")
            assert await page.get_by_role("button", name="Pause").count() == 1
            await page.get_by_role("button", name="Switch single keys on").press("Enter")
            await press("j")
            assert await page.evaluate("document.activeElement.dataset.row") == late.packet_id
            motion = await page.evaluate(
                "getComputedStyle(document.querySelector('.row')).transitionDuration"
            )
            assert motion == "0s"


async def test_a_row_that_has_the_focus_keeps_it_however_many_packets_come(house: House, tab: Page):
    await tab.goto(f"{house.relay.http}/#/live")
    await says(tab, "Connected")
    author = new_identity()
    chosen = make(author, "chosen by hand")
    async with open_client(house.relay.ws) as client:
        await client.publish(chosen)
        await shows(tab, [chosen.packet_id])
        await tab.keyboard.press("j")
        focused = "document.activeElement.dataset.row"
        assert await tab.evaluate(focused) == chosen.packet_id
        packets = [make(author, f"number {number}") for number in range(120)]
        for half in (packets[:60], packets[60:]):
            before = await tab.evaluate("Number(document.activeElement.parentElement.ariaPosInSet)")
            await client.publish_all(half)
            await tab.wait_for_function(
                "(place) => Number(document.activeElement.parentElement?.ariaPosInSet ?? place) === place",
                arg=before + len(half),
            )
            assert await tab.evaluate(focused) == chosen.packet_id
        row = tab.locator(f'[data-row="{chosen.packet_id}"]')
        box, around = await row.bounding_box(), await tab.locator(".list").bounding_box()
        assert box is not None
        assert around is not None
        assert around["y"] <= box["y"] <= around["y"] + around["height"] - box["height"], "it is in view"
        await tab.keyboard.press("k")
        assert await tab.evaluate(focused) == packets[0].packet_id
    await tab.locator(".list").evaluate("(list) => { document.activeElement.blur(); list.scrollTop = 0 }")
    await shows(tab, of(packets)[::-1][:5])


async def test_who_searched_for_one_packet_comes_back_from_it(house: House, tab: Page):
    missing_id = f"0x{'00' * 32}"
    await tab.evaluate("location.hash = '#/topics'")
    await tab.locator("h1", has_text="Topics").wait_for()
    await tab.evaluate("id => void (location.hash = `#/search?q=${id}`)", missing_id)
    await tab.locator("h1", has_text="Packet").wait_for()
    await tab.keyboard.press("Escape")
    await tab.locator("h1", has_text="Topics").wait_for(timeout=5_000)


async def test_a_killed_relay_costs_no_packet_and_repeats_none(house: House, tab: Page):
    author = new_identity()
    relay = house.relay
    await tab.set_viewport_size({"width": 1280, "height": 2400})
    await tab.goto(f"{relay.http}/#/live")
    await says(tab, "Connected")
    sent: list[str] = []
    for round_ in range(3):
        async with open_client(relay.ws) as client:
            packets = [make(author, f"round {round_}, {number}") for number in range(12)]
            await client.publish_all(packets)
            sent += of(packets)
        if round_ != 1:
            await shows(tab, sent[::-1])
        if round_ < 2:
            relay.kill()
            await says(tab, "Last heard")
            relay.start()
    await shows(tab, sent[::-1])
    await says(tab, "Connected")
    assert not await tab.get_by_text("Gap:").count()
    await tab.set_viewport_size(WIDE)


async def test_who_jumps_to_now_sees_what_was_left_out(house: House, chromium: Browser):
    author = new_identity()
    async with console(house, chromium) as (page, _), open_client(house.relay.ws) as client:
        before = make(author, "before")
        await client.publish(before)
        await shows(page, [before.packet_id])
        held: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        page.on("dialog", lambda dialog: held.set_result(dialog))
        asking = asyncio.create_task(page.evaluate("alert('the page stands still')"))
        dialog = await held
        late = make(author, "late")
        ok = await client.publish(late)
        # Behind by more than five seconds by the relay's own clock.
        await until(lambda: time.time() > ok["received_at"] + 8)
        await dialog.accept()
        await asking
        await page.get_by_role("button", name="Jump to now").click()
        await says(page, "jumped to now")
        after = make(author, "after")
        await client.publish(after)
        await shows(page, [after.packet_id])
        assert (await rows(page))[1].startswith("gap-")


async def test_what_a_pause_cannot_keep_is_counted_and_has_its_row(house: House, chromium: Browser):
    author = new_identity()
    async with open_client(house.relay.ws) as client:
        await client.publish(make(author, "there is one already"))
    async with watched(chromium, house.relay.http) as (page, watch):
        await opened(page, house.relay.http)
        before = int(re.sub(r"\D", "", await page.locator(".counters b").first.inner_text()))
        await page.get_by_role("button", name="Pause").click()
        fed = make(author, "fed").canonical.decode()
        await page.evaluate("([packet, count]) => window.feed(packet, count)", [fed, 6000])
        await says(page, "6,000 new")
        await page.get_by_role("button", name="Resume").click()
        await says(page, "more came during the pause than is kept")
        await says(page, "4,999")
        counters = await page.locator(".counters").inner_text()
        assert f"{before + 6000:,} received" in counters
        assert "1,000 skipped" in counters
        assert "4,999 in the list" in counters
        await page.evaluate("([packet, count]) => window.feed(packet, count)", [fed, 6000])
        await says(page, f"{before + 12_000:,} received")
        await says(page, "5,000 in the list")
        assert await page.evaluate("document.querySelectorAll('*').length") < 700, (
            "only what is in view is drawn"
        )
        assert not watch.errors


async def test_a_flood_changes_the_rows_that_are_there_and_moves_none_that_has_the_focus(
    house: House, chromium: Browser
):
    author = new_identity()
    async with open_client(house.relay.ws) as client:
        await client.publish(make(author, "there is one already"))
    async with watched(chromium, house.relay.http) as (page, watch):
        await opened(page, house.relay.http)
        fed = make(author, "fed").canonical.decode()
        bring = "([packet, count, first]) => window.feed(packet, count, first)"
        newest = "(id) => document.querySelector('.list .row')?.dataset.row.endsWith(id)"
        await page.evaluate(bring, [fed, 500, 0])
        await page.wait_for_function(newest, arg="0499")
        await page.evaluate("document.querySelectorAll('.list .row').forEach((row) => { row.ours = true; })")
        drawn = await page.evaluate("document.querySelectorAll('.list .row').length")
        await page.evaluate(bring, [fed, 500, 500])
        await page.wait_for_function(newest, arg="0999")
        kept = "[...document.querySelectorAll('.list .row')].filter((row) => row.ours).length"
        assert await page.evaluate(kept) == drawn
        ids = await rows(page)
        assert ids == sorted(ids, reverse=True), "in their order, and none twice"
        await page.keyboard.press("j")
        focused = "document.activeElement.dataset.row"
        before = await page.evaluate(focused)
        await page.evaluate(bring, [fed, 3, 1000])
        await page.wait_for_function(newest, arg="1002")
        assert await page.evaluate(focused) == before == ids[0]
        await page.evaluate(bring, [fed, 500, 1003])
        await page.wait_for_function("() => document.querySelector('.list li').ariaSetSize > 1500")
        assert await page.evaluate(focused) == before, "the focus stays with its packet"
        assert not watch.errors


async def test_a_relay_that_goes_away_is_said_to(house: House, tab: Page):
    await says(tab, "Connected")
    house.relay.terminate()
    await says(tab, "The relay is going away for a moment")
    assert house.relay.wait() == 0
    house.relay.start()
    await says(tab, "Connected")


async def test_a_relay_that_is_away_for_an_hour_is_told_and_asked_for_nothing_that_nobody_waits_for(
    house: House, chromium: Browser
):
    packet = make(new_identity(), "stored before", type="of two words")
    async with open_client(house.relay.ws) as client:
        await client.publish(packet)
    # The browser's clock is also wrong by a day: the page goes by the relay's.
    wrong = datetime.datetime.now() + datetime.timedelta(days=1)
    async with watched(chromium, house.relay.http) as (page, watch):
        await page.clock.install(time=wrong)
        await page.goto(f"{house.relay.http}/#/topics")
        await page.locator(".topics .hint", has_text="received since").wait_for()
        assert not re.search(r"\b(h|days)\)", await page.inner_text(".topics .hint"))
        await page.get_by_role("link", name="of two words").click()
        await says(page, "Understood: type of two words.")
        await page.locator(".list .row").first.wait_for()
        assert await rows(page) == of([packet])
        house.relay.kill()
        try:
            await says(page, "No connection to the relay")
            await page.clock.run_for(60 * 60 * 1000)
            await says(page, re.compile("Last heard (60|61) min ago"))
            for number in range(9):
                await page.goto(f"{house.relay.http}/#/search?q=POST{number}")
                await says(page, f"Understood: type POST{number}.")
        finally:
            house.relay.start()
        asked: list[str] = []
        page.on(
            "websocket",
            lambda socket: socket.on("framesent", lambda frame: asked.append(str(frame))),
        )
        await page.clock.run_for(20_000)
        await says(page, "Nothing stored here matches")
        assert [words for words in asked if "POST" in words] == [words for words in asked if "POST8" in words]
        assert any("POST8" in words for words in asked)
        assert not watch.errors
        assert not watch.foreign


async def test_a_packet_waits_for_its_relay_across_a_reload(house: House, chromium: Browser):
    relay = house.relay
    async with console(house, chromium, "publish") as (page, watch):
        await page.get_by_role("button", name="Make a new identity").click()
        await page.locator(".card .did").wait_for()
        did = await page.locator(".card .did").inner_text()
        await page.get_by_label("Text", exact=True).fill("written while it was away")
        await page.get_by_role("button", name="Show what will be sent").click()
        shown = json.loads(await page.get_by_label("The packet's bytes").inner_text())
        assert shown["content"] == {"type": "POST", "text": "written while it was away"}
        assert shown["author_id"] == did
        relay.kill()
        await says(page, "Last heard")
        await page.get_by_role("button", name="Publish", exact=True).click()
        await says(page, "waits")
        other = await page.context.new_page()  # a second tab shares the outbox
        relay.start()
        await page.reload()
        await other.goto(f"{relay.http}/#/publish")
        assert await page.locator(".card .did").inner_text() == did
        async with open_client(relay.ws) as client:
            await client.send(
                {"type": "SUBSCRIBE", "subscription_id": "s", "filters": {"packet_ids": [shown["packet_id"]]}}
            )
            event = await client.receive()
            assert event["packet"] == shown
        await page.get_by_text("waits").wait_for(state="detached")
        assert await page.evaluate(
            "new Promise((resolve) => { indexedDB.open('strata-console').onsuccess = ({target}) => {"
            " const all = target.result.transaction('identities').objectStore('identities').getAll();"
            " all.onsuccess = () => resolve(all.result.map(({pair}) => pair.privateKey.extractable)) } })"
        ) == [False]
        # The page under which the relay was killed may complain of that, and of nothing else.
        watch.errors[:] = [error for error in watch.errors if "WebSocket" not in error]


async def write(page: Page, text: str) -> None:
    """Sign a packet and put it into the outbox; it is durable when this returns."""
    await page.get_by_label("Text", exact=True).fill(text)
    await page.get_by_role("button", name="Show what will be sent").click()
    await page.get_by_role("button", name="Publish", exact=True).click()
    await page.wait_for_function("() => document.querySelector('textarea').value === ''")


def publishes(page: Page) -> list[str]:
    """The ids of the packets that the page sends from now on."""
    sent: list[str] = []

    def note(frame: bytes | str) -> None:
        message = json.loads(frame)
        if message["type"] == "PUBLISH":
            sent.append(message["packet"]["packet_id"])

    page.on("websocket", lambda socket: socket.on("framesent", note))
    return sent


async def test_a_draft_that_the_browser_cannot_keep_is_sent_as_it_is_now(house: House, chromium: Browser):
    async with console(house, chromium, "publish") as (page, _):
        await page.get_by_role("button", name="Make a new identity").click()
        await page.locator(".card .did").wait_for()
        full = "() => { throw new DOMException('no room', 'QuotaExceededError') }"
        await page.evaluate(f"void (Storage.prototype.setItem = {full})")
        text = page.get_by_label("Text", exact=True)
        show = page.get_by_role("button", name="Show what will be sent")
        await text.fill("before")
        await show.click()
        preview = page.get_by_label("The packet's bytes")
        assert "before" in await preview.inner_text()
        await text.fill("after")
        await preview.wait_for(state="detached")
        await show.click()
        assert "after" in await preview.inner_text()


async def test_what_is_written_while_a_packet_is_published_stays(house: House, chromium: Browser):
    async with console(house, chromium, "publish") as (page, _):
        await page.get_by_role("button", name="Make a new identity").click()
        await page.locator(".card .did").wait_for()
        text = page.get_by_label("Text", exact=True)
        await text.fill("the first")
        await page.get_by_role("button", name="Show what will be sent").click()
        await page.get_by_label("The packet's bytes").wait_for()
        await text.evaluate(
            """field => {
                const all = [...document.querySelectorAll("button")];
                all.find((each) => each.textContent === "Publish").click();
                field.value = "the next";
                field.dispatchEvent(new Event("input", { bubbles: true }));
            }"""
        )
        await page.locator(".outbox .stored").wait_for()
        assert await text.input_value() == "the next"


async def test_what_was_written_before_is_not_shown_as_what_will_be_sent(house: House, chromium: Browser):
    async with console(house, chromium, "publish") as (page, _):
        await page.get_by_role("button", name="Make a new identity").click()
        await page.locator(".card .did").wait_for()
        await page.evaluate(
            """() => {
                const { sign } = SubtleCrypto.prototype;
                SubtleCrypto.prototype.sign = async function (...all) {
                    await new Promise((resolve) => { window.go = resolve; });
                    return sign.apply(this, all);
                };
            }"""
        )
        text = page.get_by_label("Text", exact=True)
        show = page.get_by_role("button", name="Show what will be sent")
        await text.fill("the first")
        await show.click()
        await page.wait_for_function("() => window.go !== undefined")
        await text.fill("the next")
        await page.evaluate("() => { window.go(); window.go = undefined; }")
        await page.evaluate("() => new Promise((resolve) => setTimeout(resolve, 300))")
        assert await page.get_by_label("The packet's bytes").count() == 0, "it was signed too late"
        await show.click()
        await page.wait_for_function("() => window.go !== undefined")
        await page.evaluate("() => window.go()")
        assert "the next" in await page.get_by_label("The packet's bytes").inner_text()

        await page.evaluate(
            """() => {
                window.transaction = IDBDatabase.prototype.transaction;
                IDBDatabase.prototype.transaction = () => { throw new DOMException("no room"); };
            }"""
        )
        await page.get_by_role("button", name="Publish", exact=True).click()
        await says(page, "Not yet")
        await page.evaluate("() => { IDBDatabase.prototype.transaction = window.transaction; }")
        await page.get_by_role("button", name="Publish", exact=True).click()
        await page.locator(".outbox .stored").wait_for()
        assert await page.get_by_text("Not yet").count() == 0, "it is published"


async def test_two_tabs_have_one_outbox_and_send_each_packet_once(house: House, chromium: Browser):
    relay = house.relay
    async with console(house, chromium, "live") as (one, watch):
        other = await one.context.new_page()
        by_one, by_other = publishes(one), publishes(other)
        await one.goto(f"{relay.http}/?one#/publish")
        await one.get_by_role("button", name="Make a new identity").click()
        await one.locator(".card .did").wait_for()
        did = await one.locator(".card .did").inner_text()
        await other.goto(f"{relay.http}/#/publish")
        await other.locator(".card .did", has_text=did).wait_for()
        for page in (one, other):
            await says(page, "Connected")  # otherwise they would have nothing to miss
        relay.kill()
        for page in (one, other):
            await says(page, "Last heard")
        for number in range(2):
            await write(one, f"from one tab, {number}")
            await write(other, f"from another, {number}")
        for page in (one, other):
            await page.locator(".outbox .badge", has_text="waits").nth(3).wait_for()
        relay.start()
        for page in (one, other):
            # Pages pause longer and longer before they try the relay again.
            waits = page.locator(".outbox .badge", has_text="waits")
            await waits.first.wait_for(state="detached", timeout=90_000)
            await page.locator(".outbox .badge", has_text="stored").nth(1).wait_for()
        assert len(by_one) == len(set(by_one)) == 4, "the tab that came first sends what both have"
        assert not by_other
        assert relay.metric("relayd_publishes_total", outcome="accepted") == 4
        assert relay.metric("relayd_publishes_total", outcome="duplicate") == 0
        await one.close()
        await write(other, "the other tab has the outbox to itself")
        await other.locator(".outbox .badge", has_text="stored").nth(2).wait_for()
        assert len(by_other) == 1
        async with open_client(relay.ws) as client:
            await client.send({"type": "SUBSCRIBE", "subscription_id": "s", "filters": {"authors": [did]}})
            assert set(ids_of(await client.events("s", 5))) == {*by_one, *by_other}
        watch.errors[:] = [error for error in watch.errors if "WebSocket" not in error]


async def test_a_key_that_is_deleted_speaks_in_no_tab(house: House, chromium: Browser):
    async with console(house, chromium, "publish") as (one, _):
        other = await one.context.new_page()
        await other.goto(f"{house.relay.http}/#/publish")
        await one.get_by_role("button", name="Make a new identity").click()
        did = await one.locator(".card .did").inner_text()
        await other.get_by_role("combobox", name="Identity").select_option(did)
        for page in (one, other):
            await page.get_by_role("button", name="Authenticate").click()
            await says(page, "The relay knows this page as")
        await one.get_by_role("button", name="Delete…").click()
        await one.get_by_role("button", name="Delete this key for good").click()
        for page in (one, other):
            await page.locator(".card .did").wait_for(state="detached")
            await page.get_by_text("The relay knows this page as").wait_for(state="detached")
            assert await page.get_by_role("button", name="Show what will be sent").is_disabled()
        assert not await other.get_by_role("combobox", name="Identity").count()


async def test_where_the_browser_keeps_nothing_a_page_works_for_its_visit(house: House, chromium: Browser):
    packet = make(new_identity(), "to be read")
    async with open_client(house.relay.ws) as client:
        await client.publish(packet)
    async with watched(chromium, house.relay.http) as (page, watch):
        await page.add_init_script(
            "const denied = { get() { throw new DOMException('denied', 'SecurityError') } };"
            "Object.defineProperty(window, 'localStorage', denied);"
            "window.indexedDB.open = denied.get;"
        )
        await page.goto(f"{house.relay.http}/#/live")
        await page.locator(f'[data-row="{packet.packet_id}"] .badge.good').wait_for()
        await page.get_by_role("button", name="Switch single keys off").click()
        await page.goto(f"{house.relay.http}/#/publish")
        await says(page, "This browser keeps no keys for this page")
        await page.get_by_role("button", name="Make a new identity").click()
        await page.get_by_role("button", name="Authenticate").click()
        await says(page, "The relay knows this page as")
        await page.get_by_label("Text", exact=True).fill("for this visit")
        await page.get_by_role("button", name="Show what will be sent").click()
        await page.get_by_role("button", name="Publish", exact=True).click()
        await page.locator(".outbox .stored").wait_for()
        assert not watch.errors
        assert not watch.foreign


async def test_where_webcrypto_has_no_ed25519_keys_work_for_a_visit_and_the_page_says_so(
    house: House, chromium: Browser
):
    async with console(house, chromium, "publish") as (page, _):
        await page.add_init_script(
            """for (const name of ["importKey", "generateKey"]) {
                const own = SubtleCrypto.prototype[name];
                SubtleCrypto.prototype[name] = function (...all) {
                    if (!all.some((each) => each === "Ed25519")) return own.apply(this, all);
                    return Promise.reject(new DOMException("unknown", "NotSupportedError"));
                };
            }"""
        )
        await page.reload()
        await page.get_by_role("button", name="Make a new identity").click()
        await page.locator(".card .did").wait_for()
        await says(page, "This browser keeps no keys")
        imported = new_identity()
        await take_key(page, key_file(imported))
        await says(page, "This browser keeps no keys")


async def test_the_worker_has_pythons_verdicts_on_signatures(house: House, tab: Page):
    packet = make(new_identity(), "for the worker to begin")
    async with open_client(house.relay.ws) as client:
        await client.publish(packet)
    await tab.goto(f"{house.relay.http}/#/live")
    await tab.locator(f'[data-row="{packet.packet_id}"] .badge.good').wait_for()
    (worker,) = tab.workers
    cases = json.loads((ROOT / "web/vectors/ed25519.json").read_text())
    wrong = await worker.evaluate(
        """async (cases) => {
            const { verify } = await import(location.href);
            const bytes = (hex) => Uint8Array.from(hex.match(/../g) ?? [], (digits) => parseInt(digits, 16));
            const wrong = [];
            for (const { name, public_key, message, signature, valid } of cases)
                for (const source of [undefined, "webcrypto", "javascript"]) {
                    const said = await verify(bytes(public_key), bytes(message), bytes(signature), source);
                    if (said !== valid) wrong.push(`${name}, ${source}`);
                }
            return wrong;
        }""",
        cases,
    )
    assert len(cases) == 43
    assert not wrong


async def test_what_is_served_with_another_origin_is_checked_as_it_was_signed(house: House, tab: Page):
    author, now = new_identity(), int(time.time())
    header = {"origin_type": "SOFTWARE", "genesis_media_hash": f"0x{'0' * 64}", "edit_history": []}

    def claiming(content: dict[str, object]) -> packets.Packet:
        return packets.build(author, content, timestamp=now, provenance_header=header, allow_unattested=True)

    packet = claiming({"type": "POST", "text": "claimed"})
    revocation = claiming(revoke_content(method_id(author.did), revoked_at=now - 5))
    async with open_client(house.relay.ws) as client:
        for each in (packet, revocation):
            assert (await client.publish(each))["type"] == "OK"
    await tab.goto(f"{house.relay.http}/#/packet/{packet.packet_id}")
    await tab.locator(".steps .good").nth(3).wait_for()
    await says(tab, "The relay's finding")
    assert await tab.get_by_label("The packet's bytes").inner_text() == packet.canonical.decode()
    await tab.goto(f"{house.relay.http}/#/identity/{author.did}")
    await tab.locator(".timeline").get_by_text("revoked a key").wait_for()
    await says(tab, "revoked")
    assert not await tab.locator("td.good").count(), "a revoked key is called valid"


async def test_rivals_for_an_identity_and_what_is_pending_are_shown(house: House, tab: Page):
    torn, now = new_identity(), int(time.time())
    own = VerificationMethod(method_id(torn.did), torn.public_key, now - 10)
    genesis = build_document(torn.did, [own], created_at=now)
    rivals = [
        build_document(torn.did, [own], created_at=now + n, previous=genesis, extra={"n": n}) for n in (1, 2)
    ]
    documents = [packets.build(torn, document_content(each), timestamp=now) for each in (genesis, *rivals)]

    who, new, recovery = new_identity(), new_identity(), new_identity()
    methods = [
        VerificationMethod(method_id(who.did), who.public_key, now - 10),
        VerificationMethod(method_id(who.did, "r1"), recovery.public_key, now - 10, recovery=True),
    ]
    policy = RecoveryPolicy(threshold=1)
    document = build_document(who.did, methods, created_at=now, recovery_policy=policy)
    replaced = rotate_content(
        method_id(who.did, "keys-2"), new.public_key, replaces=method_id(who.did), valid_from=now
    )
    published = packets.build(who, document_content(document), timestamp=now)
    pending = packets.build(recovery.speaking_for(who.did), replaced, timestamp=now)

    async with open_client(house.relay.ws) as client:
        for packet in (*documents, published):
            assert (await client.publish(packet))["status"] == "ACCEPTED"
        assert (await client.publish(pending))["status"] == "QUEUED"
    await tab.goto(f"{house.relay.http}/#/identity/{torn.did}")
    await says(tab, "No key of this DID counts")
    await says(tab, f"two documents succeed {genesis.hash}")
    assert "in conflict" in await tab.get_by_label("Keys", exact=True).inner_text()
    assert not await tab.locator("table .good").count(), "no key is called valid"
    assert await tab.locator(".timeline li").count() == 3
    await tab.goto(f"{house.relay.http}/#/identity/{who.did}")
    waiting = tab.locator(".timeline li.pending")
    await waiting.get_by_text("replaced a key").wait_for()
    assert "pending" in await waiting.inner_text()
    assert await waiting.count() == 1
    assert await tab.locator(f'.timeline li.pending [href="#/packet/{pending.packet_id}"]').count() == 1
    keys = await tab.get_by_label("Keys", exact=True).inner_text()
    assert f"0x{who.public_key.hex()}"[:14] in keys
    assert f"0x{recovery.public_key.hex()}"[:14] in keys
    assert f"0x{new.public_key.hex()}"[:14] not in keys, "it does not count yet"


async def test_readers_authenticate_where_the_relay_asks_for_it(house: House, chromium: Browser):
    packet = make(new_identity(), "for members")
    async with open_client(house.relay.ws) as client:
        await client.publish(packet)
    with house.set(require_auth=["subscribe"]):
        async with console(house, chromium) as (page, _):
            await says(page, "authenticated readers only")
            assert not await rows(page)
            await page.get_by_role("link", name="Choose or make an identity").click()
            await page.get_by_role("button", name="Make a new identity").click()
            await says(page, "The relay knows this page as")
            await page.get_by_role("link", name="Live").click()
            await shows(page, [packet.packet_id])


async def test_nothing_is_signed_for_a_relay_by_another_name(house: House, chromium: Browser):
    relay = house.relay
    async with console(house, chromium, "publish") as (page, _):
        await page.get_by_role("button", name="Make a new identity").click()
        await page.get_by_role("button", name="Authenticate").click()
        await says(page, "The relay knows this page as")
        relay.kill()
        relay.settings["identity_seed"] = "07" * 32
        relay.start()
        try:
            await says(page, "another name than before")
            assert relay.metric("relayd_auths_total") == 0
            await page.get_by_role("button", name="I know of the change").click()
            await says(page, "The relay knows this page as")
        finally:
            relay.kill()
            del relay.settings["identity_seed"]
            relay.start()


async def test_an_operator_bans_and_lifts_the_ban_and_nobody_else_does(house: House, chromium: Browser):
    author = new_identity()
    packet = make(author, "to be judged")
    async with console(house, chromium, "operator") as (page, _), open_client(house.relay.ws) as client:
        await client.publish(packet)
        await take_key(page, key_file(author))
        await page.get_by_role("button", name="Authenticate").click()
        await says(page, "This identity is not an operator here")
        assert not await page.get_by_role("button", name="Ban", exact=True).count()
        await take_key(page, key_file(OPERATOR))
        await page.get_by_role("button", name="Authenticate").click()
        await page.get_by_label("DID", exact=True).fill(author.did)
        await page.get_by_label("Reason, as you would tell the author").fill("a test of the desk")
        await page.get_by_role("button", name="Ban", exact=True).click()
        await says(page, "is banned. Every process follows")
        await until(lambda: house.relay.get(f"/did/{author.did}")[0] == 410)
        assert (await client.publish(make(author)))["code"] == "blocked_author"
        await page.get_by_role("button", name=re.compile("Undo")).click()
        await page.get_by_label("Reason for undoing it").fill("it was a test")
        await page.get_by_role("button", name="Lift the ban").click()
        await says(page, "is no longer banned")
        await until(lambda: house.relay.get(f"/packets/{packet.packet_id}")[0] == 200)
        assert "a test of the desk" in await page.get_by_label("Log of rulings").inner_text()


async def test_what_an_operator_is_writing_outlasts_a_connection(house: House, chromium: Browser):
    async with console(house, chromium, "operator") as (page, _):
        await take_key(page, key_file(OPERATOR))
        await page.get_by_role("button", name="Authenticate").click()
        reason = page.get_by_label("Reason, as you would tell the author")
        await reason.fill("a long")
        house.relay.kill()
        await says(page, "Last heard")
        house.relay.start()
        await says(page, "Connected")
        await reason.press_sequentially(" story")
        subject = new_identity().did
        await page.get_by_label("DID", exact=True).fill(subject)
        ban = page.get_by_role("button", name="Ban", exact=True)
        await until(lambda: house.relay.get("/readyz")[0] == 200)
        for _ in range(50):  # until the session is an operator's again
            await ban.click()
            if await page.get_by_text("is banned. Every process follows").count():
                break
            await asyncio.sleep(0.1)
        await page.get_by_label("Log of rulings").get_by_text("a long story").wait_for()


async def test_an_operator_sees_who_is_connected_and_closes_a_session(house: House, chromium: Browser):
    other = new_identity()
    async with console(house, chromium, "operator") as (page, _), open_client(house.relay.ws) as client:
        await client.authenticate(other)
        await client.subscribe("s", {"authors": [other.did]})
        await take_key(page, key_file(OPERATOR))
        await page.get_by_role("button", name="Authenticate").click()
        sessions = page.get_by_role("region", name="Open sessions")
        await sessions.get_by_label("Of a DID, an address or a network").fill(other.did)
        await sessions.get_by_role("button", name="Look again").click()
        await page.get_by_text(re.compile(r"^1 shown, \d+ open in all$")).wait_for()
        (row,) = await sessions.get_by_role("listitem").all_inner_texts()
        assert "127.0.0.1" in row
        assert "1 subscription " in row
        await sessions.get_by_role("button", name="Close the session").click()
        reason = sessions.get_by_label("Reason for closing it")
        await page.wait_for_function("() => document.activeElement.matches('.undo input')")
        await page.keyboard.press("Escape")
        await reason.wait_for(state="detached")
        assert (await client.publish(make(other)))["type"] == "OK", "nothing is done by a slip"
        await sessions.get_by_role("button", name="Close the session").click()
        await reason.fill("a test of the desk")
        await sessions.get_by_role("button", name="Close the session").click()
        await says(page, "Its client may come back")
        with pytest.raises(ConnectionClosed):
            while True:
                await client.receive()
        await says(page, "No such session is open")
        await page.get_by_label("Log of rulings").get_by_text("session closed").first.wait_for()
        await sessions.get_by_label("Of a DID, an address or a network").fill("")
        await sessions.get_by_role("button", name="Look again").click()
        await says(page, "this page")


async def test_origins_that_are_listed_do_not_shut_the_console_out(house: House, chromium: Browser):
    with house.set(allowed_origins=["https://good.example"]):
        async with console(house, chromium) as (page, _):
            await says(page, "Connected")
        stranger = house.relay.http.replace("127.0.0.1", "relay.test")
        async with console(house, chromium, url=stranger) as (page, _):
            await says(page, "may not take connections from this page")


async def test_without_a_secure_context_packets_are_checked_and_no_keys_are_kept(
    house: House, chromium: Browser
):
    packet = make(new_identity(), "over plain http")
    async with open_client(house.relay.ws) as client:
        await client.publish(packet)
    url = house.relay.http.replace("127.0.0.1", "relay.test")
    async with console(house, chromium, url=url) as (page, _):
        await says(page, "This page came over plain http")
        await shows(page, [packet.packet_id])
        assert await page.evaluate("crypto.subtle === undefined")
        await page.locator(f'[data-row="{packet.packet_id}"] .badge.good').wait_for()
        await page.get_by_role("link", name="Publish").click()
        await says(page, "one made here is gone when the page is closed")
        await page.get_by_role("button", name="Make a new identity").click()
        await page.locator(".card .did").wait_for()
        await page.reload()
        await page.locator("h1").wait_for()
        assert not await page.locator(".card .did").count()


async def test_a_page_whose_script_does_not_come_says_so(house: House, chromium: Browser):
    async with watched(chromium, house.relay.http) as (page, _):
        seldom = [
            path.name for path in (FOLDER / "assets").glob("part-*.js") if "Overview" in path.read_text()
        ]
        await page.route(re.compile("|".join(seldom)), lambda route: route.abort())
        await page.goto(f"{house.relay.http}/#/overview")
        await says(page, "This page could not be fetched")
        await says(page, "Connected")  # a later change of the page would fetch it once more
        assert await page.locator("h1").inner_text() == "Overview"
        await page.unroute_all()
        await page.get_by_role("button", name="Load the console again").click()
        await says(page, "What the relay says about itself")


async def test_a_rate_limit_is_counted_down(house: House, chromium: Browser):
    async with open_client(house.relay.ws) as client:
        await client.publish(make(new_identity(), "behind the limit"))
    async with watched(chromium, house.relay.http) as (page, _):
        first = True

        def refuse(socket: Any) -> None:
            server = socket.connect_to_server()

            def to_server(text: str) -> None:
                nonlocal first
                message = json.loads(text)
                if first and message["type"] == "SUBSCRIBE":
                    first = False
                    error = {"type": "ERROR", "code": "rate_limited", "reason": "later", "retry_after": 2}
                    socket.send(json.dumps({**error, "subscription_id": message["subscription_id"]}))
                else:
                    server.send(text)

            socket.on_message(to_server)

        await page.route_web_socket(re.compile(".*"), refuse)
        await page.goto(house.relay.http)
        await says(page, "Rate limited:")
        await page.get_by_text("Rate limited:").wait_for(state="detached")
        await page.locator(".row").first.wait_for()
