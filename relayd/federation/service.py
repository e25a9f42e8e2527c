"""All links of a relay: of the processes that share a database, one reads from the peers.

    another process leads ──lock──▶ leading: one task for each peer ──connection lost──▶ …

Each second the leading process looks at the table of peers. There an operator pauses a peer, forgives it or
sends a link back to the beginning, from any process (`relayd peers`).
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence

from strata.protocol.ids import Identity
from strata.relays.conduct import Aspect
from strata.relays.reconciling import PeerSession

from relayd.admission.pipeline import Admission
from relayd.faults import FaultLog
from relayd.federation.antientropy import DIFFERENCES, AntiEntropy
from relayd.federation.comparing import MOST_SKIPS
from relayd.federation.intake import PeerVerdict
from relayd.federation.link import PeerLink
from relayd.federation.link_parts import LinkEnded, LinkParts, LinkReports
from relayd.federation.mesh import Mesh
from relayd.federation.peers_file import Upstream
from relayd.federation.selection import stream_of
from relayd.federation.standings import KeptConduct, Standings
from relayd.logs import get_logger, problem_of
from relayd.metrics import Metrics
from relayd.store import Store
from relayd.store.peers import MOST_PROBLEM, PeerRow, PeerStore
from relayd.store.types import PeerMark, StoreError

__all__ = ["Federation"]

_log = get_logger("relayd.federation")

_LOOK_SECONDS = 1.0
_RETRY_SECONDS = (1.0, 30.0)
_WAITING_SKIPS = 20_000
"""The refusals of each peer that wait to be recorded: more than can come between two looks."""
_LEAD_SECONDS = 5.0
_LAST_WORDS_SECONDS = 2.0


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
        faults: FaultLog,
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
            noted=self._compared,
        )
        for peer in peers:
            for name in DIFFERENCES:  # Prometheus sees no growth in a counter that begins above zero
                metrics.peer_differences.labels(peer.relay_id, name)
        self._links: dict[int, PeerLink] = {}
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._standings = Standings()
        self._kept: set[int] = set()
        """Peers of which the database has a record: if the record is gone, an operator has forgiven them."""
        self._connects: dict[int, tuple[int, int]] = {}
        """The connections of the present link, made and failed, that were noted."""
        self._skips: dict[int, deque[tuple[bytes, int, str]]] = {}

    async def run(self) -> None:
        """Read from the peers until cancelled; outlasts any loss of the database."""
        while True:
            rows: list[PeerRow] = []
            try:
                if await self._table.take_lead():
                    _log.info("reads_from_peers", peers=len(self._peers))
                    await self._lead()
                rows = await self._table.rows()
            except StoreError as error:
                _log.warning("peers_not_read", problem=problem_of(error))
            except Exception as error:
                self._faults.caught("background", error)
            finally:
                self._measure_others({row.peer_id: row for row in rows})
                await self._table.close()
            await asyncio.sleep(_LEAD_SECONDS)

    async def _lead(self) -> None:
        groups = {peer.relay_id: peer.group for peer in self._peers.values()}
        mesh = Mesh(self._identity.did, groups, time.monotonic())
        self._standings.forget_written()  # another process may have led meanwhile
        try:
            await self._look(mesh)
        finally:
            await self._stop_all()
            # Record what happened on the links since the last look; a database that is away fails at once.
            with contextlib.suppress(StoreError, TimeoutError):
                async with asyncio.timeout(_LAST_WORDS_SECONDS):
                    await self._write_down()

    async def _look(self, mesh: Mesh) -> None:
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
        """Start or stop a link according to the table, and update the figures."""
        peer_id, link = row.peer_id, self._links.get(row.peer_id)
        await self._take_up(row)
        is_barred = self._standings.is_barred(peer_id, self._clock())
        wanted = not row.paused and not is_barred
        task = self._tasks.get(peer_id)
        if task is not None and (not wanted or (link is not None and link.fence != row.fence)):
            await self._stop(peer_id)
            state = "paused" if row.paused else "barred" if is_barred else "reset"
            await self._table.report(peer_id, state, None, self._clock())
            task = link = None
        if wanted and task is None:
            self._tasks[peer_id] = asyncio.create_task(
                self._keep(peer, peer_id, row.fence, mesh), name=f"peer {peer.relay_id}"
            )
        is_connected = link is not None and link.is_connected
        self._measure(peer, row, link, is_barred=is_barred, is_connected=is_connected)
        if link is not None:
            await self._tell(row, link)

    async def _tell(self, row: PeerRow, link: PeerLink) -> None:
        """Record the state of a link; if the link has ended, `_keep` records why."""
        problem = None if link.problem is None else link.problem[:MOST_PROBLEM]
        if link.is_connected:
            if row.state != "connected":
                await self._table.report(row.peer_id, "connected", None, self._clock())
        elif row.state == "connected" or problem not in (None, row.problem):
            await self._table.report(row.peer_id, "disconnected", problem, self._clock())

    def _measure(
        self, peer: Upstream, row: PeerRow, link: PeerLink | None, *, is_barred: bool, is_connected: bool
    ) -> None:
        metrics, did = self._metrics, peer.relay_id
        metrics.peer_barred.labels(did).set(is_barred)
        metrics.peer_paused.labels(did).set(row.paused)
        metrics.peer_connected.labels(did).set(is_connected)
        if (score := self._standings.score(row.peer_id)) is not None:
            metrics.peer_score.labels(did).set(score.value)
        if link is not None:
            self._note_connects(row.peer_id, link)
            if link.last_witness is not None:
                metrics.peer_last_witness.labels(did).set(link.last_witness)

    def _measure_others(self, rows: Mapping[int, PeerRow]) -> None:
        """Set the metrics from the table while another process reads from the peers, so that no alert is
        raised for a peer that is there."""
        metrics, now = self._metrics, self._clock()
        for peer_id, peer in self._peers.items():
            row, did = rows.get(peer_id), peer.relay_id
            metrics.peer_connected.labels(did).set(row is not None and row.state == "connected")
            if row is not None:
                metrics.peer_paused.labels(did).set(row.paused)
                metrics.peer_barred.labels(did).set(row.barred_until > now)
                if row.last_witness is not None:
                    metrics.peer_last_witness.labels(did).set(row.last_witness)

    async def _take_up(self, row: PeerRow) -> None:
        """Take up the stored record, at first and when an operator has forgiven the peer."""
        peer_id = row.peer_id
        is_forgiven = peer_id in self._kept and not row.has_conduct
        if self._standings.knows(peer_id) and not is_forgiven:
            return
        conduct = await self._table.conduct(peer_id)
        self._standings.take_up(
            peer_id, KeptConduct(row.offences, row.bars, row.barred_until, conduct), self._clock()
        )
        (self._kept.discard if conduct is None else self._kept.add)(peer_id)

    async def _keep(self, peer: Upstream, peer_id: int, fence: int, mesh: Mesh) -> None:
        """Keep one link running, whatever ends it."""
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
            pass  # the next look at the table notices that

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
        link = self._links[peer_id] = PeerLink(peer, peer_id, fence, place, parts)
        self._connects[peer_id] = (0, 0)
        try:
            await link.run()
        finally:
            self._links.pop(peer_id, None)
            self._note_connects(peer_id, link)

    def _reports(self, peer: Upstream, peer_id: int) -> LinkReports:
        packets, did = self._metrics.peer_packets, peer.relay_id
        counters = {verdict: packets.labels(did, verdict.value) for verdict in PeerVerdict}
        refused = self._metrics.peer_witnesses_refused.labels(did)
        skips = self._skips.setdefault(peer_id, deque(maxlen=_WAITING_SKIPS))

        def judged(verdict: PeerVerdict) -> None:
            counters[verdict].inc()
            if verdict is PeerVerdict.STORED:  # a known packet was not verified again
                self._note(peer_id, Aspect.VALIDITY, good=1)

        def misdated() -> None:
            refused.inc()
            self._note(peer_id, Aspect.CLOCK, bad=1)

        return LinkReports(
            verdicts=judged,
            refused_witness=misdated,
            malformed=lambda: self._note(peer_id, Aspect.FORM, bad=1),
            skipped=lambda packet_id, at, reason: skips.append((packet_id, at, reason)),
            forged=lambda reason: self._forged(peer, peer_id, reason),
            doubted=lambda: self._antientropy.doubt(peer_id),
        )

    def _compared(self, peer: Upstream, peer_id: int, kind: Aspect, is_good: bool) -> None:
        if kind is Aspect.PRESENCE and not is_good:
            what = "the peer names packets that it does not send"
            self._offended(peer, peer_id, kind, "named in two comparisons, sent in none", what)
        else:
            self._note(peer_id, kind, good=int(is_good), bad=int(not is_good))

    def _forged(self, peer: Upstream, peer_id: int, reason: str) -> None:
        what = "the peer sends packets whose ids are not those of their content"
        self._offended(peer, peer_id, Aspect.VALIDITY, reason, what)

    def _offended(self, peer: Upstream, peer_id: int, kind: Aspect, reason: str, what: str) -> None:
        """Note one piece of evidence against the peer."""
        self._note(peer_id, kind, bad=1)
        is_barred = self._standings.is_barred(peer_id, self._clock())
        _log.warning(
            "peer_forged" if kind is Aspect.VALIDITY else "peer_withholds",
            peer=peer.relay_id,
            reason=reason,
            barred_until=self._standings.barred_until(peer_id) if is_barred else 0,
        )
        if is_barred and (link := self._links.get(peer_id)) is not None:
            link.end(what)

    def _note(
        self, peer_id: int, kind: Aspect, *, good: int = 0, bad: int = 0, value: float | None = None
    ) -> None:
        self._standings.note(peer_id, kind, self._clock(), good, bad, value)

    def _note_connects(self, peer_id: int, link: PeerLink) -> None:
        counts = link.statistics
        before = self._connects[peer_id]
        made, failed = now = (counts.connections, counts.connections_failed + counts.connections_lost)
        if now != before:
            self._connects[peer_id] = now
            self._note(peer_id, Aspect.CONNECT, good=made - before[0], bad=failed - before[1])

    async def _write_down(self) -> None:
        for peer_id in self._peers:
            if (kept := self._standings.to_write(peer_id, self._clock())) is not None:
                await self._keep_conduct(peer_id, kept)
        for peer_id, skips in list(self._skips.items()):  # a link may begin meanwhile
            if skips:
                some = list({skip[0]: skip for skip in skips}.values())
                skips.clear()
                try:
                    await self._table.skip(peer_id, some, MOST_SKIPS)
                except BaseException:  # including a cancellation at the stop
                    # The cursor is past these packets, so the peer sends them no more: keep them.
                    skips.extendleft(reversed(some[: _WAITING_SKIPS - len(skips)]))
                    raise

    async def _keep_conduct(self, peer_id: int, kept: KeptConduct) -> None:
        link = self._links.get(peer_id)
        if link is not None and (seconds := link.round_trip) is not None:
            self._note(peer_id, Aspect.PING, good=1, value=seconds)  # for the next time
        try:
            done = await self._table.keep_conduct(
                peer_id,
                kept.offences,
                kept.bars,
                kept.barred_until,
                kept.conduct,
                follows=peer_id in self._kept,
            )
        except BaseException:
            self._standings.not_written(peer_id)
            raise
        if done:
            self._kept.add(peer_id)
        else:  # the peer was forgiven meanwhile
            self._standings.forget(peer_id)

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
