"""A relay that serves, with its background tasks and reloads, until it is stopped or has lost its log."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import gc
import signal
import sys
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from strata.protocol.ids import Signer

from relayd.access.memory import Pressure
from relayd.announcing import Announcer
from relayd.config import ConfigurationError, Settings
from relayd.http.api import HttpApi
from relayd.http.console import WebConsole
from relayd.http.identities import IdentityApi
from relayd.http.manifest import build_manifest
from relayd.http.scrapes import Scrapes
from relayd.identity.bootstrap import BootstrapContents
from relayd.logs import dropped_lines, get_logger, problem_of
from relayd.moderation import Bans
from relayd.process.beside import beside
from relayd.process.chores import GuardKeeper, maintain, sweep, watch_memory
from relayd.process.database_watch import watch_database
from relayd.process.draining import drain
from relayd.process.gauges import Gauges
from relayd.process.listening import Ports
from relayd.process.loop_watch import LoopWatch
from relayd.process.machine_reports import MachineReports
from relayd.process.neighbours import Neighbourhood, Neighbours
from relayd.process.policy_keeper import PolicyKeeper
from relayd.process.reloading import CurrentSettings
from relayd.process.roll_keeper import RollKeeper
from relayd.relay import RunningRelay
from relayd.store.guard import Guard
from relayd.tls import ServerTls

if TYPE_CHECKING:
    from relayd.federation.service import Federation

__all__ = ["Announce", "Post", "Serving"]

_log = get_logger("relayd.server")

_SWITCH_INTERVAL: Final = 0.0005
_COLLECTOR_THRESHOLDS: Final = (10_000, 5, 40)
_LOST_CLOSE_TIMEOUT: Final = 1.0

Announce = Callable[[dict[str, str]], None]
"""Called with the addresses by name, once the relay listens on them."""


def _calm_the_collector() -> None:
    """Let the cycle collector run less often, and never again over the objects that exist at the start.

    Packets are freed when their last reference goes; a connection that has ended is the only cycle there is.
    With thousands of connections, a full collection holds up every publisher for a fifth of a second.
    """
    # A verify thread that works through a large packet yields to the loop after this time, each time the loop
    # comes back from the network; Python's default of 5 ms adds up to a second for all peers.
    sys.setswitchinterval(_SWITCH_INTERVAL)
    gc.collect()
    gc.freeze()
    gc.set_threshold(*_COLLECTOR_THRESHOLDS)


@dataclass(frozen=True, slots=True)
class Post:
    """What a process must know as one of the workers of a machine."""

    port: int
    """The port that all of them listen on."""
    leaves_port: Callable[[], bool]
    """Called when the process drains: True leaves new connections to the other workers at once."""
    place: Neighbourhood | None
    """Where it finds the others; None if a parent of an earlier release does not say."""


class Serving:
    """The ports and background tasks of one relay process."""

    def __init__(
        self,
        relay: RunningRelay,
        current: CurrentSettings,
        *,
        tls: ServerTls | None,
        bootstrap: BootstrapContents,
        guard: Guard,
        ports: dict[str, int],
        post: Post | None,
        identity: Signer,
        federation: Federation | None,
        neighbours: Neighbours | None,
        machines: MachineReports | None,
    ) -> None:
        store, metrics = relay.store, relay.metrics
        self._settings = relay.settings
        self._current = current
        self._federation = federation
        self._announcer = Announcer(lambda: self._settings, identity, relay.admission, relay.clock)
        self._neighbours = neighbours
        self._machines = machines
        self._post = post
        self._guard = GuardKeeper(guard, store)
        self._bootstrap = bootstrap
        self._store = store
        self._relay = relay
        self._metrics = metrics
        self._loop_watch = LoopWatch(metrics)
        self._tls = tls
        self._database_up = True
        self._is_serving = asyncio.Event()
        self._policy = PolicyKeeper(relay, lambda: self._settings)
        self._roll = RollKeeper(relay)
        self._ports = Ports(relay, ports, None if post is None else post.port)
        self._scrapes = Scrapes(self._count, metrics.render)
        self._described: tuple[Settings, Bans, str, dict[str, object]] | None = None
        self._gauges = Gauges(
            metrics,
            relay.access,
            relay.faults,
            settings=lambda: self._settings,
            sizes=store.sizes,
            latest_told_at=store.latest_told_at,
        )

    async def run(self, announce: Announce, stop: asyncio.Event) -> None:
        """Serve until `stop` is set, or until the store finds that its log is lost."""
        relay, rulings = self._relay, self._policy.rulings
        bus_url = self._settings.bus_url
        await self._store.listen(
            relay.tail.ring,
            rulings.ring,
            self._roll.ask,
            bus_url=bus_url,
            on_bus=self._metrics.told_of_bus(bus_url),
            on_report=None if self._machines is None else self._machines.hear,
        )
        await rulings.look()  # no peer is served before the bans are known
        jobs = self._begin_jobs()
        reading = None
        if self._federation is not None:
            reading = asyncio.create_task(self._federation.run(), name="federation")
            jobs.append(reading)
        try:
            announce(await self._listen())
            _calm_the_collector()
            self._is_serving.set()
            _log.info("serving", relay_id=relay.relay_id, url=self._ports.ws_url)
            stopped = asyncio.create_task(stop.wait(), name="stop")
            lost = asyncio.create_task(self._store.lost.wait(), name="lost")
            jobs += [stopped, lost]
            done, _ = await asyncio.wait(jobs, return_when=asyncio.FIRST_COMPLETED)
            for job in done - {stopped, lost}:
                job.result()  # a background task that ends is our bug: raise its exception
            if lost in done:
                _log.error("log_lost_its_end", consequence="all connections are closed; clients resume")
                relay.registry.close_all(1012, "the log was replaced; resume by cursor")
                await relay.registry.settle(lambda: not relay.registry, _LOST_CLOSE_TIMEOUT)
                return
            if self._post is not None and self._post.leaves_port():
                self._ports.close()
            if reading is not None:  # otherwise packets of peers would be publishes under way, without end
                jobs.remove(reading)
                reading.cancel()
                await asyncio.wait([reading])
            await drain(relay, self._settings)
            await self._guard.write()
        finally:
            self._ports.close()
            relay.registry.abort_all()
            for job in jobs:
                job.cancel()
            await asyncio.gather(*jobs, return_exceptions=True)

    def _begin_jobs(self) -> list[asyncio.Task[object]]:
        relay = self._relay
        jobs: dict[str, Coroutine[object, object, object]] = {
            "writer": relay.writer.run(),
            "tail": relay.tail.run(),
            "loop": self._watch_loop(),
            "sweep": sweep(relay.registry, self._count),
            "health": watch_database(
                lambda: self._store.ping(trial=relay.writer.is_failing), self._database_is, relay.faults
            ),
            "maintenance": maintain(self._settings, self._store, relay.faults),
            "policy": self._policy.refresh(),
            "rulings": self._policy.rulings.run(),
            "roll": self._roll.run(),
            "memory": watch_memory(self._settings, relay.registry, self._metrics),
            "guard": self._guard.run(),
            "gauges": self._gauges.run(),
        }
        if self._neighbours is not None:
            jobs["neighbours"] = self._neighbours.run()
        if self._machines is not None:
            jobs["machines"] = self._machines.run()
        if self._settings.announce_seconds:
            jobs["announcing"] = self._announcer.run()
        return [asyncio.create_task(job, name=name) for name, job in jobs.items()]

    async def _listen(self) -> dict[str, str]:
        settings = self._settings
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
            console=await beside(self._console),
        )
        context = self._tls.context if self._tls else None
        addresses = await self._ports.open(responder, self._scrapes, tls=context)
        self._reload_on_sighup()
        return addresses

    def _console(self) -> WebConsole | None:
        settings = self._settings
        if not settings.console:
            return None
        try:
            return WebConsole.read(public_url=settings.public_url, websocket_path=settings.path)
        except OSError as error:
            problem = f"its files cannot be read ({problem_of(error)}); without them set it to false"
            raise ConfigurationError([f"console: {problem}"]) from None

    def _count(self) -> None:
        """Move what was tallied since the last call into the metrics."""
        relay, metrics = self._relay, self._metrics
        relay.tally.count(metrics)
        metrics.log_lines_dropped.inc(dropped_lines())
        metrics.publish_queue.set(relay.admission.pending)
        metrics.log_sequence.set(relay.fanout.position)
        metrics.fanout_lag_seconds.set(relay.tail.lag(time.monotonic()))
        self._gauges.look()
        metrics.count_processor()
        metrics.tasks.set(len(asyncio.all_tasks()))
        metrics.log_epoch.set(self._store.known.lineage.current.epoch)

    def _readiness(self) -> str | None:
        if self._relay.registry.draining:
            return "draining"
        if not self._database_up:
            return "database"
        return "memory" if self._relay.registry.pressure >= Pressure.SHORT else None

    def _manifest(self) -> dict[str, object]:
        status = self._readiness() or "ok"
        known, bans = self._described, self._policy.bans
        if known is None or known[0] is not self._settings or known[1] is not bans or known[2] != status:
            manifest = build_manifest(
                self._settings,
                relay_id=self._relay.relay_id,
                ws_endpoint=self._ports.ws_url,
                status=status,
                clock_skew_seconds=self._relay.identities.rules.clock_skew_seconds,
                did_docs=[item for items in self._bootstrap.documents.values() for item in items],
                bans=bans,
            )
            known = self._described = self._settings, bans, status, manifest
        return known[3]

    async def _watch_loop(self) -> None:
        await self._is_serving.wait()  # nobody waits for what happens during the start
        await self._loop_watch.run()

    def _database_is(self, up: bool) -> None:
        self._database_up = up
        self._metrics.database_up.set(up)

    def _reload_on_sighup(self) -> None:
        with contextlib.suppress(NotImplementedError, RuntimeError, ValueError):
            asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, self._current.reloads.ask)
            # A signal that arrived while this process was starting has waited.
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGHUP})
        self._current.take_over = self._take_over
        if self._current.settings is not self._settings:  # an earlier round has reloaded meanwhile
            self._take_over(self._current.settings)

    def _take_over(self, settings: Settings) -> None:
        relay = self._relay
        with self._loop_watch.apart("reload"):
            self._settings = settings
            relay.access.reload(settings)
            self._policy.apply()
            relay.admission.trust = dataclasses.replace(
                relay.admission.trust, refused_clients=frozenset(settings.refused_clients)
            )
