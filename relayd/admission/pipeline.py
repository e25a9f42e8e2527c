"""The path of a PUBLISH from its frame to the writer, and its answer.

    loop      parse, policy, freshness ─ is it a repeat? ─ are all keys it needs in memory?
    threads   signature, rules of its type, provenance (before, if it has many values: parsing apart)
    loop      instead of the threads, in its publisher's turn: packets that change keys
    loop      budgets and plug-ins, which may wait ─ its turn in the lane ─ the writer

Signatures are checked in batches on several threads, and large packets are parsed there too. Nevertheless,
packets of one session enter the log in the order they were sent, each judged by the keys in force when it
does: see `lanes`. The writer notices what another process appends meanwhile, and asks `still_admitted`.

A duplicate is answered OK before any later check can refuse it (check 8 before 9 to 13): see `repeats`.

No request is forgotten. Each ends exactly once, in `_end`, which gives back all that it holds. Any error
raised on its way ends it through `lost` with `internal_error`: on the loop, a request moves only inside
`_step`; tasks report errors to `LastChecks` or `Gathering`, and threads to `VerifyPool`.
"""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import Callable, Sequence

from strata.protocol.errors import InvalidPacket
from strata.protocol.keys import IDENTITY_TYPES
from strata.protocol.packets import Packet
from strata.protocol.provenance import Downgrade, ProvenanceTrust

from relayd import failpoints
from relayd.admission.budgets import TrustBudgets
from relayd.admission.check_runner import Checker, is_dear
from relayd.admission.checks import to_store
from relayd.admission.knowledge import Knowledge, missing_for
from relayd.admission.lanes import Lanes
from relayd.admission.last_checks import LastChecks
from relayd.admission.limits import AdmissionLimits
from relayd.admission.loading import Loading
from relayd.admission.parsing_apart import ApartParser
from relayd.admission.refusals import FAULT, KEYS_CHANGED, QUEUE_FULL, REPEATS_REMOVED, UNAVAILABLE
from relayd.admission.repeats import DuplicateIndex, Repeat, Repeats, is_told_origin
from relayd.admission.request import PublishRequest, PublishVerdict, Submitter
from relayd.admission.verify import VerifyPool
from relayd.crowds import CrowdWork
from relayd.faults import FaultLog
from relayd.identity.directory import Identities
from relayd.logs import get_logger
from relayd.policy import Plugins, Policy
from relayd.slices import Slices
from relayd.store.types import NewPacket, StoreUnavailable

__all__ = ["Admission"]

_log = get_logger("relayd.admission")

_LOOKS_FOR_OVERDUE = 4
"""How many times overdue requests are looked for in the time that a request may wait."""
_FEW_KEYS = 16
"""A packet that no key has signed is tried with all keys its author ever had; so many take a millisecond."""
_SHORT_TYPES = IDENTITY_TYPES - {"DID_DOCUMENT"}
"""Types that are judged just as quickly with many values: nothing of them is canonicalised again."""
_LATELY = 0.1
"""Seconds after which an answered publish no longer counts as load."""
_UNDER_WAY_SECONDS = 0.05
"""How far a packet is set back in the queue of checks if its sender has others under way, in seconds."""
_DECIDED = (PublishVerdict.PASSED, PublishVerdict.REFUSED)


def _place(request: PublishRequest) -> float:
    """The place of a request among those to be checked."""
    lane = request.lane
    behind = _UNDER_WAY_SECONDS if len(lane.requests) > 1 else 0.0
    return lane.publisher.turn(time.monotonic()) + behind


