"""What becomes of a peer's packets, with an admission whose answers the test decides."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest
from msgspec import Raw
from strata.protocol.errors import ErrorCode, InvalidPacket
from strata.protocol.keys import IDENTITY_TYPES
from strata.protocol.packets import build
from strata.relays.connection.queue import QueuedEvent

from relayd.admission.refusals import UNAVAILABLE
from relayd.admission.request import PublishRequest
from relayd.federation import judging as module
from relayd.federation.intake import MAX_ATTEMPTS, Intake
from relayd.federation.judging import Judging
from relayd.federation.peers_file import Upstream
from tests.support.made_packets import make, new_identity
from tests.support.virtual_time import virtually

NOW = 1_790_000_000
AUTHOR = new_identity()
PACKET = make(AUTHOR)
KEY = QueuedEvent(Raw(b'{"author_id": "%s"}' % PACKET.author_id.encode()), NOW, None, None)


class MadeLink:
    """A link whose admission accepts every packet and never answers by itself."""

    def __init__(self) -> None:
        self.submitted: list[PublishRequest] = []
        self.ended: list[str] = []
        self.told: list[str] = []
        self.skipped: list[tuple[bytes, int, str]] = []
        admission = SimpleNamespace(submit=self.submitted.append, is_full=lambda: False)
        told = SimpleNamespace(
            verdicts=lambda verdict: self.told.append(verdict.value),
            forged=lambda reason: None,
            malformed=lambda: self.told.append("malformed"),
            refused_witness=lambda: None,
            skipped=lambda *skip: self.skipped.append(skip),
        )
        parts = SimpleNamespace(
            admission=admission, max_backfill_seconds=604_800, clock=lambda: NOW, told=told
        )
        self.judging = Judging(
            Upstream("wss://a", "did:strata:zA"),
            1,
            cast(Any, parts),
            cast(Any, None),
            offer=cast(Any, None),
            stored=lambda: None,
            wake=lambda: None,
            end=self.ended.append,
            check=lambda: None,
        )


@pytest.mark.parametrize("is_refused", [False, True])
async def test_a_verdict_on_keys_may_come_when_nobody_waits_for_them_any_more(is_refused):
    link = MadeLink()
    event = QueuedEvent(Raw(b"{}"), NOW, None, None)
    waiting = asyncio.create_task(link.judging._take_key(event))
    await asyncio.sleep(0)
    [request] = link.submitted
    waiting.cancel()  # it took too long, or the link has ended
    await asyncio.wait([waiting])
    if is_refused:
        link.judging.publish_refused(request, InvalidPacket(ErrorCode.INVALID_SCHEMA, "no"))
    else:
        link.judging.publish_accepted(request, NOW, duplicate=False)
    assert not link.ended


async def test_whoever_fetches_keys_goes_on_when_they_are_judged():
    link = MadeLink()
    event = QueuedEvent(Raw(b"{}"), NOW, None, None)
    waiting = asyncio.create_task(link.judging._take_key(event))
    await asyncio.sleep(0)
    link.judging.publish_accepted(link.submitted[0], NOW, duplicate=True)
    async with asyncio.timeout(10):
        await waiting


async def test_a_packet_that_repeats_another_one_is_remembered_like_a_refused_one():
    link = MadeLink()
    intake = Intake(None)
    link.judging.submit(intake, intake.add(PACKET.canonical, NOW, "c"))
    request = await next_request(link, 0)
    link.judging.publish_accepted(request, NOW, duplicate=True, duplicate_of=bytes(32))
    assert link.skipped == [(PACKET.digest, PACKET.timestamp, "duplicate_of")]
    assert (link.told, intake.cursor) == (["known"], "c")


class Keys:
    """A peer's answer to a request for keys: one identity packet, complete or not."""

    def __init__(self, is_whole: bool = True) -> None:
        self.is_whole = is_whole
        self.asked = 0

    async def keys_of(self, authors: tuple[str, ...], take: Callable[[QueuedEvent], Awaitable[None]]) -> bool:
        self.asked += 1
        await take(KEY)
        return self.is_whole

    def settled(self, intake: Intake) -> None:
        pass


async def next_request(link: MadeLink, number: int) -> PublishRequest:
    """The request of this number, parsed."""
    async with asyncio.timeout(10):
        while len(link.submitted) <= number:  # noqa: ASYNC110 - tasks of the link
            await asyncio.sleep(0)
    request = link.submitted[number]
    if request.raw == PACKET.canonical:
        request.parsed(PACKET)
    return request


NOT_THE_AUTHORS = InvalidPacket(ErrorCode.INVALID_SIGNATURE, "no")


def begun(keys: Keys) -> MadeLink:
    """A link whose peer has sent a packet that no known key has signed."""
    link = MadeLink()
    link.judging.asking = cast(Any, keys)
    intake = Intake(None)
    link.judging.submit(intake, intake.add(PACKET.canonical, NOW, "c"))
    return link


