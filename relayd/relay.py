"""The relay of one process: the parts that all its connections share. `builder` makes it.

Each part owns one piece of mutable state: `Fanout` the live subscriptions, `Tail` the position in the log,
`Admission` the publishes in progress, the `Writer` the open batch, `Registry` the open sockets. All of it
runs on the event loop, whose turns `Slices` keeps short; only signature checks leave it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from relayd.access.gate import Access
from relayd.access.limits import SessionLimits
from relayd.admission.pipeline import Admission
from relayd.admission.request import PublishRequest
from relayd.config import Settings
from relayd.cursor import CursorCodec
from relayd.faults import FaultLog
from relayd.feed.fanout import Fanout
from relayd.feed.known_types import KnownTypes
from relayd.feed.tail import Tail
from relayd.identity.directory import Identities
from relayd.metrics import Metrics, Tally
from relayd.sessions.open_comparisons import Comparisons
from relayd.sessions.registry import Registry
from relayd.slices import Slices
from relayd.store import Store, Writer
from relayd.tracing.reading import ReadTraces

__all__ = ["RunningRelay"]


@dataclass(slots=True, kw_only=True)
class RunningRelay:
    """One relay process between its store and its connections."""

    relay_id: str
    """The relay's own DID."""
    settings: Settings
    """The settings at startup. Each part keeps its own copy of what SIGHUP may change."""
    limits: SessionLimits
    clock: Callable[[], int]
    """Unix seconds."""
    metrics: Metrics
    tally: Tally
    store: Store
    cursors: CursorCodec
    identities: Identities
    access: Access
    admission: Admission
    writer: Writer[PublishRequest]
    fanout: Fanout
    tail: Tail
    types: KnownTypes
    registry: Registry
    slices: Slices
    faults: FaultLog
    read_traces: ReadTraces | None = None
    """The traces of reads from the store; None without tracing."""
    comparisons: Comparisons = field(default_factory=Comparisons)
