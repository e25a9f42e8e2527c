"""The way of a PUBLISH from its frame to the writer, and its answer.

Packets of one session enter the log in the order they were sent (R-133), although signatures are checked
in batches on several threads and large packets are parsed there too: each session has a `Lane`, and a
packet leaves its lane only when all before it have a verdict. Refusals do not hold anybody up.

A duplicate is answered OK before any later check can refuse it (check 8 before 9 to 13). Looking every
packet up in the database first would double its work, so the question is asked where the answer matters:
what passes all checks meets the duplicate index inside the append itself; what would be refused by a
later check is looked up before the refusal is sent. A memory of recent ids answers most repeats at once.
"""

from __future__ import annotations

import asyncio
import enum
from collections import OrderedDict, deque
from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol

import structlog
from strata.errors import ErrorCode, InvalidPacket
from strata.packets import Packet, verify_signature

from relayd.admission.checks import Policy, judge
from relayd.admission.equivalence import equivalence_key
from relayd.admission.verify import VerifyPool
from relayd.store.types import NewPacket, StoreError, StoreUnavailable

__all__ = ["Admission", "Lane", "PublishRequest", "Publisher"]

_log = structlog.get_logger("relayd.admission")

_LARGE_BYTES = 16_384
"""Above this a packet is parsed off the loop: its canonical form may take milliseconds."""
_RECENT_IDS = 65_536


_QUEUE_FULL = InvalidPacket(
    ErrorCode.INTERNAL_ERROR, "too many packets wait to be stored; publish it again", detail="queue_full"
)
_FORGOTTEN = InvalidPacket(ErrorCode.INTERNAL_ERROR, "the packet's first copy is gone; publish it again")
"""For a repeat whose first copy left the duplicate index between two looks at it."""


class Publisher(Protocol):
    """Who published: one connection."""

    def publish_accepted(
        self, request: PublishRequest, received_at: int, *, duplicate: bool, duplicate_of: bytes | None = None
    ) -> None:
        """The packet, or for `duplicate_of` the one it repeats, is durably stored; answer OK."""

    def publish_refused(self, request: PublishRequest, error: InvalidPacket) -> None:
        """The packet is not stored; answer ERROR."""


class _Verdict(enum.Enum):
    PENDING = enum.auto()
    PASSED = enum.auto()
    REFUSED = enum.auto()


class PublishRequest:
    """One PUBLISH on its way. `started_at` is monotonic, for the latency histogram and the deadline."""

    __slots__ = ("client_msg_id", "key", "lane", "packet", "raw", "refusal", "started_at", "verdict")

    def __init__(self, raw: bytes, client_msg_id: str | None, lane: Lane, started_at: float) -> None:
        self.raw = raw
        self.client_msg_id = client_msg_id
        self.lane = lane
        self.started_at = started_at
        self.packet: Packet | None = None
        self.key = b""
        self.refusal: InvalidPacket | None = None
        self.verdict = _Verdict.PENDING


class Lane:
    """The publishes of one session that have no verdict yet, or wait for one before them."""

    __slots__ = ("publisher", "requests")

    def __init__(self, publisher: Publisher) -> None:
        self.publisher = publisher
        self.requests: deque[PublishRequest] = deque()


