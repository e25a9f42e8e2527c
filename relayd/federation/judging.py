"""The verdicts on a peer's packets: each packet goes through admission, as any publisher's does (R-349).

A verdict settles the packet, or has it judged again: later, or once its author's keys have been fetched.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections import deque
from collections.abc import Callable, Collection, Coroutine, Sequence

from strata.protocol.errors import ErrorCode, InvalidPacket
from strata.protocol.keys import IDENTITY_TYPES
from strata.relays.author_questions import Answers, AuthorQuestions
from strata.relays.connection.driver import Driver
from strata.relays.connection.inspection import author_of
from strata.relays.connection.queue import QueuedEvent

from relayd.admission.origin import PeerOrigin
from relayd.admission.request import Lane, PublishRequest
from relayd.federation.asking import Asking
from relayd.federation.claims import claims_of
from relayd.federation.intake import (
    MAX_ATTEMPTS,
    Intake,
    Item,
    KeyAnswer,
    KeyVerdict,
    PeerVerdict,
    backoff,
    is_suspicious,
    judge_key,
    judge_refusal,
    retry_delay,
)
from relayd.federation.link_parts import LinkEnded, LinkParts
from relayd.federation.peers_file import Upstream
from relayd.federation.selection import types_of
from relayd.store.payers import Unbilled
from relayd.store.skips import REPEATS, reason_of
from relayd.store.types import PeerMark

__all__ = ["Judging"]

_MOST_AUTHORS = 64
"""The most authors in one question for keys."""
_QUESTIONS_AT_ONCE = 4


class Judging:
    """The packets of one link that are under way; admission calls it as it calls a session.

    `offer` returns how far the peer was read once some packets are stored, and `stored` is called when one
    was stored. `wake` is called when the reader may go on, and `end` if the link must end.
    """

    def __init__(
        self,
        peer: Upstream,
        peer_id: int,
        parts: LinkParts,
        driver: Driver,
        *,
        offer: Callable[[Collection[Item]], PeerMark],
        stored: Callable[[], None],
        wake: Callable[[], None],
        end: Callable[[str], None],
        check: Callable[[], None],
    ) -> None:
        self._peer = peer
        self._peer_id = peer_id
        self._types, self._authors = frozenset(types_of(peer)), frozenset(peer.authors)
        self._parts = parts
        self._offer = offer
        self._stored = stored
        self._wake = wake
        self._end = end
        self._lane = Lane(self, peer.relay_id, self._mark)
        self._key_lane = Lane(self, peer.relay_id)
        self._items: dict[PublishRequest, tuple[Intake, Item]] = {}
        self._answers: dict[PublishRequest, asyncio.Future[KeyVerdict]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._resuming: dict[Intake, deque[asyncio.Future[None]]] = {}
        """Packets whose wait is over, and which wait for a place among those under way."""
        self._half_full = asyncio.Event()
        """Set, and replaced, when packets may wait for their time no longer."""
        self._is_closed = False
        self.payer = Unbilled()
        """The peer takes turns at the database with everybody, and pays nothing: the operator chose it."""
        self.asking = Asking(driver, submit=self.submit, has_room=self.has_room, check=check)
        # Packets share questions: a stranger can publish many at a peer, in many authors' names, that fit no
        # key any more (decision 136). With a question each, they would hold up the peer's other packets, and
        # use up what this relay may ask and read there.
        self._questions = AuthorQuestions(
            self._ask_for_keys,
            most=_MOST_AUTHORS,
            at_once=_QUESTIONS_AT_ONCE,
            name=f"peer-keys {peer.relay_id}",
        )

    def submit(self, intake: Intake, item: Item) -> None:
        """Have a packet judged."""
        item.attempts += 1
        intake.resume(item)
        request = self._request(item.raw, item.received_at, self._lane, self._types)
        self._items[request] = (intake, item)
        self._parts.admission.submit(request)

    def has_room(self, intake: Intake) -> bool:
        """Whether this window may take one more packet; `wake` is called when that may have changed."""
        if intake.is_half_full:
            self._half_full.set()
            self._half_full = asyncio.Event()
        if self._parts.admission.is_full():
            self._parts.admission.hold(self)
            return False
        return intake.has_room and intake not in self._resuming

    def close(self) -> None:
        """Stop judging. Packets under way come again, to the next link. Idempotent."""
        self._is_closed = True
        self._questions.cancel()
        for task in list(self._tasks):
            task.cancel()

    def release(self) -> None:
        """Stop being notified by admission."""
        self._parts.admission.release(self)

    def _request(self, raw: bytes, received_at: int, lane: Lane, types: frozenset[str]) -> PublishRequest:
        origin = PeerOrigin(
            self._peer_id,
            received_at,
            self._peer.trust_received_at,
            self._parts.max_backfill_seconds,
            types,
            self._authors,
        )
        return PublishRequest(raw, None, lane, time.monotonic(), origin)

    def _mark(self, requests: Sequence[PublishRequest]) -> PeerMark | None:
        """How far the peer was read once these requests are stored; called by the writer."""
        if self._is_closed:
            return None
        found = (self._items.get(request) for request in requests)
        return self._offer({each[1] for each in found if each is not None})

    # Publisher: called by admission.

    def publish_accepted(
        self,
        request: PublishRequest,
        received_at: int,
        *,
        duplicate: bool,
        duplicate_of: bytes | None = None,
        queued: bool = False,
    ) -> None:
        """The packet is in the log."""
        if self._is_answered(request, KeyVerdict.JUDGED):
            return
        origin = request.origin
        if origin is not None and origin.is_trusted and request.is_parsed and request.witness is None:
            self._parts.told.refused_witness()
        if duplicate_of is not None:  # its id stays unknown here: it must not be requested again and again
            self._parts.told.skipped(request.packet.digest, request.packet.timestamp, REPEATS)
        self._settle(request, PeerVerdict.KNOWN if duplicate else PeerVerdict.STORED)

    def publish_refused(self, request: PublishRequest, error: InvalidPacket) -> None:
        """The packet is not in the log: pass it over, try it again, or count an offence."""
        if self._is_answered(request, judge_key(error)):
            return
        intake, item = self._items[request]
        verdict = judge_refusal(item, error)
        packet = request.packet if request.is_parsed else None
        match verdict:
            case PeerVerdict.LATER:
                del self._items[request]
                delay = retry_delay(item, packet, error, self._parts.clock())
                if error.code is ErrorCode.TIMESTAMP_IN_FUTURE:
                    self._wait(intake, item)
                    self._spawn(self._in_time(intake, item, delay, self._half_full))
                else:
                    self._spawn(self._later(intake, item, delay))
                self._parts.told.verdicts(verdict)
            case PeerVerdict.KEYS if packet is not None:
                del self._items[request]
                self._wait(intake, item)
                self._spawn(self._with_keys(intake, item, packet.author_id))
                self._parts.told.verdicts(verdict)
            case _:
                if verdict is PeerVerdict.FORGED:
                    self._parts.told.forged(reason_of(error))
                elif is_suspicious(error):
                    self._parts.told.malformed()
                # A packet larger than this relay accepts is known only by its own claims.
                claims = claims_of(request.raw) if packet is None else (packet.digest, packet.timestamp)
                if verdict is not PeerVerdict.FORGED and claims is not None:
                    self._parts.told.skipped(*claims, reason_of(error))
                self._settle(request, verdict)

    def publish_unanswerable(self) -> None:
        """A verdict could not be delivered: begin anew at the last stored place."""
        self._end("a verdict on a packet was lost")

    def checked_for(self, seconds: float) -> None:
        """Charge nothing: the operator chose the peer, and the window bounds its packets under way."""

    def turn(self, now: float) -> float:
        """The place of the peer's packets, which is that of their arrival: the operator chose the peer."""
        return now

    def room_again(self) -> None:
        """There is room for publishes again."""
        self._wake()
        self.asking.wake()

    def _is_answered(self, request: PublishRequest, verdict: KeyVerdict) -> bool:
        """Whether the request is for a packet with keys; its fetcher then goes on, if it still waits."""
        answer = self._answers.pop(request, None)
        if answer is not None and not answer.done():
            answer.set_result(verdict)
        return answer is not None

    def _settle(self, request: PublishRequest, verdict: PeerVerdict) -> None:
        intake, item = self._items.pop(request)
        intake.settle(item, self._parts.clock())
        self.asking.settled(intake)
        if verdict is PeerVerdict.STORED:
            self._stored()
        self._parts.told.verdicts(verdict)
        self._freed(intake)

    def _wait(self, intake: Intake, item: Item) -> None:
        """A packet waits for its time or for keys, and others may be under way meanwhile."""
        intake.wait(item)
        self._freed(intake)

    def _freed(self, intake: Intake) -> None:
        """There is one place more among those under way: for one that has waited, or else for reading."""
        resuming = self._resuming.get(intake)
        while resuming:
            place = resuming.popleft()
            if not resuming:
                del self._resuming[intake]
            if not place.done():
                place.set_result(None)
                return
        self._wake()

    async def _resume(self, intake: Intake, item: Item) -> None:
        """Judge a packet again, once there is a place for it."""
        while item.is_waiting and not intake.may_resume:
            place: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._resuming.setdefault(intake, deque()).append(place)
            await place
        self.submit(intake, item)

    async def _later(self, intake: Intake, item: Item, delay: float) -> None:
        await asyncio.sleep(delay)
        await self._resume(intake, item)

    async def _in_time(self, intake: Intake, item: Item, delay: float, half_full: asyncio.Event) -> None:
        """Judge a packet again when it is due, or, for the last time, when it may wait no longer."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(delay):
                await half_full.wait()
                item.attempts = MAX_ATTEMPTS
        await self._resume(intake, item)

    async def _with_keys(self, intake: Intake, item: Item, author: str) -> None:
        """Fetch an author's identity packets and judge the packet once more: a peer may send out of order."""
        item.asked_for_keys = True
        try:
            answer = await self._questions.answer(author, since=math.inf)  # put no earlier than now
        except LinkEnded:
            return  # the packet comes again, to the next link
        if not answer.is_whole or answer.verdicts & {KeyVerdict.LATER, KeyVerdict.AWAY}:
            # It is not known yet whose the packet is, so it is not passed over: the keys are requested again.
            is_its_own = answer.is_whole or answer.is_alone  # not another author's, asked for in one question
            if is_its_own and KeyVerdict.AWAY not in answer.verdicts:
                item.key_attempts += 1
            item.asked_for_keys = item.key_attempts >= MAX_ATTEMPTS
            await asyncio.sleep(backoff(item.attempts))
        await self._resume(intake, item)

    async def _ask_for_keys(self, authors: tuple[str, ...]) -> Answers[KeyAnswer]:
        verdicts = dict.fromkeys(authors, frozenset[KeyVerdict]())

        async def take(event: QueuedEvent) -> None:
            author = author_of(event)
            if author not in authors:
                return  # nobody asked for it, and a peer may send any number of authors
            verdict = await self._take_key(event)
            verdicts[author] |= {verdict}

        is_whole, is_alone = await self.asking.keys_of(authors, take), len(authors) == 1
        return is_whole, {author: KeyAnswer(is_whole, is_alone, verdicts[author]) for author in authors}

    async def _take_key(self, event: QueuedEvent) -> KeyVerdict:
        request = self._request(bytes(event.packet), event.received_at, self._key_lane, IDENTITY_TYPES)
        answer: asyncio.Future[KeyVerdict] = asyncio.get_running_loop().create_future()
        self._answers[request] = answer
        self._parts.admission.submit(request)
        return await answer

    def _spawn(self, work: Coroutine[object, object, None]) -> None:
        if self._is_closed:  # what was under way comes again, to the next link
            work.close()
            return
        task = asyncio.create_task(work, name=f"peer-packet {self._peer.relay_id}")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
