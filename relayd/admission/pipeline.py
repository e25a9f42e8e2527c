"""The way of a PUBLISH from its frame to the writer, and its answer.

    loop      parse, policy, freshness ─ is it a repeat? ─ are all keys it needs in memory?
    threads   signature, rules of its type, provenance
    loop      budgets and plug-ins, which may wait ─ its turn in the lane ─ the writer

Packets of one session enter the log in the order they were sent (R-133), although signatures are checked
in batches on several threads and large packets are parsed there too: each session has a `Lane`, and a
packet leaves its lane only when all before it have a verdict. Refusals hold no other packet up.

A verdict counts for the keys by which it was reached. A packet leaves its lane only while those are still the
author's keys; if not, it is judged again. An identity packet bars the way for its author's next packets until
the feed has applied it: a REVOKE and a PUBLISH sent in one breath are judged one after the other (R-074).
The writer notices what another process appends meanwhile, and asks `still_admitted`.

A duplicate is answered OK before any later check can refuse it (check 8 before 9 to 13). Looking every
packet up in the database first would double its work, so the question is asked where the answer matters:
a packet that passes all checks meets the duplicate index inside the append itself; a packet that a later
check refuses is looked up before the refusal is sent. A memory of recent ids answers most repeats at once.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

import structlog
from strata.protocol import canonical
from strata.protocol.errors import ErrorCode, InvalidPacket
from strata.protocol.keys import IDENTITY_TYPES
from strata.protocol.packets import Packet
from strata.protocol.provenance import ProvenanceTrust

from relayd.admission.budgets import BUDGETED_TYPES, TrustBudgets
from relayd.admission.checks import judge, require_chain_room, require_room, to_store, trace, weigh
from relayd.admission.knowledge import Known, known_of, missing_for
from relayd.admission.request import Lane, Publisher, PublishRequest, PublishVerdict
from relayd.admission.verify import VerifyPool
from relayd.identity.directory import Identities
from relayd.policy import Plugins, Policy
from relayd.store.types import NewPacket, StoreError, StoreUnavailable

__all__ = ["Admission", "AdmissionLimits", "Lane", "PublishRequest", "Publisher"]

_log = structlog.get_logger("relayd.admission")

_LARGE_BYTES, _MANY_VALUES = 16_384, 512
"""Above either a packet is parsed off the loop: its canonical form may take milliseconds."""
_SMALL_BYTES = 2048
"""Up to here it takes less than counting is worth."""
_RECENT_IDS = 65_536


def _is_dear(raw: bytes) -> bool:
    size = len(raw)
    return size > _LARGE_BYTES or (size > _SMALL_BYTES and canonical.most_values(raw) > _MANY_VALUES)


def _passing(reason: str, detail: str) -> InvalidPacket:
    return InvalidPacket(ErrorCode.INTERNAL_ERROR, f"{reason}; publish it again", detail=detail)


_QUEUE_FULL = _passing("too many packets wait to be stored", "queue_full")
_UNAVAILABLE = _passing("the packet could not be checked in time", "store_unavailable")
_KEYS_CHANGED = _passing("the author's keys changed meanwhile", "keys_changed")
_UNCHECKED = InvalidPacket(ErrorCode.INTERNAL_ERROR, "the packet could not be checked")
_FORGOTTEN = InvalidPacket(ErrorCode.INTERNAL_ERROR, "the packet's first copy is gone; publish it again")
"""For a repeat whose first copy left the duplicate index between two looks at it."""


@dataclass(frozen=True, slots=True)
class AdmissionLimits:
    """The names are those of the settings."""

    max_packet_bytes: int
    max_json_depth: int
    max_packet_age_seconds: int
    max_json_values: int = 32_768
    max_identity_bytes: int = 16_384
    publish_queue_bytes: int = 64 * 2**20


class Admission:
    """Takes publishes from all sessions of a process; passes valid packets to the writer.

    `enqueue(packet, request)` hands over to the writer; `find(ids)` asks the duplicate index. `policy` and
    `trust` may be replaced while running.
    """

    def __init__(
        self,
        *,
        enqueue: Callable[[NewPacket, PublishRequest], None],
        find: Callable[[Sequence[bytes]], Awaitable[dict[bytes, tuple[int, int]]]],
        identities: Identities,
        budgets: TrustBudgets,
        policy: Policy,
        plugins: Plugins,
        trust: ProvenanceTrust,
        limits: AdmissionLimits,
        clock: Callable[[], int],
        verify_threads: int,
        on_verified: Callable[[float], None],
        on_flush: Callable[[], None],
    ) -> None:
        self.policy = policy
        self.trust = trust
        self.pending = 0
        self.pending_bytes = 0
        self._enqueue = enqueue
        self._find = find
        self._identities = identities
        self._budgets = budgets
        self._plugins = plugins
        self._limits = limits
        self._clock = clock
        self._on_verified = on_verified
        self._on_flush = on_flush
        self._plain = Known(identities.generation)
        self._recent: OrderedDict[bytes, int] = OrderedDict()
        self._held: set[Publisher] = set()
        self._doubtful: list[PublishRequest] = []
        self._unknown: list[PublishRequest] = []
        # Authors with an identity packet on its way to the log, and the lanes that wait for it.
        self._changing: dict[str, PublishRequest] = {}
        self._barred: dict[str, dict[Lane, None]] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._finishing: set[asyncio.Task[None]] = set()
        self._pool: VerifyPool[PublishRequest] = VerifyPool(
            self._check,
            self._checked,
            threads=verify_threads,
            loop=asyncio.get_running_loop(),
            is_quick=lambda request: not _is_dear(request.raw),
        )

    # In.

    def submit(self, request: PublishRequest) -> None:
        """Take a PUBLISH; its publisher gets exactly one answer (R-192)."""
        self.pending += 1
        self.pending_bytes += len(request.raw)
        request.lane.requests.append(request)
        if _is_dear(request.raw):
            self._pool.put(request)
            return
        self._examine(request)
        self._route(request)

    def is_full(self) -> bool:
        """Whether publishes under way hold as many bytes as they may; their publishers then stop reading."""
        return self.pending_bytes >= self._limits.publish_queue_bytes

    def hold(self, publisher: Publisher) -> None:
        """Tell this publisher when there is room again, once."""
        self._held.add(publisher)

    def release(self, publisher: Publisher) -> None:
        """The publisher has gone and is told nothing."""
        self._held.discard(publisher)

    def _examine(self, request: PublishRequest) -> None:
        """Checks 5 to 10. Runs on the loop, or on a thread for a large packet."""
        limits = self._limits
        try:
            request.parsed(
                Packet.parse(
                    request.raw,
                    max_bytes=limits.max_packet_bytes,
                    max_depth=limits.max_json_depth,
                    max_values=limits.max_json_values,
                )
            )
            require_room(request.packet, limits.max_identity_bytes)
            weigh(request.packet, self.policy, self._clock(), max_age_seconds=limits.max_packet_age_seconds)
        except InvalidPacket as error:
            request.refuse(error)

    def _route(self, request: PublishRequest) -> None:
        """Send an examined packet on: to the threads, to be looked up, or to its answer."""
        if request.is_parsed and request.packet.digest in self._recent:
            request.verdict = PublishVerdict.REFUSED  # needs no signature: `_settle` knows it for a duplicate
        if request.verdict is not PublishVerdict.PENDING:
            self._advance_from(request)
            return
        known = self._knowledge(request.packet)
        if known is not None:
            request.known = known
            self._pool.put(request)
        else:
            self._unknown.append(request)
            self._start("keys", self._load)

    def _knowledge(self, packet: Packet) -> Known | None:
        generation = self._identities.generation
        if self._plain.generation != generation:
            self._plain = Known(generation)
        return known_of(packet, self._identities, self._clock(), self._plain)

    # On the threads.

    def _check(self, request: PublishRequest) -> None:
        """For a large packet all up to the signature, for others the signature and all after it.

        Never raises.
        """
        try:
            if not request.is_parsed:
                self._examine(request)
                return
            now = self._clock()
            request.queued = judge(request.packet, request.known, now)
            require_chain_room(request.packet, request.known, self._limits.max_identity_bytes)
            try:
                request.downgrade = trace(request.packet, request.known, self.trust, now)
            except InvalidPacket as error:
                request.origin_refusal = error
            request.verdict = PublishVerdict.PASSED
        except InvalidPacket as error:
            request.refuse(error)
            request.is_by_keys = True
        except Exception:
            _log.exception("check_failed")
            request.refuse(_UNCHECKED)

    def _checked(self, requests: Sequence[PublishRequest], seconds: float) -> None:
        self._on_verified(seconds)
        for request in requests:
            if request.verdict is PublishVerdict.PENDING:  # a large packet: only now is it known what it is
                self._route(request)
                continue
            if request.verdict is PublishVerdict.PASSED:
                self._finish(request)
            self._advance_from(request)
        self._on_flush()

    # Checks that wait for something before the packet may enter the log.

    def _finish(self, request: PublishRequest) -> None:
        """The budgets of check 12 and then 13; the operator's plug-ins come last, for they may take long."""
        asks = bool(self._plugins) and request.origin_refusal is None
        if (asks or request.packet.content_type in BUDGETED_TYPES) and not request.is_finished:
            request.verdict = PublishVerdict.PENDING
            task = asyncio.create_task(self._finish_later(request), name="publish-finish")
            self._finishing.add(task)
            task.add_done_callback(self._finishing.discard)
        elif request.origin_refusal is not None:
            request.refuse(request.origin_refusal)
        request.is_finished = True

    async def _finish_later(self, request: PublishRequest) -> None:
        packet = request.packet
        try:
            if packet.content_type in BUDGETED_TYPES:
                await self._budgets.take(packet)
                request.is_charged = True
            if request.origin_refusal is not None:
                raise request.origin_refusal
            if self._plugins:
                await self._plugins.check(packet, request.lane.identity)
            request.verdict = PublishVerdict.PASSED
        except InvalidPacket as error:
            request.refuse(error)
        except StoreError:
            request.refuse(_UNAVAILABLE)
        self._advance_from(request)
        self._on_flush()

    async def _load(self) -> None:
        """Read the chains and manifests that packets wait for, all in one go."""
        while self._unknown:
            requests, self._unknown = self._unknown, []
            dids: dict[str, None] = {}
            for request in requests:
                dids |= dict.fromkeys(missing_for(request.packet, self._identities))
            try:
                await self._identities.load(dids)
            except StoreError:
                for request in requests:
                    request.refuse(_UNAVAILABLE)
            for request in requests:
                self._route(request)
            self._on_flush()

    # Out.

    def _advance_from(self, request: PublishRequest) -> None:
        """Let everything leave the lane, if it is this one's turn.

        An earlier one of the same batch may have taken this one along, and left the lane empty.
        """
        lane = request.lane
        if lane.requests and lane.requests[0] is request:
            self._advance(lane)

    def _advance(self, lane: Lane) -> None:
        requests = lane.requests
        while requests and requests[0].verdict is not PublishVerdict.PENDING:
            request = requests[0]
            has_passed = request.verdict is PublishVerdict.PASSED
            if (has_passed or request.is_by_keys) and not self._may_leave(request):
                return
            requests.popleft()
            if has_passed:
                self._store(request)
            else:
                self._settle(request)

    def _may_leave(self, request: PublishRequest) -> bool:
        """Whether the verdict holds by the keys of now. If not, something will come back to the lane."""
        packet, known = request.packet, request.known
        if self._changing and packet.author_id in self._changing:
            self._barred.setdefault(packet.author_id, {})[request.lane] = None
            return False
        if known.generation != self._identities.generation:
            if not self._is_current(request):
                request.verdict = PublishVerdict.PENDING
                request.is_by_keys = False
                request.refusal = request.origin_refusal = None
                self._route(request)
                return False
        return True

    def _is_current(self, request: PublishRequest) -> bool:
        """Whether the author's keys are the ones the packet was judged by."""
        author, chain = request.packet.author_id, request.known.chain
        if self._identities.is_plain(author):
            return chain is None or not chain.events
        return chain is not None and self._identities.chain(author) is chain

    def _store(self, request: PublishRequest) -> None:
        packet = request.packet
        if packet.content_type in IDENTITY_TYPES:
            self._changing[packet.author_id] = request
        try:
            self._enqueue(to_store(packet, request.downgrade), request)
        except StoreUnavailable:
            self.failed(request, _QUEUE_FULL)

    def _settle(self, request: PublishRequest) -> None:
        """Answer what will not be stored: OK if the log has it already (check 8), else the refusal."""
        if not request.is_parsed:  # refused by checks 5 to 7: it has no id that could be known
            self.failed(request, request.refusal or _UNCHECKED)
        elif (received_at := self._recent.get(request.packet.digest)) is not None:
            self.committed(request, received_at, duplicate=True)
        else:
            self._doubtful.append(request)
            self._start("duplicates", self._look_up)

    async def _look_up(self) -> None:
        while self._doubtful:
            requests, self._doubtful = self._doubtful, []
            ids = {request.packet.digest for request in requests}
            try:
                known = await self._find(list(ids))
            except StoreError:
                # The refusal stands whatever the index would say; saying so needs no database.
                known = {}
            for request in requests:
                found = known.get(request.packet.digest)
                if found is not None:
                    self.committed(request, found[1], duplicate=True)
                else:
                    self.failed(request, request.refusal or _FORGOTTEN)
            self._on_flush()

    # Told by the writer and the feed.

    def committed(
        self, request: PublishRequest, received_at: int, *, duplicate: bool, duplicate_of: bytes | None = None
    ) -> None:
        """The log has the packet, or for `duplicate_of` the one it repeats."""
        packet = request.packet
        if duplicate_of is None:
            self._remember(packet.digest, received_at)
        self._finished(request)
        if duplicate:
            self._unbar(request)
            request.queued = self._is_pending(packet)
        elif request.downgrade is not None:
            _log.info("provenance_downgraded", packet_id=packet.packet_id, reason=request.downgrade.reason)
        request.lane.publisher.publish_accepted(
            request, received_at, duplicate=duplicate, duplicate_of=duplicate_of, queued=request.queued
        )

    def failed(self, request: PublishRequest, error: InvalidPacket) -> None:
        """The packet is refused, or could not be stored, or may have been stored."""
        self._finished(request)
        if request.is_parsed:
            self._unbar(request)
        request.lane.publisher.publish_refused(request, error)

    def identity_applied(self, packet: Packet) -> None:
        """The feed has applied an identity packet: its author's next packets may be judged by it."""
        request = self._changing.get(packet.author_id)
        if request is not None and request.packet.digest == packet.digest:
            self._unbar(request)

    def still_admitted(self, request: PublishRequest) -> bool:
        """Whether a packet on its way to the log holds by the keys as they are now (R-074).

        If not, it is answered here. Called for each append, so the usual answer costs one comparison.
        """
        packet, known = request.packet, request.known
        is_current = known.generation == self._identities.generation or self._is_current(request)
        if is_current and (known.chain is None or self._clock() < known.until):
            return True
        fresh = self._knowledge(packet)
        if fresh is None:  # put out of memory within this moment
            request.refusal = _KEYS_CHANGED
        else:
            request.known = fresh
            try:
                # An identity packet that a lost append has stored holds: it is in the chain by now.
                request.queued = judge(packet, fresh, self._clock())
                return True
            except InvalidPacket as error:
                request.refusal = error
        self._settle(request)
        return False

    async def close(self) -> None:
        """Stop the threads and the tasks; requests still inside get no answer."""
        await asyncio.get_running_loop().run_in_executor(None, self._pool.close)
        tasks = [*self._tasks.values(), *self._finishing]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _unbar(self, request: PublishRequest) -> None:
        """Let the author's next packets pass, if it was this one that barred them."""
        author = request.packet.author_id
        if self._changing.get(author) is request:
            del self._changing[author]
            for lane in self._barred.pop(author, ()):
                self._advance(lane)

    def _is_pending(self, packet: Packet) -> bool:
        """Whether an identity packet of the log still waits for its effect."""
        if packet.content_type not in IDENTITY_TYPES:
            return False
        chain = self._identities.chain(packet.author_id)
        return chain is not None and chain.is_pending(packet.packet_id, self._clock())

    def _start(self, name: str, work: Callable[[], Awaitable[None]]) -> None:
        """Run `work` unless it runs already: it takes all that gathers until no more does."""
        task = self._tasks.get(name)
        if task is None or task.done():
            self._tasks[name] = asyncio.ensure_future(work())

    def _remember(self, digest: bytes, received_at: int) -> None:
        recent = self._recent
        recent[digest] = received_at
        if len(recent) > _RECENT_IDS:
            recent.popitem(last=False)

    def _finished(self, request: PublishRequest) -> None:
        self.pending -= 1
        self.pending_bytes -= len(request.raw)
        if self._held and not self.is_full():
            held, self._held = self._held, set()
            for publisher in held:
                publisher.room_again()
        if request.is_charged:
            self._budgets.settled(request.packet)