class Admission:
    """Takes publishes from all sessions of a process; passes what is valid to the writer.

    `enqueue(packet, request)` hands over to the writer; `find(ids)` asks the duplicate index. The policy
    may be replaced while running.
    """

    def __init__(
        self,
        *,
        enqueue: Callable[[NewPacket, PublishRequest], None],
        find: Callable[[Sequence[bytes]], Awaitable[dict[bytes, tuple[int, int]]]],
        policy: Policy,
        clock: Callable[[], int],
        max_packet_bytes: int,
        max_json_depth: int,
        verify_threads: int,
        on_verified: Callable[[float], None],
        on_flush: Callable[[], None],
    ) -> None:
        self.policy = policy
        self.pending = 0
        self.pending_bytes = 0
        self._enqueue = enqueue
        self._find = find
        self._clock = clock
        self._max_packet_bytes = max_packet_bytes
        self._max_json_depth = max_json_depth
        self._on_verified = on_verified
        self._on_flush = on_flush
        self._recent: OrderedDict[bytes, int] = OrderedDict()
        self._doubtful: list[PublishRequest] = []
        self._doubts: asyncio.Task[None] | None = None
        self._pool: VerifyPool[PublishRequest] = VerifyPool(
            self._check, self._checked, threads=verify_threads, loop=asyncio.get_running_loop()
        )

    def submit(self, request: PublishRequest) -> None:
        """Take a PUBLISH; its publisher gets exactly one answer (R-192)."""
        self.pending += 1
        self.pending_bytes += len(request.raw)
        request.lane.requests.append(request)
        if len(request.raw) > _LARGE_BYTES:
            self._pool.put(request)
            return
        self._examine(request)
        if request.packet is not None and request.packet.digest in self._recent:
            request.verdict = _Verdict.REFUSED  # needs no signature: `_settle` knows it for a duplicate
        if request.verdict is _Verdict.PENDING:
            self._pool.put(request)
        elif request.lane.requests[0] is request:
            self._advance(request.lane)

    def committed(
        self, request: PublishRequest, received_at: int, *, duplicate: bool, duplicate_of: bytes | None = None
    ) -> None:
        """The writer has the packet in the log, or for `duplicate_of` the one it repeats."""
        assert request.packet is not None
        if duplicate_of is None:
            self._remember(request.packet.digest, received_at)
        self._finished(request)
        request.lane.publisher.publish_accepted(
            request, received_at, duplicate=duplicate, duplicate_of=duplicate_of
        )

    def failed(self, request: PublishRequest, error: InvalidPacket) -> None:
        """The writer could not store the packet, or does not know whether it did."""
        self._finished(request)
        request.lane.publisher.publish_refused(request, error)

    async def close(self) -> None:
        """Stop the threads and the look-ups; requests still inside get no answer."""
        await asyncio.get_running_loop().run_in_executor(None, self._pool.close)
        if self._doubts is not None:
            self._doubts.cancel()
            await asyncio.gather(self._doubts, return_exceptions=True)

    def _examine(self, request: PublishRequest) -> None:
        """Checks 5 to 11 short of the signature. Runs on the loop, or on a thread for a large packet."""
        try:
            request.packet = Packet.parse(
                request.raw, max_bytes=self._max_packet_bytes, max_depth=self._max_json_depth
            )
            request.key = judge(request.packet, self.policy, self._clock())
        except InvalidPacket as error:
            self._refuse(request, error)

    def _check(self, request: PublishRequest) -> None:
        """On a verify thread: the signature, and for a large packet all before it. Never raises."""
        try:
            if request.packet is None:
                self._examine(request)
            if request.verdict is _Verdict.PENDING and request.packet is not None:
                if verify_signature(request.packet, request.key):
                    request.verdict = _Verdict.PASSED
                else:
                    raise InvalidPacket(ErrorCode.INVALID_SIGNATURE, "the signature does not verify")
        except InvalidPacket as error:
            self._refuse(request, error)
        except Exception:
            _log.exception("check_failed")
            self._refuse(request, InvalidPacket(ErrorCode.INTERNAL_ERROR, "the packet could not be checked"))

    def _refuse(self, request: PublishRequest, error: InvalidPacket) -> None:
        request.refusal = error
        request.verdict = _Verdict.REFUSED

    def _checked(self, requests: Sequence[PublishRequest], seconds: float) -> None:
        self._on_verified(seconds)
        for request in requests:
            lane = request.lane
            # An earlier one of the same batch may have taken this one along, and left the lane empty.
            if lane.requests and lane.requests[0] is request:
                self._advance(lane)
        self._on_flush()

    def _advance(self, lane: Lane) -> None:
        """Let everything leave whose turn it is."""
        requests = lane.requests
        while requests and requests[0].verdict is not _Verdict.PENDING:
            request = requests.popleft()
            if request.verdict is _Verdict.PASSED:
                assert request.packet is not None
                try:
                    self._enqueue(_new_packet(request.packet), request)
                except StoreUnavailable:
                    self.failed(request, _QUEUE_FULL)
            else:
                self._settle(request)

    def _settle(self, request: PublishRequest) -> None:
        """Answer what will not be stored: OK if the log has it already (check 8), else the refusal."""
        packet = request.packet
        if packet is None:  # refused by checks 5 to 7: it has no id that could be known
            assert request.refusal is not None
            self.failed(request, request.refusal)
        elif (received_at := self._recent.get(packet.digest)) is not None:
            self._finished(request)
            request.lane.publisher.publish_accepted(request, received_at, duplicate=True)
        else:
            self._doubtful.append(request)
            if self._doubts is None or self._doubts.done():
                self._doubts = asyncio.create_task(self._look_up(), name="duplicate-look-up")

    async def _look_up(self) -> None:
        while self._doubtful:
            requests, self._doubtful = self._doubtful, []
            ids = {request.packet.digest for request in requests if request.packet is not None}
            try:
                known = await self._find(list(ids))
            except StoreError:
                # The refusal stands whatever the index would say; saying so needs no database.
                known = {}
            for request in requests:
                assert request.packet is not None
                found = known.get(request.packet.digest)
                if found is not None:
                    self.committed(request, found[1], duplicate=True)
                else:
                    self.failed(request, request.refusal or _FORGOTTEN)
            self._on_flush()

    def _remember(self, digest: bytes, received_at: int) -> None:
        recent = self._recent
        recent[digest] = received_at
        if len(recent) > _RECENT_IDS:
            recent.popitem(last=False)

    def _finished(self, request: PublishRequest) -> None:
        self.pending -= 1
        self.pending_bytes -= len(request.raw)


def _new_packet(packet: Packet) -> NewPacket:
    return NewPacket(
        packet_id=packet.digest,
        author_id=packet.author_id,
        content_type=packet.content_type,
        timestamp=packet.timestamp,
        expires_at=packet.expires_at,
        body=packet.canonical,
        equivalence_key=equivalence_key(packet),
    )
