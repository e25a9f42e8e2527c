"""The life of a relay process: start in order, serve, drain, stop in order.

    database up ─ migrated ─ safe ─ store open ─ feed at the log's head ─ sockets ─ ready
    draining ─ publishes answered ─ sockets closed with 1001 ─ feed and writer stopped ─ database down

This is one process. `workers` runs several of them on one port, and `daemon` chooses.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
import threading
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from typing import TYPE_CHECKING, Final

from strata.protocol.ids import Identity
from strata.protocol.streams import forget_stdout

from relayd import failpoints
from relayd.access.ledger import Books, Ledger
from relayd.config import Settings
from relayd.federation.peers_file import Upstream, read_peers
from relayd.identity.bootstrap import read_bootstrap, trust_of
from relayd.lineage import Claim
from relayd.logs import get_logger, problem_of
from relayd.metrics import Metrics
from relayd.policy import Plugins
from relayd.postgres.scheduling import ask_for_short_turns
from relayd.process.beside import beside
from relayd.process.builder import build_relay, relay_identity
from relayd.process.machine_reports import MachineReports, machines_of
from relayd.process.neighbours import Neighbours
from relayd.process.relay_tasks import Announce, Post, Serving
from relayd.process.reloading import CurrentSettings
from relayd.relay import RunningRelay
from relayd.store import Store
from relayd.store.guard import Guard
from relayd.store.types import StoreError
from relayd.tls import ServerTls, ends_at, make_certificate, read_tls_files
from relayd.tracing.traces import open_target

if TYPE_CHECKING:
    from relayd.federation.service import Federation

__all__ = ["print_ready", "serve"]

_log = get_logger("relayd.server")

_ANEW_PAUSE: Final = 0.5


def print_ready(addresses: dict[str, str]) -> None:
    """Print the one line on stdout that says where the relay is. Serving goes on if it cannot be written."""
    line = json.dumps({"event": "ready", **addresses}, separators=(",", ":")) + "\n"
    threading.Thread(target=_tell, args=(line,), name="ready", daemon=True).start()  # nobody may be reading


def _tell(line: str) -> None:
    try:
        os.write(sys.stdout.fileno(), line.encode())
    except OSError as error:  # the starter of the relay is gone, or the disk is full
        forget_stdout()
        _log.warning("ready_not_told", problem=problem_of(error))


async def serve(
    settings: Settings,
    database_url: str,
    *,
    announce: Announce,
    stop: asyncio.Event,
    post: Post | None = None,
) -> None:
    """Serve one process on a migrated database until `stop` is set, then drain.

    `post` describes the process's place among the workers of a machine; a single process listens on the
    settings' port. If the database is replaced by an older copy meanwhile, the relay begins anew with that
    copy as soon as it can.

    Raises `StoreError`, `PortTaken`, `TlsError` or `ConfigurationError` if it cannot start. Cancelling it
    stops without draining.
    """
    metrics = Metrics()
    plugins = Plugins.from_settings(settings, on_verdict=metrics.plugin_said)
    files = await beside(make_certificate, settings)
    tls = None if files is None else ServerTls(await beside(read_tls_files, files.cert, files.key))
    metrics.tls_not_after.set(await beside(ends_at, files))
    claim: Claim | None = None
    has_served = False
    problem: str | None = None
    current = CurrentSettings(settings, tls, metrics)
    ports: dict[str, int] = {}  # ports chosen by the system are kept

    async def begin(announce: Announce, written: Callable[[], None]) -> Claim:
        return await _serve(
            current,
            database_url,
            metrics=metrics,
            plugins=plugins,
            tls=tls,
            claim=claim,
            announce=announce,
            written=written,
            stop=stop,
            ports=ports,
            post=post,
        )

    try:
        while True:
            try:
                to_tell = (lambda addresses: None) if has_served else announce
                claim = await _unless_stopped(begin, to_tell, stop, knows_of_loss=has_served)
                has_served = True
                problem = None
            except StoreError as error:
                if not has_served:
                    raise
                # Another database was at the address a moment ago, and it has been served: wait for it. What
                # is there now may be a standby, or a server that is not safe. And ending would lose what
                # this process knows of the log that was lost.
                if problem_of(error) != problem:
                    problem = problem_of(error)
                    _log.warning("cannot_serve_yet", problem=problem)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_ANEW_PAUSE):
                    await stop.wait()
            if stop.is_set():
                return
    finally:
        plugins.close()


async def _unless_stopped(
    begin: Callable[[Announce, Callable[[], None]], Coroutine[object, object, Claim]],
    announce: Announce,
    stop: asyncio.Event,
    *,
    knows_of_loss: bool,
) -> Claim | None:
    """Serve; or return None if `stop` is set before the relay listens. There are no clients then to take
    leave of, and reading the keys of a large log, or waiting for the lock of another process, takes long.
    What a process knows of a log that was lost is written down first."""
    is_listening = False
    written = asyncio.Event()
    if not knows_of_loss:
        written.set()

    def announced(addresses: dict[str, str]) -> None:
        nonlocal is_listening
        is_listening = True
        announce(addresses)

    async def may_end() -> None:
        await stop.wait()
        await written.wait()

    serving = asyncio.create_task(begin(announced, written.set), name="serve")
    stopped = asyncio.create_task(may_end(), name="stop")
    try:
        await asyncio.wait((serving, stopped), return_when=asyncio.FIRST_COMPLETED)
        if not is_listening and not serving.done():
            return None
        return await serving
    finally:
        for task in (serving, stopped):
            task.cancel()
        await asyncio.gather(serving, stopped, return_exceptions=True)


async def _serve(
    current: CurrentSettings,
    database_url: str,
    *,
    metrics: Metrics,
    plugins: Plugins,
    tls: ServerTls | None,
    claim: Claim | None,
    announce: Announce,
    written: Callable[[], None],
    stop: asyncio.Event,
    ports: dict[str, int],
    post: Post | None,
) -> Claim:
    """Serve until `stop` is set, or until the log has lost its end; return what is known of the log.

    All that memory holds of the log is wrong then, so the caller makes everything anew, in the same process
    and on the same port. `written` is called once the database has what `claim` says.
    """
    settings = current.settings
    bootstrap = await beside(read_bootstrap, settings.bootstrap_file)
    if failpoints.ARMED:
        await failpoints.reached("server.start")
    store = await _open_store(settings, database_url, metrics)
    try:
        guard = Guard(settings.log_guard or settings.data_dir / "log-guard", store.secrets.cursor_key)
        claims = [claim, await asyncio.to_thread(guard.read)]
        await store.begin([claim for claim in claims if claim is not None])
        written()
        identity = relay_identity(settings, store)
        upstreams = await beside(partial(read_peers, settings.peers_file, own_id=identity.did))
        numbers = await store.register_peers([(peer.relay_id, peer.url) for peer in upstreams])
        if not settings.retention_requires_archive:
            await store.maintain()
        place = None if post is None else post.place
        ledger = None if place is None else Ledger(place.number)
        machines = machines_of(settings, place)
        target = open_target(settings, identity.did, lambda what, n: metrics.trace_spans[what].inc(n))
        relay = build_relay(
            settings,
            store,
            metrics,
            peers=numbers,
            head=await store.head(),
            bootstrap=bootstrap,
            trust=trust_of(settings, bootstrap),
            plugins=plugins,
            target=target,
            book=Books(*(book for book in (ledger, machines) if book is not None)),
        )
        try:
            await relay.identities.open()
            relay.types.open()
            neighbours = reports = None
            if place is not None and ledger is not None:
                neighbours = Neighbours(place, ledger, relay.faults)
            if machines is not None:
                reports = MachineReports(machines, store.report, relay.faults)
            serving = Serving(
                relay,
                current,
                tls=tls,
                bootstrap=bootstrap,
                guard=guard,
                ports=ports,
                post=post,
                identity=identity,
                federation=_federation(relay, upstreams, numbers, database_url, identity),
                neighbours=neighbours,
                machines=reports,
            )
            await serving.run(announce, stop)
            return store.known.claim
        finally:
            await relay.admission.close()
            await relay.identities.close()
            await relay.types.close()
            if target is not None:
                await asyncio.to_thread(target.close)
    finally:
        await store.close()


async def _open_store(settings: Settings, database_url: str, metrics: Metrics) -> Store:
    return await Store.open(
        database_url,
        read_url=settings.read_database_url,
        read_connections=settings.read_connections,
        read_timeout=settings.read_timeout,
        append_timeout=settings.publish_timeout,
        retention_days=settings.retention_days,
        dedup_window_seconds=settings.dedup_window_seconds,
        archive_manifests=settings.archive_manifests if settings.retention_requires_archive else None,
        on_retention_waiting=metrics.retention_waits,
        on_replica=lambda outcome: metrics.replica_reads[outcome].inc(),
        # Only for a server of our own is it certain that its process ids are those of this machine.
        on_backend=ask_for_short_turns if settings.database_url is None else lambda pid: None,
        allow_unsafe=settings.allow_unsafe_database,
    )


def _federation(
    relay: RunningRelay, upstreams: Sequence[Upstream], numbers: dict[str, int], url: str, identity: Identity
) -> Federation | None:
    """The part that reads from other relays; None if there are none to read from."""
    if not upstreams:
        return None
    from relayd.federation.service import Federation  # imports the client, which takes a tenth of a start

    settings = relay.settings
    return Federation(
        upstreams,
        numbers,
        url=url,
        identity=identity,
        store=relay.store,
        admission=relay.admission,
        metrics=relay.metrics,
        faults=relay.faults,
        clock=relay.clock,
        max_backfill_seconds=settings.max_backfill_seconds,
        reconcile_interval=settings.reconcile_interval,
        reconcile_max_items=settings.reconcile_max_items,
    )