@pytest.mark.req("R-381")
@pytest.mark.parametrize(
    "said",
    [
        "ACCEPTED",
        "QUEUED",
        InvalidPacket(ErrorCode.KEY_REVOKED, "no"),
        InvalidPacket(ErrorCode.POLICY_REJECTED, "no", detail="too_many_key_events"),
    ],
)
async def test_a_signature_that_fits_no_key_lowers_the_score_of_a_peer_and_proves_nothing(said):
    """The key may have expired since, at the peer too; then a stranger could have an honest peer barred."""
    link = begun(Keys())
    packet = await judged_by_keys(link, said)
    link.judging.publish_refused(packet, NOT_THE_AUTHORS)
    assert link.told == ["keys", "malformed", "skipped"]
    assert not link.judging._items


async def judged_by_keys(link: MadeLink, said: InvalidPacket | str, number: int = 0) -> PublishRequest:
    """Refuse the packet, answer for the keys, and return the packet that comes again."""
    link.judging.publish_refused(await next_request(link, number), NOT_THE_AUTHORS)
    keys = await next_request(link, number + 1)
    assert keys.raw == bytes(KEY.packet)
    if isinstance(said, InvalidPacket):
        link.judging.publish_refused(keys, said)
    else:
        link.judging.publish_accepted(keys, NOW, duplicate=False, queued=said == "QUEUED")
    return await next_request(link, number + 2)


async def test_packets_of_one_author_that_came_together_do_not_each_ask_for_its_keys():
    link, keys = begun(Keys()), Keys()
    link.judging.asking = cast(Any, keys)
    intake = Intake(None)
    for _ in range(9):
        link.judging.submit(intake, intake.add(PACKET.canonical, NOW, "c"))
    for number in range(10):
        link.judging.publish_refused(await next_request(link, number), NOT_THE_AUTHORS)
    number = 10
    while link.told.count("skipped") < 10:
        request = await next_request(link, number)
        number += 1
        if request.is_parsed:
            link.judging.publish_refused(request, NOT_THE_AUTHORS)
        else:
            link.judging.publish_accepted(request, NOW, duplicate=True)
    assert keys.asked == 1


AWAY = InvalidPacket(ErrorCode.INTERNAL_ERROR, "later", detail="store_unavailable")
FAILED = InvalidPacket(ErrorCode.INTERNAL_ERROR, "a fault of ours")


@pytest.mark.req("R-364")
@pytest.mark.parametrize(
    ("said", "is_whole", "tries"),
    [
        (AWAY, True, 2 * MAX_ATTEMPTS),  # however long that takes
        (FAILED, True, MAX_ATTEMPTS - 1),
        ("ACCEPTED", False, MAX_ATTEMPTS - 1),  # a slow peer may not have reached the wanted one
    ],
)
async def test_a_packet_is_not_passed_over_because_its_keys_could_not_be_had(
    monkeypatch, said, is_whole, tries
):
    monkeypatch.setattr(module, "backoff", lambda attempts: 0)
    keys = Keys(is_whole)
    link = begun(keys)
    for n in range(tries):
        await judged_by_keys(link, said, 2 * n)
    assert keys.asked == tries and link.told == ["keys"] * tries
    keys.is_whole = True
    packet = await judged_by_keys(link, "ACCEPTED", 2 * tries)
    link.judging.publish_accepted(packet, NOW, duplicate=False)
    assert link.told[-1] == "stored"


@pytest.mark.req("R-364")
async def test_a_peer_that_never_tells_all_keys_does_not_hold_up_what_follows_for_ever(monkeypatch):
    monkeypatch.setattr(module, "backoff", lambda attempts: 0)
    link = begun(Keys(is_whole=False))
    for n in range(MAX_ATTEMPTS):
        packet = await judged_by_keys(link, "ACCEPTED", 2 * n)
    link.judging.publish_refused(packet, NOT_THE_AUTHORS)
    assert link.told[-1] == "skipped" and not link.judging._items


TOO_LARGE = InvalidPacket(ErrorCode.PACKET_TOO_LARGE, "no", max_bytes=1024)


@pytest.mark.req("R-379")
@pytest.mark.parametrize(
    ("raw", "skipped"),
    [
        (PACKET.canonical, [(PACKET.digest, PACKET.timestamp, "packet_too_large")]),
        (b'{"packet_id": 7}', []),
        (b'{"packet_id": "0x' + b"0" * 64 + b'", "timestamp": 1e99}', []),
    ],
)
def test_what_is_refused_before_it_is_read_is_remembered_by_its_own_word(raw, skipped):
    """Otherwise each comparison would fetch it again: the peer accepts larger packets than this relay."""
    link = MadeLink()
    intake = Intake(None)
    link.judging.submit(intake, intake.add(raw, NOW, "c"))
    link.judging.publish_refused(link.submitted[0], TOO_LARGE)
    assert link.skipped == skipped and link.told == ["skipped"]


