"""The publishes in progress on one relay connection: no I/O, no clock.

A publish ends in exactly one of three ways: the relay acknowledged it, the relay refused it permanently, or
its time ran out. Silence is never success (R-193). Until then it is in one of these states:

    waiting ──sent──▶ in flight ──OK / final ERROR──▶ settled
       ▲                  │
       └── temporary ERROR, connection lost, no answer within ack_timeout

A publish refused for lack of authentication waits, *parked*, until authentication has been decided (`park`,
`authorize`, `give_up`); the owner knows whether waiting can help.

A publish is always sent as the same bytes, `client_msg_id` included (R-194). An answer to any of the copies
therefore settles it, and a relay that stored the first copy answers `duplicate`, which is success. When the
relay gives a time to retry after, every publish waits for it, in the order they were made: the budget belongs
to the session (A-068).
"""

# Core: no I/O, no clock, no randomness (held by tests/test_layout.py).

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NewType

from msgspec import Raw

from strata.protocol import wire
from strata.protocol.errors import ErrorCode, RequestRefused, RequestTimeout, Retry, StrataError
from strata.relays.backoff import MAX_RETRY_AFTER_SECONDS, retry_delay
from strata.relays.connection.options import Options
from strata.relays.connection.values import Published, Statistics

__all__ = ["Handle", "PublishSettled", "Publishing", "not_repeated"]

Handle = NewType("Handle", str)
"""Names one publish in progress: its `client_msg_id`."""


@dataclass(frozen=True, slots=True)
class PublishSettled:
    """A publish has ended: with the relay's confirmation, or with the error to raise."""

    handle: Handle
    outcome: Published | StrataError


@dataclass(slots=True)
class _Pending:
    packet_id: str
    frame: bytes
    timeout: float
    deadline: float
    due_at: float = -math.inf
    """In flight: when to stop waiting for the answer. Waiting: when it may be sent."""
    in_flight: bool = False
    sent: bool = False
    attempts: int = 0
    """The temporary refusals so far."""
    parked: bool = False
    """Waiting: whether it waits until authentication is decided, whatever `due_at` is."""
    anonymous: bool = False
    """In flight: whether it was sent before the session was authenticated, so a refusal may be about that."""
    refusal: RequestRefused | None = None
    """The answer to the latest copy sent, if it was a temporary refusal."""


