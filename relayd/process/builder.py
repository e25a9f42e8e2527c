"""The wiring of a relay: each part gets everything it needs here.

connection ─ Admission ─ Writer ─ store
    │            │          │
    │            └─ Commits ┘   after each commit: OKs, then the batch to the feed
    │                  │
 Registry ─ Fanout ─ Tail ─ Identities
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass

from strata.protocol.ids import Identity
from strata.protocol.provenance import ProvenanceTrust

from relayd.access.gate import Access
from relayd.access.ledger import Book
from relayd.access.limits import SessionLimits
from relayd.admission.budgets import TrustAct, TrustBudgets
from relayd.admission.commits import Commits
from relayd.admission.limits import AdmissionLimits
from relayd.admission.parsing_apart import ApartParser
from relayd.admission.pipeline import Admission
from relayd.admission.request import PublishRequest, marks_of
from relayd.config import Settings
from relayd.cursor import CursorCodec
from relayd.faults import FaultLog
from relayd.feed.fanout import Fanout
from relayd.feed.known_types import KnownTypes
from relayd.feed.tail import Tail
from relayd.identity.authors import DECISIVE_TYPES
from relayd.identity.bootstrap import BootstrapContents, key_rules
from relayd.identity.directory import Identities
from relayd.metrics import Metrics, Tally
from relayd.policy import Plugins, Policy, apply_policy
from relayd.relay import RunningRelay
from relayd.sessions.registry import Registry
from relayd.slices import Slices
from relayd.store import Store, Writer
from relayd.store.types import Appended, LogEntry, NewPacket
from relayd.tracing.publishes import Batch
from relayd.tracing.traces import Seams, Traces, TracesTarget

__all__ = ["build_relay", "relay_identity"]


@dataclass(frozen=True, slots=True)
class _KeyWatch:
    """Answers the writer before it appends (R-074): the feed for its position, admission for the rest."""

    followed: Callable[[], int]
    still_admitted: Callable[[PublishRequest, int], bool]
    follow: Callable[[int], Awaitable[None]]


def build_relay(
    settings: Settings,
    store: Store,
    metrics: Metrics,
    *,
    head: int,
    bootstrap: BootstrapContents = BootstrapContents(),  # noqa: B008 - immutable
    trust: ProvenanceTrust = ProvenanceTrust(),  # noqa: B008 - immutable
    plugins: Plugins | None = None,
    clock: Callable[[], int] = lambda: int(time.time()),
    peers: Mapping[str, int] | None = None,
    target: TracesTarget | None = None,
    book: Book | None = None,
) -> RunningRelay:
    """Put a relay together on the running loop. `head` is the log's last sequence, `peers` maps the relays
    that this one has read from to their numbers, and `target` is where traces go. Without a target, no part
    on the way of a packet deals with traces. `book` is for processes whose peers are charged to the same
    accounts.

    Nothing runs yet: the caller runs `writer` and `tail`, opens `identities` and `types`, and closes both and
    `admission`.
    """
    faults = FaultLog(lambda place: metrics.faults[place].inc())
    slices = Slices(faults)
    tally, registry = Tally(), Registry(faults, slices)
    cursors = CursorCodec(store.secrets.cursor_key, store.known)

    def dispatched(delivered: int) -> None:
        tally.live_events += delivered
        registry.flush()

    # Two cycles are closed by functions that look up a name when they are called: the feed notifies
    # admission of new keys, and the writer answers what admission has handed over.
    identities = Identities(
        store.identities,
        bootstrap,
        key_rules(settings, bootstrap),
        on_change=lambda author, digest: admission.identity_applied(author, digest),
        faults=faults,
    )

    def judged_at() -> int:
        """The time as of which packets are judged: the one that the log will give."""
        return store.known.time_at(clock())

    budgets = TrustBudgets(store.identities, _trust_limits(settings), clock=judged_at, faults=faults)

    types = KnownTypes(store, faults)

    def passed(entries: Sequence[LogEntry]) -> None:
        identities.observe(entries)
        types.observe(entries)
        budgets.observe(entries)

    def enqueue(packet: NewPacket, request: PublishRequest) -> None:
        writer.put(packet, request, request.lane, request.held_bytes)

    def committed(appended: Appended, batch: Batch, seconds: float) -> None:
        commits.committed(appended, batch, seconds)

    seams = Seams(store, passed, dispatched, enqueue, committed)
    traces = None if target is None else Traces(target, settings, store.secrets.cursor_key, faults)
    if traces is not None:
        seams = traces.around(seams)
    make_fanout: Callable[..., Fanout] = Fanout if traces is None else traces.feed.fanout
    fanout = make_fanout(
        cursors,
        head,
        form=settings.provenance_downgrade,
        on_fault=lambda error: faults.caught("feed", error),
    )
    tail = Tail(
        fanout,
        seams.log,
        clock=clock,
        on_entries=seams.passed,
        is_dear=lambda entry: entry.packet.content_type in DECISIVE_TYPES,
        on_dispatch=seams.dispatched,
        faults=faults,
    )
    admission = Admission(
        enqueue=seams.enqueue,
        log=store,
        identities=identities,
        budgets=budgets,
        policy=Policy(),
        plugins=plugins or Plugins(),
        trust=trust,
        limits=AdmissionLimits.from_settings(settings),
        clock=judged_at,
        verify_threads=settings.verify_threads,
        on_verified=metrics.verify_seconds.observe,
        on_flush=registry.flush,
        faults=faults,
        on_refused=None if traces is None else traces.publishes.refused,
        publish_timeout=settings.publish_timeout,
        apart=ApartParser(
            max_bytes=settings.max_packet_bytes,
            max_depth=settings.max_json_depth,
            max_values=settings.max_json_values,
        ),
        slices=slices,
    )
    store.give_way(admission.is_busy)
    commits = Commits(admission, tail, metrics, on_flush=registry.flush, faults=faults, slices=slices)
    writer: Writer[PublishRequest] = Writer(
        store,
        on_commit=seams.committed,
        on_failed=commits.not_stored,
        # Twice the limit: connections stop reading before this, but packets they have read must fit too.
        max_pending_bytes=2 * settings.publish_queue_bytes,
        publish_timeout=settings.publish_timeout,
        clock=clock,
        keys=_KeyWatch(
            lambda: fanout.position,
            lambda request, now: admission.still_admitted(request, store.known.time_at(now)),
            tail.reach,
        ),
        marks=marks_of,
        faults=faults,
    )
    relay = RunningRelay(
        relay_id=relay_identity(settings, store).did,
        settings=settings,
        limits=_session_limits(settings, peers or {}),
        clock=clock,
        metrics=metrics,
        tally=tally,
        store=store,
        cursors=cursors,
        identities=identities,
        access=Access(settings, book),
        admission=admission,
        writer=writer,
        fanout=fanout,
        tail=tail,
        types=types,
        registry=registry,
        slices=slices,
        faults=faults,
        read_traces=None if traces is None else traces.reading,
    )
    apply_policy(relay, Policy.from_settings(settings))
    return relay


def relay_identity(settings: Settings, store: Store) -> Identity:
    """The relay's own identity: the configured one, else the one made with the database."""
    seed = settings.identity_seed
    return Identity.from_seed(bytes.fromhex(seed.removeprefix("0x")) if seed else store.secrets.identity_seed)


def _session_limits(settings: Settings, peers: Mapping[str, int]) -> SessionLimits:
    return SessionLimits(
        default_limit=settings.default_limit,
        max_limit=settings.max_limit,
        max_subscriptions=settings.max_subscriptions,
        max_filter_values=settings.max_filter_values,
        max_filter_bytes=settings.max_filter_bytes,
        malformed_limit=settings.malformed_limit,
        malformed_window=settings.malformed_window,
        peers=peers,
    )


def _trust_limits(settings: Settings) -> dict[TrustAct, int]:
    return {
        TrustAct.STRONG_EDGES: settings.strong_edges_per_day,
        TrustAct.WEAK_EDGES: settings.weak_edges_per_day,
        TrustAct.REVOCATIONS: settings.trust_revocations_per_day,
    }
