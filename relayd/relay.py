"""The relay of one process: everything its connections share, and what happens at a commit.

One object owns each piece of mutable state: `Fanout` the live subscriptions, `Tail` the way along the log,
`Admission` the publishes under way, the store's `Writer` the open batch. All of it runs on the event loop;
only signature checks leave it.

At a commit, in one step without a wait: OKs are queued, the batch goes through the fan-out, and every
connection that received anything is written to once. OK comes after the commit and before the EVENT
(relay.md §11, steps 14 to 16; R-176, R-189).
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterable
from typing import Protocol

import structlog
from strata.protocol.errors import ErrorCode, InvalidPacket
from strata.protocol.ids import Identity
from strata.protocol.provenance import ProvenanceTrust

from relayd.access.gate import Access
from relayd.access.limits import SessionLimits
from relayd.admission.budgets import Budget, TrustBudgets
from relayd.admission.pipeline import Admission, AdmissionLimits, PublishRequest
from relayd.config import Settings
from relayd.cursor import CursorCodec
from relayd.feed.fanout import Fanout
from relayd.feed.tail import Tail
from relayd.identity.bootstrap import Bootstrap, key_rules
from relayd.identity.directory import Identities
from relayd.metrics import Metrics, Tally
from relayd.policy import Plugins, Policy, apply_policy
from relayd.store import Store, Writer
from relayd.store.types import Appended, LogEntry, NewPacket, Outcome

__all__ = ["Peer", "Relay"]

_log = structlog.get_logger("relayd.relay")


class Peer(Protocol):
    """A connection, as the relay sees it."""

    def flush(self) -> None:
        """Write what is queued."""

    def resume_if_room(self) -> None:
        """There is room for publishes again."""

    def check_deadlines(self, now: float) -> None:
        """Called about once a second; `now` is monotonic."""

    def stop_reading(self) -> None:
        """Take nothing further from the peer."""

    def close(self, code: int, reason: str) -> None:
        """Start the closing handshake."""

    def abort(self) -> None:
        """Drop the socket."""


class Relay:
    """One relay process between its store and its connections. Make it on the running loop."""

    def __init__(
        self,
        settings: Settings,
        store: Store,
        metrics: Metrics,
        *,
        head: int,
        bootstrap: Bootstrap = Bootstrap(),  # noqa: B008 - immutable
        trust: ProvenanceTrust = ProvenanceTrust(),  # noqa: B008 - immutable
        plugins: Plugins | None = None,
        clock: Callable[[], int] = lambda: int(time.time()),
    ) -> None:
        self.settings = settings
        self.store = store
        self.metrics = metrics
        self.clock = clock
        self.tally = Tally()
        self.cursors = CursorCodec(store.secrets.cursor_key)
        self.limits = SessionLimits(
            default_limit=settings.default_limit,
            max_limit=settings.max_limit,
            max_subscriptions=settings.max_subscriptions,
            max_filter_values=settings.max_filter_values,
            malformed_limit=settings.malformed_limit,
            malformed_window=settings.malformed_window,
        )
        self.access = Access(settings)
        self.connections: set[Peer] = set()
        self.draining = False
        self.relay_id = _identity(settings, store).did
        self.fanout = Fanout(self.cursors, head, form=settings.provenance_downgrade)
        self.identities = Identities(
            store.identities,
            bootstrap,
            key_rules(settings, bootstrap),
            on_change=lambda packet: self.admission.identity_applied(packet),
        )
        self.tail = Tail(
            self.fanout,
            store,
            clock=clock,
            on_entries=self.identities.observe,
            on_dispatch=self._dispatched,
        )
        self.writer: Writer[PublishRequest] = Writer(
            store,
            on_commit=self._committed,
            on_failed=self._not_stored,
            # Twice over: connections stop reading before this, but what they hold has to fit too.
            max_pending_bytes=2 * settings.publish_queue_bytes,
            publish_timeout=settings.publish_timeout,
            clock=clock,
            keys=self,
        )
        self.admission = Admission(
            enqueue=self.writer.put,
            find=store.find,
            identities=self.identities,
            budgets=TrustBudgets(store.identities, _budgets(settings), clock=clock),
            policy=Policy(),
            plugins=plugins or Plugins(),
            trust=trust,
            limits=AdmissionLimits(
                max_packet_bytes=settings.max_packet_bytes,
                max_json_depth=settings.max_json_depth,
                max_packet_age_seconds=settings.max_packet_age_seconds,
            ),
            clock=clock,
            verify_threads=settings.verify_threads,
            on_verified=metrics.verify_seconds.observe,
            on_flush=self.flush,
        )
        apply_policy(self, Policy.from_settings(settings))
        self._dirty: list[Peer] = []
        self._held: set[Peer] = set()
        self._changed = asyncio.Event()

    def wants_flush(self, connection: Peer) -> None:
        """A connection has queued bytes; they are written at the end of this step."""
        self._dirty.append(connection)

    def flush(self) -> None:
        """Write to each connection that has something, once."""
        while self._dirty:
            dirty, self._dirty = self._dirty, []
            for connection in dirty:
                connection.flush()
        if self._held and not self.is_full():
            held, self._held = self._held, set()
            for connection in held:
                connection.resume_if_room()
        self._changed.set()

    def is_full(self) -> bool:
        """Whether publishes under way hold as many bytes as they may; connections then stop reading."""
        return self.admission.pending_bytes >= self.settings.publish_queue_bytes

    def hold(self, connection: Peer) -> None:
        """Tell this connection when there is room for publishes again."""
        self._held.add(connection)

    def forget(self, connection: Peer) -> None:
        """A connection has ended."""
        self.connections.discard(connection)
        self._held.discard(connection)
        self._changed.set()

    async def settle(self, condition: Callable[[], bool], timeout: float) -> bool:
        """Wait up to `timeout` seconds until `condition` holds, looking after every step; whether it does."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout):
                while not condition():
                    self._changed.clear()
                    await self._changed.wait()
        return condition()

    def sweep(self, connections: Iterable[Peer], now: float) -> None:
        """Let these connections look at their deadlines; `now` is monotonic."""
        for connection in connections:
            connection.check_deadlines(now)
        self.flush()

    def count(self) -> None:
        """Bring the metrics up to date with what was tallied since the last call."""
        metrics = self.metrics
        self.tally.count(metrics)
        metrics.publish_queue.set(self.admission.pending)
        metrics.log_sequence.set(self.fanout.position)

    # KeyWatch: what the writer asks before it appends.

    def followed(self) -> int:
        """Identity packets up to here have been applied: as far as the feed has passed through the log."""
        return self.fanout.position

    def still_admitted(self, request: PublishRequest) -> bool:
        """See `Admission.still_admitted`."""
        return self.admission.still_admitted(request)

    async def follow(self, sequence: int) -> None:
        """Let the feed pass through the log up to `sequence`."""
        await self.tail.reach(sequence)

    def _committed(
        self, appended: Appended, batch: list[tuple[NewPacket, PublishRequest]], seconds: float
    ) -> None:
        self.metrics.commit_packets.observe(len(batch))
        self.metrics.commit_seconds.observe(seconds)
        admission = self.admission
        entries: list[LogEntry] = []
        for (packet, request), (outcome, sequence, received_at, duplicate_of) in zip(
            batch, appended.dispositions, strict=True
        ):
            if outcome is Outcome.STORED:
                entries.append(LogEntry(sequence, received_at, packet))
                admission.committed(request, received_at, duplicate=False)
            elif outcome is Outcome.DUPLICATE:
                admission.committed(request, received_at, duplicate=True, duplicate_of=duplicate_of)
            else:
                _log.error("row_refused", packet_id="0x" + packet.packet_id.hex())
                error = InvalidPacket(
                    ErrorCode.INTERNAL_ERROR, "the packet could not be stored", detail="not_storable"
                )
                admission.failed(request, error)
        self.tail.committed(appended.previous, entries)
        self.flush()

    def _not_stored(self, request: PublishRequest) -> None:
        """The database did not answer in time (R-200); an append in flight may still have taken effect."""
        error = InvalidPacket(
            ErrorCode.INTERNAL_ERROR,
            "the packet could not be stored in time; publish it again",
            detail="store_unavailable",
        )
        self.admission.failed(request, error)
        self.flush()

    def _dispatched(self, delivered: int) -> None:
        if delivered:
            self.tally.live_events += delivered
        self.flush()


def _identity(settings: Settings, store: Store) -> Identity:
    """The relay's own: the one configured, else the one made when the database was."""
    seed = settings.identity_seed
    return Identity.from_seed(bytes.fromhex(seed.removeprefix("0x")) if seed else store.secrets.identity_seed)


def _budgets(settings: Settings) -> dict[Budget, int]:
    return {
        Budget.STRONG_EDGES: settings.strong_edges_per_day,
        Budget.WEAK_EDGES: settings.weak_edges_per_day,
        Budget.REVOCATIONS: settings.trust_revocations_per_day,
    }