async def test_keys_of_authors_that_nobody_asked_for_are_not_judged():
    """A peer may answer with any number of them."""
    link, taken = MadeLink(), 0

    class Strangers(Keys):
        async def keys_of(
            self, authors: tuple[str, ...], take: Callable[[QueuedEvent], Awaitable[None]]
        ) -> bool:
            nonlocal taken
            for number in range(1000):
                body = b'{"author_id":"did:strata:stranger%d"}' % number
                await take(QueuedEvent(Raw(body), NOW, None, None))
                taken += 1
            return True

    link.judging.asking = cast(Any, Strangers())
    intake = Intake(None)
    link.judging.submit(intake, intake.add(PACKET.canonical, NOW, "c"))
    link.judging.publish_refused(await next_request(link, 0), NOT_THE_AUTHORS)
    assert (await next_request(link, 1)).raw == PACKET.canonical
    assert taken == 1000 and len(link.submitted) == 2


async def test_an_answer_about_keys_brings_nothing_but_keys():
    link = begun(Keys())
    link.judging.publish_refused(await next_request(link, 0), NOT_THE_AUTHORS)
    packet, keys = link.submitted[0], await next_request(link, 1)
    assert packet.origin is not None and keys.origin is not None
    assert (packet.origin.types, keys.origin.types) == (frozenset(), IDENTITY_TYPES)


FUTURE = InvalidPacket(ErrorCode.TIMESTAMP_IN_FUTURE, "not yet")


@virtually
async def test_packets_from_the_future_hold_up_nothing_behind_them_and_are_not_judged_all_at_once():
    """Where clocks differ, a stranger could slow down the reading: 256 waited, and nothing was read."""
    link, intake = MadeLink(), Intake(None)
    judging = link.judging
    for n in range(3000):
        assert judging.has_room(intake), n
        judging.submit(intake, intake.add(b"%d" % n, NOW, str(n)))
        judging.publish_refused(link.submitted.pop(), FUTURE)
    assert judging.has_room(intake)
    await asyncio.sleep(60)
    assert len(link.submitted) == 256 and not judging.has_room(intake), "those that wait come first"
    judged = 0
    while link.submitted:
        assert len(link.submitted) <= 256
        judging.publish_accepted(link.submitted.pop(0), NOW, duplicate=False)
        judged += 1
        await asyncio.sleep(0)
    assert (judged, len(intake), judging.has_room(intake)) == (3000, 0, True)
    assert not judging._resuming
    judging.close()


@virtually
async def test_a_packet_dated_far_ahead_holds_up_reading_for_half_a_window():
    """It is passed over then, and a comparison fetches it when it is due; others that wait are too."""
    link, intake = MadeLink(), Intake("0")
    judging = link.judging
    early = build(AUTHOR, {"type": "POST"}, timestamp=NOW + 3480)
    for n in range(9500):
        async with asyncio.timeout(600):
            while not judging.has_room(intake):
                await asyncio.sleep(1)
                while link.submitted:  # judged once more, and still too early
                    judging.publish_refused(link.submitted.pop(), FUTURE)
        judging.submit(intake, intake.add(early.canonical if n == 0 else b"%d" % n, NOW, str(n + 1)))
        request = link.submitted.pop()
        if n == 0:
            request.parsed(early)
            judging.publish_refused(request, FUTURE)
        else:
            judging.publish_accepted(request, NOW, duplicate=False)
        await asyncio.sleep(0)
        for request in link.submitted:
            request.parsed(early)
            judging.publish_refused(request, FUTURE)
        link.submitted.clear()
    assert (intake.cursor, len(intake)) == ("9500", 0)
    assert link.skipped == [(early.digest, early.timestamp, "timestamp_in_future")]
    assert not judging._tasks, "and nothing sleeps for it"


@virtually
async def test_packets_from_the_future_alone_are_passed_over_half_a_window_at_a_time():
    """A stranger can publish any number of them where the upstream's clock is ahead."""
    link, intake = MadeLink(), Intake("0")
    judging, attempts = link.judging, 0
    for n in range(12_000):
        async with asyncio.timeout(60):
            while not judging.has_room(intake):
                await asyncio.sleep(0)
                while link.submitted:
                    attempts += 1
                    judging.publish_refused(link.submitted.pop(), FUTURE)
        judging.submit(intake, intake.add(b"%d" % n, NOW, str(n + 1)))
        attempts += 1
        judging.publish_refused(link.submitted.pop(), FUTURE)
    assert attempts <= 2 * 12_000, "each is judged twice"
    assert len(intake) <= 8192 // 2 + 256 and int(intake.cursor or "") >= 12_000 - len(intake)
    judging.close()
    await asyncio.sleep(0)


@virtually
async def test_packets_that_this_relay_fails_on_keep_their_places():
    """If the database is away, it is the peer's store that keeps what comes."""
    link, intake = MadeLink(), Intake(None)
    for n in range(256):
        link.judging.submit(intake, intake.add(b"%d" % n, NOW, str(n)))
        link.judging.publish_refused(link.submitted.pop(), UNAVAILABLE)
    assert not link.judging.has_room(intake)
    link.judging.close()
    await asyncio.sleep(0)