class Admission:
    """Takes publishes from all sessions of a process, and passes valid packets to the writer.

    `enqueue(packet, request)` hands a packet to the writer; `log` is asked what the log already has.
    `policy` and `trust` may be replaced while running. `on_refused(request, error)`, which must not raise,
    is called for each request that is not stored. A request that has waited `publish_timeout` seconds for
    the feed to bring an identity packet is answered that it could not be judged. Packets of many values are
    parsed by `apart`, or on a thread if that is None; `apart` is closed with the admission.
    """

    def __init__(
        self,
        *,
        enqueue: Callable[[NewPacket, PublishRequest], None],
        log: DuplicateIndex,
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
        faults: FaultLog,
        on_refused: Callable[[PublishRequest, InvalidPacket], None] | None = None,
        publish_timeout: float = 10.0,
        apart: ApartParser | None = None,
        slices: Slices | None = None,
    ) -> None:
        self._checker = Checker(policy, trust, limits=limits, clock=clock, apart=apart)
        self.pending = 0
        self.pending_bytes = 0
        self._submitted_at = float("-inf")
        self._enqueue = enqueue
        self._faults = faults
        self._slices = slices or Slices(faults)
        self._identities = identities
        self._limits = limits
        self._clock = clock
        self._on_verified = on_verified
        self._on_flush = on_flush
        self._on_refused = on_refused
        self._apart = apart
        self._knowledge = Knowledge(identities, clock)
        self._held: CrowdWork[Submitter] = CrowdWork(
            self._slices,
            lambda publisher: publisher.room_again(),
            faults,
            may_go_on=lambda: not self.is_full(),
        )
        self._repeats = Repeats(
            log,
            told=lambda request, repeat: self._step(request, functools.partial(self._looked_up, repeat)),
            lost=self.lost,
            on_flush=on_flush,
            faults=faults,
            slices=self._slices,
        )
        self._loading = Loading(
            identities,
            go_on=lambda request, refusal: self._step(request, functools.partial(self._loaded, refusal)),
            lost=self.lost,
            on_flush=on_flush,
            faults=faults,
            slices=self._slices,
        )
        self._lanes = Lanes(
            self._knowledge,
            leave=self._leave,
            judge=self._route,
            judge_held=lambda request: self._step(request, self._have_judged),
            lost=self.lost,
            on_flush=on_flush,
            faults=faults,
            slices=self._slices,
        )
        self._publish_timeout = publish_timeout
        self._patience: asyncio.TimerHandle | None = None
        self._last_checks = LastChecks(
            budgets,
            plugins,
            done=lambda request: self._step(request, self._lanes.advance_from),
            lost=self.lost,
            on_flush=on_flush,
            faults=faults,
        )
        self._pool: VerifyPool[PublishRequest] = VerifyPool(
            self._checker.check,
            self._checked,
            self.lost,
            threads=verify_threads,
            loop=asyncio.get_running_loop(),
            is_quick=lambda request: not request.is_dear,
            place=_place,
            on_dear=self._was_dear,
        )

    @property
    def policy(self) -> Policy:
        """The operator's policy: which packets are refused."""
        return self._checker.policy

    @policy.setter
    def policy(self, policy: Policy) -> None:
        self._checker.policy = policy

    @property
    def trust(self) -> ProvenanceTrust:
        """The roots and verifiers whose word on the origin of packets counts."""
        return self._checker.trust

    @trust.setter
    def trust(self, trust: ProvenanceTrust) -> None:
        self._checker.trust = trust

    # In.

    def submit(self, request: PublishRequest) -> None:
        """Take a PUBLISH; its publisher gets exactly one answer (R-192). Never raises."""
        self.pending += 1
        self.pending_bytes += request.held_bytes
        self._submitted_at = request.started_at
        request.lane.requests.append(request)
        self._step(request, self._enter)

    def _enter(self, request: PublishRequest) -> None:
        if failpoints.ARMED:
            failpoints.hit("admission.submit")
        request.is_dear = is_dear(request.raw)
        if request.is_dear:
            self._pool.put(request)
            return
        self._checker.examine(request)
        self._route(request)

    def is_busy(self) -> bool:
        """Whether any publish waits for an answer, or arrived a moment ago."""
        return self.pending > 0 or time.monotonic() - self._submitted_at < _LATELY

    def is_full(self) -> bool:
        """Whether publishes under way hold as much memory as they may; their publishers then stop reading."""
        return self.pending_bytes >= self._limits.publish_queue_bytes

    def hold(self, publisher: Submitter) -> None:
        """Notify this publisher once when there is room again."""
        self._held.members[publisher] = None

    def release(self, publisher: Submitter) -> None:
        """The publisher is gone: do not notify it."""
        self._held.members.pop(publisher, None)

    def _route(self, request: PublishRequest) -> None:
        """Send an examined packet on: to the threads, to be looked up, or to its answer."""
        if request.is_parsed and self._repeats.remembers(request.packet.digest):
            request.verdict = PublishVerdict.REFUSED  # needs no signature check if the log still has it
        if request.verdict in _DECIDED:
            self._lanes.advance_from(request)
        elif request.lane.is_behind_change(request):
            request.verdict = PublishVerdict.HELD
        else:
            self._have_judged(request)

    def _have_judged(self, request: PublishRequest) -> None:
        """Have the request judged by the current keys, once they are in memory."""
        known = self._knowledge.of(request.packet)
        if known is None:
            self._loading.put(request)
            return
        request.known = known
        quick_types = _SHORT_TYPES if request.is_dear else IDENTITY_TYPES
        has_many_keys = known.chain is not None and len(known.chain.keys(self._clock())) > _FEW_KEYS
        request.is_dear |= has_many_keys
        if has_many_keys or request.packet.content_type not in quick_types:
            self._pool.put(request)
            return
        # The rules of a chain hold the interpreter lock: on a thread they would take as much from the loop,
        # plus the way there and back, and the signatures of others would wait behind them.
        place = request.lane.publisher.turn(time.monotonic())
        self._slices.later(
            functools.partial(self._judge_here, request), place, functools.partial(self.lost, request)
        )

    def _judge_here(self, request: PublishRequest) -> None:
        began = time.monotonic()
        self._step(request, self._judge_and_go_on)
        self._guarded(request.lane.publisher.checked_for, time.monotonic() - began)
        self._on_flush()

    def _judge_and_go_on(self, request: PublishRequest) -> None:
        self._checker.check(request)
        self._go_on(request)

    def _was_dear(self, request: PublishRequest, seconds: float) -> None:
        self._guarded(request.lane.publisher.checked_for, seconds)

    def _checked(self, requests: Sequence[PublishRequest], seconds: float) -> None:
        for request in requests:
            self._step(request, self._go_on)
        self._guarded(self._on_verified, seconds)
        self._on_flush()

    def _go_on(self, request: PublishRequest) -> None:
        if request.verdict is PublishVerdict.PENDING:  # a large packet, whose type is known only now
            self._route(request)
            return
        if request.verdict is PublishVerdict.CHECKED:
            self._last_checks.begin(request)
        self._lanes.advance_from(request)

    def _loaded(self, refusal: InvalidPacket | None, request: PublishRequest) -> None:
        # A chain that cannot be read is no reason to refuse the packets of others.
        if refusal is not None and missing_for(request.packet, self._identities):
            request.refuse(refusal)
        self._route(request)

    # The one way on, and the one way out.

    def _step(self, request: PublishRequest, work: Callable[[PublishRequest], None]) -> None:
        """Move a request on. An error raised by `work` ends this request and no other."""
        if request.is_ended:
            return
        try:
            work(request)
        except Exception as error:
            self.lost(request, error)

    def lost(self, request: PublishRequest, error: BaseException) -> None:
        """A fault of ours on a request's way: count it, answer the request, and let its lane go on.

        Never raises; a request that has ended stays as it is.
        """
        self._faults.caught("publish", error)
        request.lane.forget(request)
        self.failed(request, FAULT)
        self._lanes.let_out(request.lane)
        self._on_flush()

    def _end(self, request: PublishRequest, *, stored_at: int | None = None) -> bool:
        """Give back all that a request holds. Returns False if that is already done. Never raises.

        `stored_at` is when the log received a packet that it did not have.
        """
        if request.is_ended:
            return False
        request.is_ended = True
        self.pending -= 1
        self.pending_bytes -= request.held_bytes
        self._last_checks.settled(request, stored_at)
        if self._held.members:
            self._guarded(self._held.go_on)
        # A stored packet bars its author's next packets until the feed has applied it.
        if request.change is not None and stored_at is None:
            self._lanes.unbar(request)
        return True

    def _guarded(self, work: Callable[..., None], *arguments: object) -> None:
        try:
            work(*arguments)
        except Exception as error:
            self._faults.caught("publish", error)

    def _leave(self, request: PublishRequest) -> None:
        """The request has left its lane: send it to the log, or answer it."""
        if request.verdict is PublishVerdict.PASSED:
            self._store(request)
        else:
            self._settle(request)

    def _store(self, request: PublishRequest) -> None:
        self._lanes.bar(request)
        if self._patience is None and self._lanes.is_barring:
            self._be_patient()
        try:
            self._enqueue(
                to_store(request.packet, request.downgrade, request.origin, request.witness), request
            )
        except StoreUnavailable:
            self.failed(request, QUEUE_FULL)

    def _be_patient(self) -> None:
        pause = self._publish_timeout / _LOOKS_FOR_OVERDUE
        self._patience = asyncio.get_running_loop().call_later(pause, self._give_overdue_up)

    def _give_overdue_up(self) -> None:
        """Answer requests that have waited too long for what the feed has not brought; it may be down."""
        if self._patience is not None:
            self._patience.cancel()  # another may have been set while this waited for its turn
            self._patience = None
        since = time.monotonic() - self._publish_timeout
        while overdue := self._lanes.overdue(since):
            for request in overdue:
                request.lane.forget(request)
                self.failed(request, UNAVAILABLE)
                self._lanes.let_out(request.lane)
                if self._slices.is_over():
                    self._slices.later(self._give_overdue_up)
                    self._on_flush()
                    return
        self._on_flush()
        if self._lanes.is_barring:
            self._be_patient()

    def _settle(self, request: PublishRequest) -> None:
        """Answer a request that is not to be stored: OK if the log has it (check 8), else the refusal."""
        if not request.is_parsed:  # refused by checks 5 to 7: no packet id is known
            self.failed(request, request.refusal or FAULT)
        else:
            self._repeats.look_up(request)

    def _looked_up(self, repeat: Repeat | None, request: PublishRequest) -> None:
        if repeat is not None:
            # The log serves it with what was found then: the keys may give another result now.
            request.downgrade = None if repeat.finding is None else Downgrade.decode(repeat.finding)
            self._accepted(request, repeat.received_at, duplicate=True)
        elif request.refusal is not None:
            self.failed(request, request.refusal)
        else:
            self._start_over(request)

    def _start_over(self, request: PublishRequest) -> None:
        """The request was taken for a repeat, but the log does not have the packet: judge it anew."""
        self._repeats.forget(request.packet.digest)
        request.verdict = PublishVerdict.PENDING
        request.lane.requests.append(request)
        self._route(request)

    # Called by the writer and the feed.

    def committed(
        self, request: PublishRequest, received_at: int, *, duplicate: bool, duplicate_of: bytes | None = None
    ) -> None:
        """The log has the packet, or the packet `duplicate_of` that it repeats. Never raises."""
        if duplicate_of in self.policy.declined.packet_ids:
            self.failed(request, REPEATS_REMOVED)
            return
        if duplicate and not request.is_ended:
            if duplicate_of is None and is_told_origin(request):
                self._step(request, lambda repeated: self._repeats.look_up(repeated, received_at))
                return
            request.downgrade = None  # it belongs to a packet that the log does not hold
        self._accepted(request, received_at, duplicate=duplicate, duplicate_of=duplicate_of)

    def _accepted(
        self, request: PublishRequest, received_at: int, *, duplicate: bool, duplicate_of: bytes | None = None
    ) -> None:
        if not self._end(request, stored_at=None if duplicate else received_at):
            return
        try:
            packet = request.packet
            if duplicate_of is None:
                self._repeats.remember(packet.digest)
            if duplicate:
                request.queued = self._is_pending(packet)
            elif request.downgrade is not None:
                _log.info(
                    "provenance_downgraded", packet_id=packet.packet_id, reason=request.downgrade.reason
                )
            request.lane.publisher.publish_accepted(
                request, received_at, duplicate=duplicate, duplicate_of=duplicate_of, queued=request.queued
            )
        except Exception as error:
            self._unanswered(request, error)

    def failed(self, request: PublishRequest, error: InvalidPacket) -> None:
        """The packet is refused, or could not be stored, or may have been stored. Never raises."""
        if not self._end(request):
            return
        if self._on_refused is not None:
            self._on_refused(request, error)
        try:
            request.lane.publisher.publish_refused(request, error)
        except Exception as fault:
            self._unanswered(request, fault)

    def _unanswered(self, request: PublishRequest, error: Exception) -> None:
        """The answer could not be made: report a fault. A packet that is stored may be published again."""
        self._faults.caught("publish", error)
        try:
            request.lane.publisher.publish_refused(request, FAULT)
        except Exception as again:
            self._faults.caught("publish", again)
            self._guarded(request.lane.publisher.publish_unanswerable)

    def identity_applied(self, author: str, digest: bytes) -> None:
        """The feed has applied an identity packet or a manifest. Never raises."""
        self._lanes.applied(author, digest)

    def still_admitted(self, request: PublishRequest, now: int) -> bool:
        """Whether a packet on its way to the log is valid by the current keys, and as of the time `now` that
        the log is to give (R-074).

        If not, it is answered here. Called for each append, so the usual answer costs one comparison. Never
        raises.
        """
        try:
            return not request.is_ended and self._fits(request) and self._holds(request, now)
        except Exception as error:
            self.lost(request, error)
            return False

    def _fits(self, request: PublishRequest) -> bool:
        """Whether its author's budgets have room for it, counted once more (R-241)."""
        try:
            self._last_checks.recount(request)
            return True
        except InvalidPacket as error:
            request.refuse(error)
        self._settle(request)
        return False

    def _holds(self, request: PublishRequest, now: int) -> bool:
        packet, known = request.packet, request.known
        until = known.until if packet.expires_at is None else min(known.until, packet.expires_at + 1)
        if request.latest_check <= now < until and self._knowledge.is_current(packet, known):
            return True
        fresh = self._knowledge.of(packet)
        if fresh is None:  # evicted from memory a moment ago
            request.refuse(KEYS_CHANGED)
        else:
            request.known = fresh
            try:
                # An identity packet that a lost append has stored is valid: the chain has it by now.
                request.latest_check = 0
                self._checker.weigh(request, now)
                self._checker.judge(request, now)
                return True
            except InvalidPacket as error:
                request.refuse(error)
        self._settle(request)
        return False

    async def close(self) -> None:
        """Stop the threads and the tasks; requests still under way get no answer."""
        if self._patience is not None:
            self._patience.cancel()
        await asyncio.get_running_loop().run_in_executor(None, self._close_threads)
        await asyncio.gather(
            self._repeats.close(), self._loading.close(), self._last_checks.close(), return_exceptions=True
        )

    def _close_threads(self) -> None:
        if self._apart is not None:
            self._apart.close()
        self._pool.close()

    def _is_pending(self, packet: Packet) -> bool:
        """Whether an identity packet of the log still waits to take effect."""
        if packet.content_type not in IDENTITY_TYPES:
            return False
        chain = self._identities.chain(packet.author_id)
        return chain is not None and chain.is_pending(packet.packet_id, self._clock())
