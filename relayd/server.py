"""The life of a relay process: start in order, serve, drain, stop in order.

    database up ─ migrated ─ safe ─ store open ─ feed at the log's head ─ sockets ─ ready
    draining ─ publishes answered ─ sockets closed with 1001 ─ feed and writer stopped ─ database down

This is one process. `workers` runs several of them on one port, and `daemon` chooses.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import errno
import gc
import json
import os
import signal
import ssl
import sys
import time
from collections.abc import AsyncIterator, Callable
from typing import Final

import structlog

from relayd import failpoints
from relayd.accepting import Listener, bind
from relayd.access.memory import MemoryCeiling, Pressure
from relayd.builder import build_relay, relay_identity
from relayd.config import ConfigurationError, Settings
from relayd.database_watch import watch_database
from relayd.federation.peers_file import read_peers
from relayd.federation.service import Federation
from relayd.files import room_for_sockets
from relayd.gauges import Gauges
from relayd.http.api import HttpApi, MetricsApi
from relayd.http.console import WebConsole
from relayd.http.identities import IdentityApi
from relayd.http.manifest import build_manifest
from relayd.http.scrapes import Scrapes
from relayd.identity.bootstrap import Bootstrap, read_bootstrap, trust_of
from relayd.lineage import Claim
from relayd.logs import problem_of
from relayd.loop_watch import LoopWatch
from relayd.memory import default_limit, give_back, resident_bytes
from relayd.metrics import Metrics
from relayd.moderation import Bans
from relayd.policy import BanFollower, Plugins, Policy, apply_policy
from relayd.postgres import EmbeddedPostgres
from relayd.relay import Relay
from relayd.reloading import read_again, report
from relayd.sessions.connection import Connection
from relayd.sessions.http_requests import HttpResponder
from relayd.store import Store
from relayd.store.guard import Guard
from relayd.store.migrate import migrate
from relayd.store.peers import register_peers
from relayd.store.types import AbuseEntry, StoreError, StoreUnavailable
from relayd.tls import ServerTls, TlsError, make_certificate, read_tls_files

__all__ = [
    "PortTaken",
    "database",
    "print_ready",
    "serve",
    "stop_on_signals",
]

_log = structlog.get_logger("relayd.server")

_SWEEP_INTERVAL: Final = 1.0
_SWEEP_PARTS: Final = 20
_SWITCH_INTERVAL: Final = 0.0005
_COLLECTOR_THRESHOLDS: Final = (10_000, 5, 40)
_MEMORY_INTERVAL: Final = 0.5
_LOOKS_PER_LIMIT: Final = 64
_MAINTENANCE_INTERVAL: Final = 600.0
_GOING_AWAY: Final = "the relay is going away; resume by cursor"
_WAVE_SECONDS: Final = 0.5
_CLOSED_PER_SECOND: Final = 100
_CLOSE_TIMEOUT: Final = 5.0
_LOST_CLOSE_TIMEOUT: Final = 1.0
_ANEW_PAUSE: Final = 0.5
_GUARD_INTERVAL: Final = 10.0

Announce = Callable[[dict[str, str]], None]


class PortTaken(Exception):
    """The address to listen on cannot be had."""


def print_ready(addresses: dict[str, str]) -> None:
    """Print the one line on stdout that says where the relay is."""
    print(json.dumps({"event": "ready", **addresses}, separators=(",", ":")), flush=True)


def stop_on_signals(*numbers: signal.Signals) -> asyncio.Event:
    """An event set by these signals (SIGTERM and SIGINT); one that comes later ends the process at once.

    Supervisors often signal a process and its group: signals within the first second are one request.
    """
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    stopped_at = 0.0

    def received() -> None:
        nonlocal stopped_at
        if not stop.is_set():
            stopped_at = loop.time()
            stop.set()
        elif loop.time() - stopped_at > 1.0:
            _log.warning("stopping_at_once")
            os._exit(1)

    for number in numbers or (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, received)
    return stop


@contextlib.asynccontextmanager
async def database(settings: Settings, stop: asyncio.Event | None = None) -> AsyncIterator[str]:
    """The URL of a migrated database: the one given, or an embedded server that lives inside this context.

    Raises `StoreError` when it cannot be reached or is newer than this program. An embedded server that dies
    inside the block is brought back. An error of ours in doing so sets `stop` and is raised at the end.
    """
    if settings.database_url is not None:
        await migrate(settings.database_url)
        yield settings.database_url
        return
    async with EmbeddedPostgres(settings.data_dir) as server:
        supervisor = asyncio.create_task(server.supervise(), name="embedded-postgres")
        if stop is not None:
            supervisor.add_done_callback(lambda _: stop.set())
        try:
            await migrate(server.url)
            yield server.url
        finally:
            if supervisor.done():
                supervisor.result()
            supervisor.cancel()
            await asyncio.gather(supervisor, return_exceptions=True)


async def serve(
    settings: Settings,
    database_url: str,
    *,
    announce: Announce,
    stop: asyncio.Event,
    shared_port: int | None = None,
    leaves_port: Callable[[], bool] = lambda: False,
) -> None:
    """Serve one process on a migrated database until `stop` is set, then drain.

    `shared_port` is the port that several workers listen on; alone, a process listens on the settings' port.
    `leaves_port` is asked when it drains: True leaves new connections to the others on that port at once.
    When the database is replaced by an older copy meanwhile, the relay begins anew with that.
    Raises `StoreError`, `PortTaken`, `TlsError` or `ConfigurationError` when it cannot start. Cancelling it
    stops without draining.
    """
    metrics = Metrics()
    plugins = Plugins.from_settings(settings, on_verdict=metrics.plugin_said)
    files = make_certificate(settings)
    tls = None if files is None else ServerTls(read_tls_files(files.cert, files.key))
    served: _Served | None = None
    ports: dict[str, int] = {}  # those that were chosen stay chosen
    try:
        while True:
            try:
                served = await _serve(
                    served.settings if served else settings,
                    database_url,
                    metrics=metrics,
                    plugins=plugins,
                    tls=tls,
                    claim=served.claim if served else None,
                    announce=announce if served is None else lambda addresses: None,
                    stop=stop,
                    shared_port=shared_port,
                    leaves_port=leaves_port,
                    ports=ports,
                )
            except StoreUnavailable:
                if served is None:
                    raise
                # Another database stood behind the address a moment ago, and it has been served: wait for it.
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(stop.wait(), _ANEW_PAUSE)
            if stop.is_set():
                return
    finally:
        plugins.close()


@dataclasses.dataclass(frozen=True, slots=True)
class _Served:
    """What is left of a relay whose database was replaced by an older copy."""

    settings: Settings
    """The settings of now."""
    claim: Claim
    """What the relay knew of the log."""


async def _serve(
    settings: Settings,
    database_url: str,
    *,
    metrics: Metrics,
    plugins: Plugins,
    tls: ServerTls | None,
    claim: Claim | None,
    announce: Announce,
    stop: asyncio.Event,
    shared_port: int | None,
    leaves_port: Callable[[], bool],
    ports: dict[str, int],
) -> _Served:
    """Serve until `stop` is set, or until the log has lost its end. All that is kept of it in memory is wrong
    then, so the caller makes everything anew, in the same process and on the same port."""
    bootstrap = read_bootstrap(settings.bootstrap_file)
    if failpoints.ARMED:
        await failpoints.reached("server.start")
    store = await Store.open(
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
        allow_unsafe=settings.allow_unsafe_database,
    )
    try:
        guard = Guard(settings.log_guard or settings.data_dir / "log-guard", store.secrets.cursor_key)
        claims = [claim, await asyncio.to_thread(guard.read)]
        await store.begin([claim for claim in claims if claim is not None])
        if not settings.retention_requires_archive:
            await store.maintain(int(time.time()))
        identity = relay_identity(settings, store)
        upstreams = read_peers(settings.peers_file, own_id=identity.did)
        named = [(peer.relay_id, peer.url) for peer in upstreams]
        numbers = await register_peers(database_url, named)
        relay = build_relay(
            settings,
            store,
            metrics,
            peers=numbers,
            head=await store.head(),
            bootstrap=bootstrap,
            trust=trust_of(settings, bootstrap),
            plugins=plugins,
        )
        await relay.identities.open()
        federation = None
        if upstreams:
            federation = Federation(
                upstreams,
                numbers,
                url=database_url,
                identity=identity,
                store=store,
                admission=relay.admission,
                metrics=metrics,
                faults=relay.faults,
                clock=relay.clock,
                max_backfill_seconds=settings.max_backfill_seconds,
            )
        process = _Process(settings, store, relay, metrics, tls, bootstrap, guard, ports, federation)
        try:
            await process.run(announce, stop, shared_port, leaves_port)
            return _Served(process.settings, store.known.claim)
        finally:
            await relay.admission.close()
            await relay.identities.close()
    finally:
        await store.close()


def _calm_the_collector() -> None:
    """Let the cycle collector run less often, and never again over what there is at start.

    Packets are freed as their last reference goes; a connection that has ended is the one cycle there is. A
    full collection beside thousands of connections holds every publisher up for a fifth of a second.
    """
    # A verify thread that works through a large packet gives way to the loop after this time, each time the
    # loop comes back from the network; Python's own 5 ms add up to a second for everybody else.
    sys.setswitchinterval(_SWITCH_INTERVAL)
    gc.collect()
    gc.freeze()
    gc.set_threshold(*_COLLECTOR_THRESHOLDS)


class _Process:
    """The sockets and background tasks of one relay process."""

    def __init__(
        self,
        settings: Settings,
        store: Store,
        relay: Relay,
        metrics: Metrics,
        tls: ServerTls | None,
        bootstrap: Bootstrap,
        guard: Guard,
        ports: dict[str, int],
        federation: Federation | None,
    ) -> None:
        self._settings = settings
        self._federation = federation
        self._ports = ports
        self._guard = guard
        self._guard_failed = False
        self._bootstrap = bootstrap
        self._store = store
        self._relay = relay
        self._metrics = metrics
        self._loop_watch = LoopWatch(metrics)
        self._tls = tls
        self._database_up = True
        self._is_serving = asyncio.Event()
        self._abuse: list[AbuseEntry] = []
        self._rulings = BanFollower(
            store.moderation, clock=relay.clock, on_change=self._ruled, faults=relay.faults
        )
        self._listeners: list[Listener] = []
        self._ws_url = ""
        self._scrapes = Scrapes(self._count, metrics.render)
        self._described: tuple[Settings, Bans, str, dict[str, object]] | None = None
        self._relay_id = relay.relay_id
        self._gauges = Gauges(
            metrics, relay.access, relay.faults, settings=lambda: self._settings, sizes=store.sizes
        )

    @property
    def settings(self) -> Settings:
        """The settings of now."""
        return self._settings

    async def run(
        self,
        announce: Announce,
        stop: asyncio.Event,
        shared_port: int | None,
        leaves_port: Callable[[], bool] = lambda: False,
    ) -> None:
        """Serve until `stop` is set, or until the store finds that its log is lost."""
        relay = self._relay
        await self._store.listen(relay.tail.ring, self._rulings.ring)
        await self._rulings.look()  # nobody is served before it is known what is banned
        jobs: list[asyncio.Task[object]] = [
            asyncio.create_task(coroutine, name=name)
            for name, coroutine in (
                ("writer", relay.writer.run()),
                ("tail", relay.tail.run()),
                ("loop", self._watch_loop()),
                ("sweep", self._sweep()),
                ("health", watch_database(self._store.ping, self._database_is, relay.faults)),
                ("maintenance", self._maintain()),
                ("policy", self._refresh_policy()),
                ("rulings", self._rulings.run()),
                ("memory", self._watch_memory()),
                ("guard", self._keep_guard()),
                ("gauges", self._gauges.run()),
            )
        ]
        reading = None
        if self._federation is not None:
            reading = asyncio.create_task(self._federation.run(), name="federation")
            jobs.append(reading)
        try:
            announce(self._listen(shared_port))
            _calm_the_collector()
            self._is_serving.set()
            _log.info("serving", relay_id=self._relay_id, url=self._ws_url)
            stopped = asyncio.create_task(stop.wait(), name="stop")
            lost = asyncio.create_task(self._store.lost.wait(), name="lost")
            jobs += [stopped, lost]
            done, _ = await asyncio.wait(jobs, return_when=asyncio.FIRST_COMPLETED)
            for job in done - {stopped, lost}:
                job.result()  # a background task that ends is our bug: let its exception out
            if lost in done:
                _log.error("log_lost_its_end", consequence="all connections are closed; clients resume")
                relay.registry.close_all(1012, "the log was replaced; resume by cursor")
                await relay.registry.settle(lambda: not relay.registry, _LOST_CLOSE_TIMEOUT)
                return
            if leaves_port():
                for listener in self._listeners:
                    listener.close()
            if reading is not None:  # what peers send would be publishes under way, without end
                jobs.remove(reading)
                reading.cancel()
                await asyncio.wait([reading])
            await self._drain()
            await self._write_guard()
        finally:
            for listener in self._listeners:
                listener.close()
            for socket in list(relay.registry.sockets):
                socket.abort()
            for job in jobs:
                job.cancel()
            await asyncio.gather(*jobs, return_exceptions=True)

    def _listen(self, shared_port: int | None) -> dict[str, str]:
        settings = self._settings
        access = self._relay.access
        room = room_for_sockets(access.max_sockets, settings.read_connections)
        if room < access.max_sockets:
            _log.warning("few_files", sockets=room, wanted=access.max_sockets)
            access.max_sockets = room
        responder = HttpApi(
            readiness=self._readiness,
            manifest=self._manifest,
            by_id=self._store.by_id,
            identities=IdentityApi(
                self._relay.identities,
                self._bootstrap,
                by_key=self._store.identities.by_key,
                declined=lambda: self._store.declined,
                clock=self._relay.clock,
            ),
            form=settings.provenance_downgrade,
            metrics=None if settings.metrics_listen else self._scrapes.get,
            websocket_path=settings.path,
            log_epoch=lambda: self._store.known.lineage.current.epoch,
            console=self._console(),
        )
        context = self._tls.context if self._tls else None
        reuse_port = shared_port is not None
        port = self._open(
            settings.host,
            self._ports.get("main", settings.port) if shared_port is None else shared_port,
            responder,
            settings.path,
            tls=context,
            reuse_port=reuse_port,
        )
        host = f"[{settings.host}]" if ":" in settings.host else settings.host
        secure = "s" if context else ""
        http_url = f"http{secure}://{host}:{port}"
        self._ws_url = f"ws{secure}://{host}:{port}{settings.path}"
        metrics_url = f"{http_url}/metrics"
        if shared_port is None:
            self._ports["main"] = port
        if settings.metrics_listen:
            metrics_host, _, metrics_port = settings.metrics_listen.rpartition(":")
            taken = self._open(
                metrics_host.strip("[]"),
                self._ports.get("metrics", int(metrics_port)),
                MetricsApi(self._scrapes.get),
                None,
                reuse_port=reuse_port,
            )
            metrics_url = f"http://{metrics_host}:{taken}/metrics"
            self._ports["metrics"] = taken
        self._reload_on_sighup()
        return {"ws": self._ws_url, "http": http_url, "metrics": metrics_url, "relay_id": self._relay_id}

    def _console(self) -> WebConsole | None:
        settings = self._settings
        if not settings.console:
            return None
        try:
            return WebConsole.read(public_url=settings.public_url, websocket_path=settings.path)
        except OSError as error:
            problem = f"its files cannot be read ({problem_of(error)}); without them set it to false"
            raise ConfigurationError([f"console: {problem}"]) from None

    def _open(
        self,
        host: str,
        port: int,
        responder: HttpResponder,
        path: str | None,
        *,
        tls: ssl.SSLContext | None = None,
        reuse_port: bool,
    ) -> int:
        """Listen; returns the port, which the system chooses for 0. Raises `PortTaken`."""
        try:
            sockets = bind(host, port, reuse_port=reuse_port)
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise PortTaken(f"port {port} on {host} is taken; choose another with --port") from None
            raise PortTaken(f"cannot listen on {host}:{port}: {error.strerror or error}") from None
        listeners = [
            Listener(
                each,
                lambda: Connection(self._relay, responder, path),
                tls=tls,
                takes_plain=self._settings.tls_cert is None,
                handshake_timeout=self._settings.handshake_timeout,
                slices=self._relay.slices,
            )
            for each in sockets
        ]
        self._listeners += listeners
        return listeners[0].port

    def _count(self) -> None:
        """Move what was tallied since the last call into the metrics."""
        relay, metrics = self._relay, self._metrics
        relay.tally.count(metrics)
        metrics.publish_queue.set(relay.admission.pending)
        metrics.log_sequence.set(relay.fanout.position)
        metrics.fanout_lag_seconds.set(relay.tail.lag(time.monotonic()))
        self._gauges.look()
        metrics.log_epoch.set(self._store.known.lineage.current.epoch)

    def _readiness(self) -> str | None:
        if self._relay.registry.draining:
            return "draining"
        if not self._database_up:
            return "database"
        return "memory" if self._relay.registry.pressure >= Pressure.SHORT else None

    def _manifest(self) -> dict[str, object]:
        status = self._readiness() or "ok"
        known, bans = self._described, self._rulings.bans
        if known is None or known[0] is not self._settings or known[1] is not bans or known[2] != status:
            manifest = build_manifest(
                self._settings,
                relay_id=self._relay_id,
                ws_endpoint=self._ws_url,
                status=status,
                clock_skew_seconds=self._relay.identities.rules.clock_skew_seconds,
                did_docs=[item for items in self._bootstrap.documents.values() for item in items],
                bans=bans,
            )
            known = self._described = self._settings, bans, status, manifest
        return known[3]

    async def _drain(self) -> None:
        """Close every connection, some at a time, each when its publishes are answered.

        Those whose turn has not come are served as ever, but nobody new is. Clients resume elsewhere by
        cursor.
        """
        admission, registry = self._relay.admission, self._relay.registry
        registry.draining = True
        if failpoints.ARMED:
            await failpoints.reached("server.drain")
        _log.info("draining", connections=len(registry), publishes=admission.pending)
        await self._drain_in_waves()
        registry.is_hushed = True
        registry.stop_reading()
        await registry.settle(lambda: not admission.pending, self._settings.drain_timeout)
        registry.close_all(1001, _GOING_AWAY)
        await registry.settle(lambda: not registry, _CLOSE_TIMEOUT)
        _log.info("drained", unanswered=admission.pending, unclosed=len(registry))

    async def _drain_in_waves(self) -> None:
        """All but the last wave, which is whoever is left."""
        registry = self._relay.registry
        sockets = list(registry.sockets)
        spread = min(self._settings.drain_spread, len(sockets) / _CLOSED_PER_SECOND)
        waves = int(spread / _WAVE_SECONDS)
        for wave in range(waves):
            part = sockets[wave::waves]
            registry.each(part, lambda socket: socket.stop_reading())
            # What was read is mostly answered by then; a publisher that hears nothing publishes again.
            await asyncio.sleep(_WAVE_SECONDS)
            registry.each(part, lambda socket: socket.close(1001, _GOING_AWAY))

    async def _watch_loop(self) -> None:
        await self._is_serving.wait()  # what a start takes, nobody waits for
        await self._loop_watch.run()

    async def _sweep(self) -> None:
        """Look after every connection about once a second, some at a time: all at once would be felt."""
        while True:
            self._count()
            sockets = list(self._relay.registry.sockets)
            for part in range(_SWEEP_PARTS):
                due = time.monotonic() + _SWEEP_INTERVAL / _SWEEP_PARTS
                await asyncio.sleep(_SWEEP_INTERVAL / _SWEEP_PARTS)
                if time.monotonic() - due > _SWEEP_INTERVAL:
                    # This process, or the machine, has slept: what peers have sent meanwhile is read first.
                    await asyncio.sleep(_SWEEP_INTERVAL)
                self._relay.registry.sweep(sockets[part::_SWEEP_PARTS], time.monotonic())

    async def _watch_memory(self) -> None:
        settings, registry = self._settings, self._relay.registry
        ceiling = MemoryCeiling(settings.memory_limit_bytes or default_limit(settings.workers))

        def look() -> None:
            before, pressure = registry.pressure, ceiling.update(resident_bytes())
            registry.relieve(pressure)
            self._metrics.memory_pressure.set(pressure)
            if pressure is not before:
                _log.warning("memory", pressure=pressure.name.lower(), limit=ceiling.limit)

        registry.look, registry.look_after_bytes = look, ceiling.limit // _LOOKS_PER_LIMIT
        while True:
            await asyncio.sleep(_MEMORY_INTERVAL)
            if registry.pressure is not Pressure.FINE:
                await asyncio.to_thread(give_back)
            look()

    def _database_is(self, up: bool) -> None:
        self._database_up = up
        self._metrics.database_up.set(up)

    async def _maintain(self) -> None:
        # Comparing days with the archive takes a while, so the first round runs here and not at start.
        await asyncio.sleep(0 if self._settings.retention_requires_archive else _MAINTENANCE_INTERVAL)
        while True:
            try:
                await self._store.maintain(int(time.time()))
            except StoreError as error:
                _log.warning("maintenance_failed", problem=problem_of(error))
            except Exception as error:
                self._relay.faults.caught("background", error)
            await asyncio.sleep(_MAINTENANCE_INTERVAL)

    async def _refresh_policy(self) -> None:
        """Read the abuse table now and then; while it cannot be read, the last reading holds."""
        while True:
            try:
                self._abuse = await self._store.abuse(self._relay.clock())
            except StoreError as error:
                _log.warning("abuse_table_unread", problem=problem_of(error))
            except Exception as error:
                self._relay.faults.caught("background", error)
            else:
                self._apply_policy()
            await asyncio.sleep(self._settings.abuse_refresh_interval)

    async def _keep_guard(self) -> None:
        """Write down now and then how far the log was acknowledged."""
        while True:
            await self._write_guard()
            await asyncio.sleep(_GUARD_INTERVAL)

    async def _write_guard(self) -> None:
        try:
            await asyncio.to_thread(self._guard.write, self._store.known.claim)
        except OSError as error:
            if not self._guard_failed:
                _log.warning("log_guard_not_written", problem=problem_of(error))
            self._guard_failed = True

    def _ruled(self, erased: bool) -> None:
        if erased:
            self._relay.fanout.forget_recent()
            self._relay.registry.withdraw()
        self._apply_policy()

    def _apply_policy(self) -> None:
        policy = Policy.from_settings(self._settings, self._abuse, self._rulings.bans)
        apply_policy(self._relay, policy)

    def _reload_on_sighup(self) -> None:
        with contextlib.suppress(NotImplementedError, RuntimeError, ValueError):
            asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, self._reload_apart)
            # One that came while this process was being started has waited, if it is a worker.
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGHUP})

    def _reload_apart(self) -> None:
        with self._loop_watch.apart("reload"):
            self._reload()

    def _reload(self) -> None:
        """SIGHUP: take over certificates and settings as they are now; one fault, and nothing changes."""
        relay = self._relay
        try:
            if failpoints.ARMED:
                failpoints.hit("server.reload")
            reread = read_again(self._settings)
        except (TlsError, ConfigurationError) as error:
            _log.error("not_reloaded", problem=problem_of(error))
            return
        self._settings = settings = reread.settings
        if self._tls is not None and reread.tls is not None:
            self._tls.renew(reread.tls)
        relay.access.reload(settings)
        self._apply_policy()
        relay.admission.trust = dataclasses.replace(
            relay.admission.trust, refused_clients=frozenset(settings.refused_clients)
        )
        report(reread)