class Publishing:
    """Owns every publish in progress; appends frames to `outbox` and outcomes to `settled`.

    The number of publishes is unbounded here; the caller bounds it (`Options.max_in_flight`).
    """

    def __init__(
        self,
        options: Options,
        statistics: Statistics,
        *,
        random: Callable[[], float],
        outbox: list[bytes],
    ) -> None:
        self.settled: list[PublishSettled] = []
        self.wake_at = math.inf
        """When to call `handle_timer`; this may be earlier than it has work to do."""
        self._options = options
        self._statistics = statistics
        self._random = random
        self._outbox = outbox
        # In the order they were made, which is the order of sending and of sending again.
        self._pending: dict[Handle, _Pending] = {}
        self._last = 0
        self._connected = False
        self._forbidden: StrataError | None = None
        self._hold_until = -math.inf
        self._held_by: RequestRefused | None = None
        """The refusal that set `_hold_until`."""

    def __len__(self) -> int:
        return len(self._pending)

    def add(
        self, packet_id: str, canonical: bytes, *, timeout: float, now: float, given: float | None = None
    ) -> Handle:
        """Begin to publish a packet given by its canonical bytes; it is sent once there is a connection."""
        self._last += 1
        handle = Handle(f"p{self._last}")
        frame = wire.encode(wire.Publish(packet=Raw(canonical), client_msg_id=handle))
        pending = self._pending[handle] = _Pending(
            packet_id, frame, timeout if given is None else given, now + timeout
        )
        self._statistics.publishes += 1
        self._wake_by(pending.deadline)
        if self._connected:
            self._send_if_due(handle, pending, now)
        return handle

    def cancel(self, handle: Handle) -> None:
        """Forget a publish. The relay may have stored the packet, or may still store it."""
        self._pending.pop(handle, None)

    def connection_made(self, now: float, *, forbidden: StrataError | None = None) -> None:
        """Send, or send again, everything that has no answer (R-194).

        `forbidden` is why this session must not publish (R-291), if so; then every publish ends with it.
        """
        self._connected = True
        self._forbidden = forbidden
        self._send_all(now)

    def authorize(self, now: float, *, forbidden: StrataError | None) -> None:
        """Note that the session is authenticated: packets refused for lack of that are sent again.

        The session has a new budget from now on.
        """
        self._forbidden = forbidden
        self._hold_until, self._held_by = -math.inf, None
        for pending in self._pending.values():
            pending.anonymous = pending.in_flight
            if pending.parked:
                pending.parked, pending.due_at = False, -math.inf
        self._send_all(now)

    def give_up(self, error: StrataError) -> None:
        """Note that authentication failed: the relay's refusals stand, with `error` as their cause."""
        for handle, pending in list(self._pending.items()):
            if pending.parked and pending.refusal is not None:
                pending.refusal.__cause__ = error
                self._refuse(handle, pending.refusal)

    def connection_lost(self) -> None:
        """Make the packets in flight wait for the next connection: no answer to them will come."""
        self._connected = False
        self._forbidden = None
        for pending in self._pending.values():
            if pending.in_flight or pending.parked:
                pending.in_flight = pending.parked = False
                pending.due_at = -math.inf

    def receive_ok(self, message: wire.Ok) -> bool:
        """Settle the publish that the OK answers; false if it answers nothing in progress here.

        An OK for a packet other than the one sent is not an answer: accepting it would be taking silence for
        success.
        """
        handle = self._find(message.client_msg_id, message.packet_id)
        if handle is None or self._pending[handle].packet_id != message.packet_id:
            return False
        del self._pending[handle]
        self._statistics.publishes_acknowledged += 1
        self._statistics.publishes_duplicate += bool(message.duplicate)
        published = Published(
            message.packet_id,
            message.received_at,
            bool(message.duplicate),
            message.status == "QUEUED",
            _downgrade(message.relay_annotations),
            None if message.duplicate_of == message.packet_id else message.duplicate_of,
        )
        self.settled.append(PublishSettled(handle, published))
        return True

    def awaits(self, message: wire.Error) -> bool:
        """Whether the ERROR answers something in progress here."""
        return self._find(message.client_msg_id, None) is not None

    def receive_error(
        self, message: wire.Error, refusal: RequestRefused, now: float, *, park: bool = False
    ) -> bool:
        """Settle, or put off, the publish that the ERROR answers; false if it answers none in progress here.

        `park` means that authentication is under way: a packet refused for lack of it waits for the outcome.
        """
        handle = self._find(message.client_msg_id, None)
        if handle is None:
            return False
        pending = self._pending[handle]
        # A second answer to a packet sent twice: only the first one counts.
        if not pending.in_flight:
            return True
        retry = refusal.retry
        if retry is Retry.AUTHENTICATE and park:
            self._put_off(pending, refusal, math.inf)
            pending.parked = True
            return True
        if retry is Retry.AUTHENTICATE and pending.anonymous:
            # The relay judged it before it had authenticated us; answers may overtake each other.
            self._put_off(pending, refusal, now)
            self._send_if_due(handle, pending, now)
            return True
        if retry in (Retry.NEVER, Retry.AUTHENTICATE):
            self._refuse(handle, refusal)
            return True
        delay = self._delay(refusal, pending.attempts)
        in_time = now + delay < pending.deadline
        # A wait longer than any caller would accept is a refusal of this packet only.
        is_bearable = in_time or (refusal.retry_after or 0) <= MAX_RETRY_AFTER_SECONDS
        if retry is Retry.LATER and is_bearable and _is_about_the_session(refusal):
            self._hold(refusal, now + delay)
        if not in_time:
            self._refuse(handle, refusal)  # too late to send it again; a timeout would not say why
            return True
        pending.attempts += 1
        self._put_off(pending, refusal, now + delay)
        return True

    def handle_timer(self, now: float) -> None:
        """Expire publishes that are out of time, send those that are due, and reset `wake_at`."""
        self.wake_at = math.inf
        for handle, pending in list(self._pending.items()):
            if now >= pending.deadline:
                self._expire(handle, pending)
                continue
            self._wake_by(pending.deadline)
            if not self._connected:
                continue
            if pending.in_flight and now >= pending.due_at:
                pending.in_flight = False
                pending.due_at = -math.inf
            self._send_if_due(handle, pending, now)

    def postpone(self, by: float) -> None:
        """Nobody looked for `by` seconds: what waits for the relay has that much more time."""
        for pending in self._pending.values():
            pending.deadline += by
            pending.due_at += by * pending.in_flight

    @property
    def sizes_in_flight(self) -> list[int]:
        """The sizes of the packets that wait for an answer."""
        return [len(pending.frame) for pending in self._pending.values() if pending.in_flight]

    def fail(self, error: StrataError) -> None:
        """End every publish with this error."""
        self.settled += [PublishSettled(handle, error) for handle in self._pending]
        self._pending.clear()
        self.wake_at = math.inf

    def _send_all(self, now: float) -> None:
        for handle, pending in list(self._pending.items()):
            self._send_if_due(handle, pending, now)

    def _hold(self, refusal: RequestRefused, until: float) -> None:
        if until > self._hold_until:
            self._hold_until, self._held_by = until, refusal

    def _put_off(self, pending: _Pending, refusal: RequestRefused, due_at: float) -> None:
        pending.in_flight = False
        pending.refusal = refusal
        pending.due_at = due_at
        self._wake_by(due_at)

    def _send_if_due(self, handle: Handle, pending: _Pending, now: float) -> None:
        if not pending.in_flight:
            if self._forbidden is not None:
                del self._pending[handle]
                self.settled.append(PublishSettled(handle, self._forbidden))
                return
            due_at = max(pending.due_at, self._hold_until)
            if self._held_by is not None and now < self._hold_until >= pending.deadline:
                self._refuse(handle, _said_again(self._held_by, self._hold_until - now))
                return
            if now >= due_at:
                self._outbox.append(pending.frame)
                self._statistics.publishes_repeated += pending.sent
                pending.sent = pending.in_flight = True
                pending.anonymous = False
                pending.refusal = None
                pending.due_at = now + self._options.ack_timeout
            else:
                self._wake_by(due_at)
                return
        self._wake_by(pending.due_at)

    def _expire(self, handle: Handle, pending: _Pending) -> None:
        if pending.refusal is not None:
            self._refuse(handle, pending.refusal)
            return
        del self._pending[handle]
        self._statistics.publishes_timed_out += 1
        error = RequestTimeout(f"PUBLISH {pending.packet_id}", pending.timeout)
        self.settled.append(PublishSettled(handle, error))

    def _refuse(self, handle: Handle, refusal: RequestRefused) -> None:
        del self._pending[handle]
        self._statistics.publishes_refused += 1
        self.settled.append(PublishSettled(handle, refusal))

    def _delay(self, refusal: RequestRefused, attempts: int) -> float:
        """The wait before sending again: at least what the relay asked for, with jitter (R-338)."""
        base, cap = self._options.backoff_base, self._options.backoff_cap
        return retry_delay(attempts, refusal.retry_after, base=base, cap=cap, random=self._random)

    def _find(self, client_msg_id: str | None, packet_id: str | None) -> Handle | None:
        """The publish that an answer is for. A plain relay may not echo `client_msg_id` (R-136)."""
        if client_msg_id is not None:
            handle = Handle(client_msg_id)
            return handle if handle in self._pending else None
        if packet_id is None:
            return None
        return next((handle for handle, p in self._pending.items() if p.packet_id == packet_id), None)

    def _wake_by(self, moment: float) -> None:
        self.wake_at = min(self.wake_at, moment)


