"""All links of a relay: one process of those that share a database reads from the peers.

    another process leads ──lock──▶ leading: one task for each peer ──connection lost──▶ …

Each second the table of peers is looked at: an operator pauses a peer, forgives one or sends a link back to
the beginning there, from any process (`relayd peers`).
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Sequence

import structlog
from strata.protocol.ids import Identity
from strata.relays.reconciling import PeerSession

from relayd.admission.pipeline import Admission
from relayd.faults import Faults
from relayd.federation.antientropy import AntiEntropy
from relayd.federation.comparing import MOST_SKIPS
from relayd.federation.intake import PeerVerdict
from relayd.federation.link import Link, LinkEnded, LinkParts, LinkReports
from relayd.federation.mesh import Mesh
from relayd.federation.peers_file import Upstream
from relayd.federation.selection import stream_of
from relayd.federation.standing import Standing
from relayd.logs import problem_of
from relayd.metrics import Metrics
from relayd.store import Store
from relayd.store.peers import PeerRow, PeerStore
from relayd.store.types import PeerMark, StoreError

__all__ = ["Federation"]

_log = structlog.get_logger("relayd.federation")

_LOOK_SECONDS = 1.0
_RETRY_SECONDS = (1.0, 30.0)
_WAITING_SKIPS = 1000
_LEAD_SECONDS = 5.0


class Federation:
    """Reads from every peer for as long as `run` runs."""

    def __init__(
        self,
        peers: Sequence[Upstream],
        numbers: dict[str, int],
        *,
        url: str,
        identity: Identity,
        store: Store,
        admission: Admission,
        metrics: Metrics,
        faults: Faults,
        clock: Callable[[], int],
        max_backfill_seconds: int,
        reconcile_interval: float,
        reconcile_max_items: int,
    ) -> None:
        self._peers = {numbers[peer.relay_id]: peer for peer in peers}
        self._table = PeerStore(url)
        self._identity = identity
        self._store = store
        self._admission = admission
        self._metrics = metrics
        self._faults = faults
        self._clock = clock
        self._max_backfill_seconds = max_backfill_seconds
        self._antientropy = AntiEntropy(
            connect=lambda peer: PeerSession(peer.url, identity, relay_id=peer.relay_id),
            store=store,
            table=self._table,
            metrics=metrics,
            faults=faults,
            clock=clock,
            interval=reconcile_interval,
            max_items=reconcile_max_items,
            max_backfill_seconds=max_backfill_seconds,
            withheld=self._withheld,
        )
        self._links: dict[int, Link] = {}
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._standings: dict[int, Standing] = {}
        self._held: dict[int, Standing] = {}
        """Standings that have changed and are not written yet."""
        self._skips: dict[int, deque[tuple[bytes, int, str]]] = {}

    async def run(self) -> None:
        """Read from the peers until cancelled; outlasts any loss of the database."""
        while True:
            try:
                if await self._table.take_lead():
                    _log.info("reads_from_peers", peers=len(self._peers))
                    await self._lead()
            except StoreError as error:
                _log.warning("peers_not_read", problem=problem_of(error))
            except Exception as error:
                self._faults.caught("background", error)
            finally:
                await self._stop_all()
                await self._table.close()
            await asyncio.sleep(_LEAD_SECONDS)

    async def _lead(self) -> None:
        groups = {peer.relay_id: peer.group for peer in self._peers.values()}
        mesh = Mesh(self._identity.did, groups, time.monotonic())
        while True:
            rows = {row.peer_id: row for row in await self._table.rows()}
            comparisons = await self._table.comparisons()
            for peer_id, peer in self._peers.items():
                if (row := rows.get(peer_id)) is not None:
                    await self._look_after(peer, row, mesh)
                    self._antientropy.look_after(
                        peer, peer_id, self._links.get(peer_id), comparisons.get(peer_id)
                    )
            await self._write_down()
            await asyncio.sleep(_LOOK_SECONDS)

    async def _look_after(self, peer: Upstream, row: PeerRow, mesh: Mesh) -> None:
        """Start or stop a link as the table says, and keep the figures."""
        peer_id, link = row.peer_id, self._links.get(row.peer_id)
        if peer_id not in self._held:
            self._standings[peer_id] = Standing(row.offences, row.bars, row.barred_until)
        wanted = not row.paused and not self._standings[peer_id].is_barred(self._clock())
        task = self._tasks.get(peer_id)
        if task is not None and (not wanted or (link is not None and link.fence != row.fence)):
            await self._stop(peer_id)
            await self._table.report(peer_id, "paused" if row.paused else "barred", None, self._clock())
            task = None
        if wanted and task is None:
            self._tasks[peer_id] = asyncio.create_task(
                self._keep(peer, peer_id, row.fence, mesh), name=f"peer {peer.relay_id}"
            )
        did, is_barred = peer.relay_id, self._standings[peer_id].is_barred(self._clock())
        self._metrics.peer_barred.labels(did).set(is_barred)
        self._metrics.peer_paused.labels(did).set(row.paused)
        is_connected = link is not None and link.is_connected
        self._metrics.peer_connected.labels(peer.relay_id).set(is_connected)
        if link is not None and link.last_witness is not None:
            self._metrics.peer_last_witness.labels(peer.relay_id).set(link.last_witness)
        if is_connected and row.state != "connected":
            await self._table.report(peer_id, "connected", None, self._clock())

    async def _keep(self, peer: Upstream, peer_id: int, fence: int, mesh: Mesh) -> None:
        """Keep one link, across all that ends it."""
        pause = _RETRY_SECONDS[0]
        while True:
            began = time.monotonic()
            try:
                await self._read(peer, peer_id, fence, mesh)
            except (LinkEnded, StoreError) as error:
                problem = str(error)
                _log.warning("peer_not_read", peer=peer.relay_id, problem=problem)
                await self._say(peer_id, problem)
            except Exception as error:
                self._faults.caught("background", error)
            pause = _RETRY_SECONDS[0] if time.monotonic() - began > 60 else min(pause * 2, _RETRY_SECONDS[1])
            await asyncio.sleep(pause)

    async def _say(self, peer_id: int, problem: str) -> None:
        try:
            await self._table.report(peer_id, "disconnected", problem, self._clock())
        except StoreError:
            pass  # the next look at the table finds that out

    async def _read(self, peer: Upstream, peer_id: int, fence: int, mesh: Mesh) -> None:
        place = await self._table.place(peer_id, stream_of(peer))
        parts = LinkParts(
            identity=self._identity,
            admission=self._admission,
            mesh=mesh,
            store_mark=self._store_mark,
            clock=self._clock,
            max_backfill_seconds=self._max_backfill_seconds,
            told=self._reports(peer, peer_id),
        )
        link = self._links[peer_id] = Link(peer, peer_id, fence, place, parts)
        try:
            await link.run()
        finally:
            self._links.pop(peer_id, None)

    def _reports(self, peer: Upstream, peer_id: int) -> LinkReports:
        packets, did = self._metrics.peer_packets, peer.relay_id
        counters = {verdict: packets.labels(did, verdict.value) for verdict in PeerVerdict}
        refused = self._metrics.peer_witnesses_refused.labels(did)
        skips = self._skips.setdefault(peer_id, deque(maxlen=_WAITING_SKIPS))
        return LinkReports(
            verdicts=lambda verdict: counters[verdict].inc(),
            refused_witness=refused.inc,
            skipped=lambda packet_id, at, reason: skips.append((packet_id, at, reason)),
            forged=lambda reason: self._forged(peer, peer_id, reason),
            doubted=lambda: self._antientropy.doubt(peer_id),
        )

    def _withheld(self, peer: Upstream, peer_id: int) -> None:
        what = "the peer names packets that it does not send"
        self._offended(peer, peer_id, "peer_withholds", "named in two comparisons, sent in none", what)

    def _forged(self, peer: Upstream, peer_id: int, reason: str) -> None:
        what = "the peer sends packets that their authors did not sign"
        self._offended(peer, peer_id, "peer_forged", reason, what)

    def _offended(self, peer: Upstream, peer_id: int, event: str, reason: str, what: str) -> None:
        now = self._clock()
        standing = self._standings.get(peer_id, Standing()).offended(now)
        self._standings[peer_id] = self._held[peer_id] = standing
        _log.warning(event, peer=peer.relay_id, reason=reason, barred_until=standing.barred_until)
        if standing.is_barred(now) and (link := self._links.get(peer_id)) is not None:
            link.end(what)

    async def _write_down(self) -> None:
        for peer_id, standing in list(self._held.items()):
            await self._table.hold_against(peer_id, standing.offences, standing.bars, standing.barred_until)
            if self._held.get(peer_id) is standing:
                del self._held[peer_id]
        for peer_id, skips in self._skips.items():
            if skips:
                some = list({skip[0]: skip for skip in skips}.values())
                skips.clear()
                await self._table.skip(peer_id, some, MOST_SKIPS)

    async def _store_mark(self, mark: PeerMark) -> None:
        await self._store.append([], self._clock(), None, [mark])

    async def _stop(self, peer_id: int) -> None:
        await self._antientropy.stop(peer_id)
        task = self._tasks.pop(peer_id)
        task.cancel()
        await asyncio.wait([task])

    async def _stop_all(self) -> None:
        await self._antientropy.stop_all()
        for peer_id in list(self._tasks):
            await self._stop(peer_id)
        for peer in self._peers.values():
            self._metrics.peer_connected.labels(peer.relay_id).set(0)
