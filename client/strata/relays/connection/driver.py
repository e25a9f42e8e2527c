"""The asyncio shell around `Connection`: one task that owns the socket, one timer. It decides nothing."""

from __future__ import annotations

import asyncio
import logging
import math
import random
import ssl as ssl_module
import time

from websockets.asyncio.client import ClientConnection
from websockets.exceptions import ConnectionClosed

from strata.protocol.errors import ConnectionFailed, StrataError
from strata.relays.backoff import Backoff
from strata.relays.connection.connection import AuthenticationSettled, Connection, ShortChallenge
from strata.relays.connection.dialing import check_url, describe, dial, hang_up, may_retry, shown, tls_context
from strata.relays.connection.options import Options
from strata.relays.connection.pins import PinFile
from strata.relays.connection.publishing import Handle, PublishSettled
from strata.relays.connection.subscribing import Phase, SubscriptionState
from strata.relays.connection.values import Announced, Authenticated, Published

__all__ = ["Driver"]

_log = logging.getLogger("strata.relay")


class Driver:
    """Keeps one relay connected from `open` until `stop`, and carries between its socket and the core.

    Whoever calls into `core` calls `deliver` after it. Belongs to one event loop.
    """

    def __init__(
        self,
        url: str,
        core: Connection,
        options: Options,
        *,
        ssl: ssl_module.SSLContext | None,
        pins: PinFile | None,
    ) -> None:
        self.core = core
        self.failure: StrataError | None = None
        """Why nothing further will happen, once that is so."""
        self.waiters: dict[Handle, asyncio.Future[Published]] = {}
        """Who waits for which publish."""
        self.arrivals: dict[SubscriptionState, asyncio.Event] = {}
        """Set when there is something to take from a subscription."""
        self.authentications: set[asyncio.Future[Authenticated]] = set()
        """Who waits for authentication to be decided."""
        self._url = url
        self._options = options
        self.ssl = ssl
        self._pins = pins
        self._pinning: asyncio.Future[str] | None = None
        self._first = asyncio.Event()
        """Set once opening has come to something, good or bad."""
        self._writable = asyncio.Event()
        self._may_read = asyncio.Event()
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = math.inf
        self._is_opened = False
        self._runner: asyncio.Task[None] | None = None
        self._last_problem: ConnectionFailed | None = None

    def prepare(self) -> None:
        """Bind to the running loop. Raises `RuntimeError` if called before, `ConnectionFailed` for no URL."""
        if self._is_opened:
            raise RuntimeError("a relay connection can be opened once")
        check_url(self._url)
        self._is_opened = True
        self.loop = asyncio.get_running_loop()
        self.ssl = tls_context(self._url, self.ssl)

    async def open(self) -> None:
        """Connect.

        Raises `ConnectionFailed`: at once for what trying again cannot mend, else after `connect_timeout`;
        `IdentityError` and `OSError` for a pin file that cannot be read. Then, and after cancelling, `stop`
        and `stopped` are still owed.
        """
        if self._pins is not None:
            self.core.expect(await asyncio.to_thread(self._pins.get, self._url))
        self._runner = self.loop.create_task(self._run(), name=f"strata-relay {shown(self._url)}")
        try:
            async with asyncio.timeout(self._options.connect_timeout):
                await self._first.wait()
        except TimeoutError:
            raise self._last_problem or describe(TimeoutError(), self._url) from None
        if self.failure is not None:
            raise self.failure

    def stop(self, reason: StrataError) -> None:
        """End every publish and subscription with `reason`, and let go of the socket. Idempotent."""
        self.failure = self.failure or reason
        self.core.fail(self.failure)
        self.deliver()
        if self._runner is not None:
            self._runner.cancel()

    async def stopped(self) -> None:
        """Wait until nothing is left: at most `close_timeout` and a second or two."""
        if self._runner is not None:
            await asyncio.wait([self._runner])
            if self._pinning is not None:
                await asyncio.wait([self._pinning], timeout=1)
            if not self._runner.cancelled():
                self._runner.result()  # a fault of ours must not pass unseen

    def check_open(self) -> None:
        """Raise why the connection cannot be used any more, if so."""
        if self.failure is not None:
            raise self.failure
        if self._runner is None:
            raise RuntimeError("the relay connection is not open: use `async with`")

    # Tasks.

    async def _run(self) -> None:
        """The one task that owns the socket."""
        failure: StrataError | None = None
        try:
            await self._keep_connected()
        except ConnectionFailed as error:
            failure = error
            _log.info("%s: giving up: %s", shown(self._url), error)
        finally:
            self.failure = self.failure or failure or ConnectionFailed("the connection's task has ended")
            self.core.fail(self.failure)
            self.deliver()
            self._first.set()
            statistics = self.core.statistics
            _log.info(
                "%s: closed after %d connections, %d packets published, %d delivered",
                shown(self._url),
                statistics.connections,
                statistics.publishes_acknowledged,
                statistics.events_delivered,
            )

    async def _keep_connected(self) -> None:
        options = self._options
        backoff = Backoff(base=options.backoff_base, cap=options.backoff_cap, random=random.random)
        while True:
            try:
                socket, announced = await dial(self._url, ssl=self.ssl, options=options)
            except Exception as error:
                self.core.statistics.connections_failed += 1
                self._judge(error)
            else:
                made_at = self.loop.time()
                self._judge(await self._serve(socket, announced))
                if self.loop.time() - made_at >= options.stable_after:
                    backoff.reset()
            await asyncio.sleep(backoff.next_delay())

    def _judge(self, error: Exception) -> None:
        problem = describe(error, self._url)
        if not may_retry(error):
            raise problem from error
        self._last_problem = problem
        _log.debug("%s: trying again: %s", shown(self._url), problem)

    async def _serve(self, socket: ClientConnection, announced: Announced) -> Exception:
        """Run one connection until it ends; returns how it ended."""
        _log.info("%s: connected, extensions %s", shown(self._url), sorted(announced.extensions))
        try:
            self.core.connection_made(announced, self.loop.time(), unix_now=time.time())
            self.deliver()
            self._first.set()
            async with asyncio.TaskGroup() as tasks:
                writer = tasks.create_task(self._write(socket), name="strata-relay-writer")
                ended = await self._read(socket)
                writer.cancel()
            return ended
        finally:
            self.core.connection_lost()
            self.deliver()
            await hang_up(socket, self._options.close_timeout)

    async def _read(self, socket: ClientConnection) -> Exception:
        core = self.core
        while True:
            try:
                data = await socket.recv(decode=False)
            except ConnectionClosed as closed:
                return closed
            core.receive_message(data, self.loop.time())
            self.deliver()
            while core.must_pause:
                self._may_read.clear()
                await self._may_read.wait()

    async def _write(self, socket: ClientConnection) -> None:
        """Send what waits. A relay that takes nothing for `write_timeout` is cut off; `_read` then ends."""
        while True:
            self._writable.clear()
            for frame in self.core.data_to_send():
                try:
                    async with asyncio.timeout(self._options.write_timeout):
                        await socket.send(frame, text=True)
                except ConnectionClosed:
                    return
                except TimeoutError:
                    socket.transport.abort()
                    return
            await self._writable.wait()

    # After every call to the core.

    def deliver(self) -> None:
        """Send what waits, pass on what happened, arm the timer."""
        core = self.core
        for change in core.changes():
            if isinstance(change, AuthenticationSettled):
                self._authentication_settled(change.outcome)
            elif isinstance(change, ShortChallenge):
                left = max(change.seconds_left, 0)
                _log.warning("%s: only %.0f s to answer the relay's challenge", shown(self._url), left)
            elif isinstance(change, PublishSettled):
                waiter = self.waiters.pop(change.handle, None)
                if waiter is None or waiter.done():
                    continue  # cancelled meanwhile
                if isinstance(change.outcome, Published):
                    waiter.set_result(change.outcome)
                else:
                    waiter.set_exception(change.outcome)
            else:
                ended = change.phase is Phase.ENDED
                arrived = self.arrivals.pop(change, None) if ended else self.arrivals.get(change)
                if arrived is not None:
                    arrived.set()
        if core.has_data_to_send:
            self._writable.set()
        if not core.must_pause:
            self._may_read.set()
        self._arm()

    def _authentication_settled(self, outcome: Authenticated | StrataError) -> None:
        for waiter in self.authentications:
            if waiter.done():
                continue  # cancelled meanwhile
            if isinstance(outcome, Authenticated):
                waiter.set_result(outcome)
            else:
                waiter.set_exception(outcome)
        if isinstance(outcome, Authenticated):
            _log.debug("%s: authenticated as %s", shown(self._url), outcome.author_id)
            self._pin()
        elif self.failure is None:
            _log.debug("%s: not authenticated: %s", shown(self._url), outcome)

    def _pin(self) -> None:
        """Write down which relay this is, beside everything else: a disk that fails harms no message."""
        relay_id = self.core.server_id
        if self._pins is None or self._pinning is not None or relay_id is None:
            return

        def done(pinning: asyncio.Future[str]) -> None:
            if not pinning.cancelled() and pinning.exception() is not None:
                _log.warning("%s: the relay could not be pinned: %s", shown(self._url), pinning.exception())

        self._pinning = self.loop.run_in_executor(None, self._pins.add, self._url, relay_id)
        self._pinning.add_done_callback(done)

    def _arm(self) -> None:
        wake_at = self.core.get_timer()
        if wake_at == self._timer_at:
            return
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._timer_at = wake_at
        if wake_at != math.inf:
            self._timer = self.loop.call_at(wake_at, self._on_timer)

    def _on_timer(self) -> None:
        self._timer = None
        self._timer_at = math.inf
        self.core.handle_timer(self.loop.time())
        self.deliver()