def not_repeated(packet_id: str, *, is_shown: bool) -> RequestRefused:
    """The outcome for a packet in whose place a relay says to have another one, which it does not show, or
    which states something else."""
    other = "one that states something else" if is_shown else "one that it does not show"
    reason = f"in place of {packet_id} it has {other}, and does not store this one; publish at another relay"
    return RequestRefused(ErrorCode.POLICY_REJECTED, reason, detail="duplicate_of")


def _is_about_the_session(refusal: RequestRefused) -> bool:
    """Whether the budget that is used up is that of all publishes, and not only of an author or a type.

    RFC-0004 has no names for budgets. In this project's relay, the detail for any limit of a session ends in
    `_limit` (`publish_limit`), and other details do not (`trust_budget`).
    """
    return refusal.detail is None or refusal.detail.endswith("_limit")


def _said_again(refusal: RequestRefused, wait: float) -> RequestRefused:
    """The refusal that the relay gave for another packet, with what is left of the wait it asked for."""
    return RequestRefused(
        refusal.code, refusal.reason, detail=refusal.detail, retry_after=max(1, math.ceil(wait))
    )


def _downgrade(annotations: dict[str, object] | None) -> str | None:
    """The origin that a relay says it credits a packet with (R-209)."""
    finding = (annotations or {}).get("provenance")
    effective = finding.get("effective_origin_type") if type(finding) is dict else None
    return effective if type(effective) is str else None
