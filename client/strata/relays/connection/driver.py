"""The asyncio shell around `Core`: one task that owns the socket, one timer. It decides nothing."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import random
import ssl as ssl_module
import time
from collections.abc import Awaitable, Callable, MutableMapping
from dataclasses import replace
from typing import Final

from websockets.exceptions import ConnectionClosed

from strata.protocol.errors import ConnectionFailed, RequestTimeout, StrataError
from strata.protocol.ids import Signer
from strata.protocol.packets import Packet
from strata.relays.backoff import Backoff
from strata.relays.connection.core import AuthenticationSettled, Core, ShortChallenge
from strata.relays.connection.dialing import check_url, describe, dial, hang_up, may_retry, shown, tls_context
from strata.relays.connection.options import Options
from strata.relays.connection.pins import PinFile, address_of
from strata.relays.connection.publishing import Handle, PublishSettled
from strata.relays.connection.stream import Phase, Stream
from strata.relays.connection.values import Announced, Authenticated, Published, Query, Statistics
from strata.relays.connection.websocket import ClientSocket
from strata.relays.peer_timeout import PeerTimeout

__all__ = ["Driver", "check_loop"]

_log = logging.getLogger("strata.relay")


_GOING_AWAY: Final = 1001
"""The close code of a relay that drains, which closes its connections in groups (RFC 6455 §7.4.1)."""


def _said_goodbye(ended: Exception) -> bool:
    closed = ended.rcvd if isinstance(ended, ConnectionClosed) else None
    return closed is not None and closed.code == _GOING_AWAY


def check_loop(loop: asyncio.AbstractEventLoop, what: str) -> None:
    """Raise `RuntimeError` in a thread, or on an event loop, other than the one `what` was opened on.

    A call from there would change state that both use, and might wait forever or stop the other loop.
    """
    try:
        running = asyncio.get_running_loop()
    except RuntimeError:
        running = None
    # If its loop is not running, the program runs that loop step by step.
    if running is not loop and (running is not None or loop.is_running()):
        raise RuntimeError(
            f"{what} belongs to the event loop that it was opened on: open one of your own here, or call by "
            "asyncio.run_coroutine_threadsafe"
        )


class _Step:
    """`with step as core:` gives access to the core; the results are carried out at the end of the block."""

    __slots__ = ("_carry_out", "_core", "_look")

    def __init__(self, core: Core, look: Callable[[], None], carry_out: Callable[[], None]) -> None:
        self._core = core
        self._look = look
        self._carry_out = carry_out

    def __enter__(self) -> Core:
        self._look()
        return self._core

    def __exit__(self, *_: object) -> None:
        self._carry_out()


class Driver:
    """Keeps one relay connected from `open` until `stop`, and passes data between its socket and the core.

    `step` is the only way to call into the core. `changed` is called when a connection is made or lost, and
    when no further one will be made. Belongs to one event loop.
    """

    def __init__(
        self,
        url: str,
        options: Options,
        *,
        signer: Signer | None,
        ssl: ssl_module.SSLContext | None,
        pins: PinFile | None,
        met: MutableMapping[str, str] | None,
        changed: Callable[[], None],
    ) -> None:
        self.failure: StrataError | None = None
        """Why the connection has ended permanently; None while it has not."""
        self.ssl = ssl
        self._met = {} if met is None else met
        self._core = Core(
            options, random=random.random, signer=signer, address=address_of(url), met=self._met
        )
        self.step = _Step(self._core, self._look, self._deliver)
        self._url = url
        self._options = options
        self._dialing = replace(options, ping_interval=None)  # the core decides when to ping
        self._pins = pins
        self._changed = changed
        self._publishes: dict[Handle, asyncio.Future[Published]] = {}
        self._arrivals: dict[Stream, asyncio.Event] = {}
        self._authentications: set[asyncio.Future[Authenticated]] = set()
        self._pinning: asyncio.Future[str] | None = None
        self._is_stranger = True
        self._first = asyncio.Event()
        """Set once opening has succeeded or failed."""
        self._writable = asyncio.Event()
        self._may_read = asyncio.Event()
        self._hurry = asyncio.Event()
        """Set if the next attempt to connect must not wait: the program was away, or the relay is gone."""
        self._socket: ClientSocket | None = None
        self._pong: Awaitable[float] | None = None
        """The answer to the last ping."""
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = math.inf
        self._is_opened = False
        self._runner: asyncio.Task[None] | None = None
        self._last_problem: ConnectionFailed | None = None

    def prepare(self) -> None:
        """Bind to the running loop. Raises `RuntimeError` if called twice, `ConnectionFailed` if no URL."""
        if self._is_opened:
            raise RuntimeError("a relay connection can be opened once")
        check_url(self._url)
        self._is_opened = True
        self.loop = asyncio.get_running_loop()
        self.ssl = tls_context(self._url, self.ssl)

    async def open(self) -> None:
        """Connect.

        Raises `ConnectionFailed` (at once if retrying cannot help, else after `connect_timeout`), and
        `IdentityError` or `OSError` for a pin file that cannot be read. After an error or cancellation, the
        caller must still call `stop` and `stopped`.
        """
        if self._pins is not None:
            pinned = await asyncio.to_thread(self._pins.get, self._url)
            self._met.update(await asyncio.to_thread(self._pins.met))
            with self.step as core:
                core.expect(pinned)
        self._is_stranger = self._core.server_id is None
        self._runner = self.loop.create_task(self._run(), name=f"strata-relay {shown(self._url)}")
        try:
            async with PeerTimeout(self._options.connect_timeout):
                await self._first.wait()
        except TimeoutError:
            raise self._last_problem or self._described(TimeoutError()) from None
        if self.failure is not None:
            raise self.failure

    def stop(self, reason: StrataError) -> None:
        """End every publish and subscription with `reason`, and begin to close the socket. Idempotent."""
        self.check_loop()
        self._fail(reason)
        self._first.set()  # a task that is cancelled before its first step runs no `finally`
        if self._runner is not None:
            self._runner.cancel()

    async def stopped(self) -> None:
        """Wait until everything has ended: at most `close_timeout` and a second or two."""
        if self._runner is not None:
            if not self._runner.done():  # if it is, its loop may be closed
                await asyncio.wait([self._runner])
            if self._pinning is not None:
                await asyncio.wait([self._pinning], timeout=1)
            if not self._runner.cancelled():
                self._runner.result()  # errors in our own code must not go unnoticed

    def check_open(self) -> None:
        """Raise the failure, if there is one, or `RuntimeError` if not open or on another event loop."""
        if self.failure is not None:
            raise self.failure
        if self._runner is None:
            raise RuntimeError("the relay connection is not open: use `async with`")
        self.check_loop()

    def check_loop(self) -> None:
        """Raise `RuntimeError` on an event loop other than the connection's: nothing would wake a call."""
        if self._runner is not None and not self._runner.done():
            check_loop(self.loop, "the relay connection")

    # What a program asks for.

    async def authenticate(self, timeout: float) -> Authenticated:
        """Authenticate the session. Raises the error that authentication ended in, or `RequestTimeout`.

        Cancelling does not stop the authentication.
        """
        if self._core.session is not None:
            return self._core.session
        with self.step as core:
            undecided = core.authenticate(self.loop.time())
        if not undecided and self._core.authentication_error is not None:
            raise self._core.authentication_error
        decided: asyncio.Future[Authenticated] = self.loop.create_future()
        self._authentications.add(decided)
        try:
            async with PeerTimeout(timeout):
                return await decided
        except TimeoutError:
            raise RequestTimeout("AUTH", timeout) from None
        finally:
            self._authentications.discard(decided)

    async def publish(self, packet: Packet, deadline: float, timeout: float) -> Published:
        """Publish a packet by `deadline`, which is in the time of `time`. Raises the error if that fails.

        `timeout` is the caller's timeout, part of which may already have passed.

        Cancelling forgets the publish; the relay may still store the packet.
        """
        answered: asyncio.Future[Published] = self.loop.create_future()
        with self.step as core:
            now = self.loop.time()
            handle = core.publish(
                packet.packet_id, packet.canonical, timeout=deadline - self.time(), now=now, given=timeout
            )
            self._publishes[handle] = answered
        try:
            return await answered
        finally:
            if handle in self._publishes:  # cancelled
                del self._publishes[handle]
                with self.step as core:
                    core.cancel_publish(handle)

    def subscribe(self, query: Query) -> tuple[Stream, asyncio.Event]:
        """Open a subscription; the event is set when its stream has something to take or has ended."""
        with self.step as core:
            stream = core.subscribe(query, self.loop.time())
            arrived = self._arrivals[stream] = asyncio.Event()
        return stream, arrived

    # What a program looks at.

    def time(self) -> float:
        """Seconds on a clock that stands still while the program does not look."""
        return self.loop.time() - self._core.postponed

    @property
    def statistics(self) -> Statistics:
        """The live counters, which keep changing."""
        return self._core.statistics

    @property
    def announced(self) -> Announced | None:
        """What the connected relay says about itself; None between connections."""
        return self._core.announced

    @property
    def session(self) -> Authenticated | None:
        """The identity the relay has confirmed for this session; None while it is anonymous."""
        return self._core.session

    @property
    def latest_time(self) -> float | None:
        """An upper bound of the relay's time, in Unix seconds; None until it has sent a challenge."""
        ahead = self._core.relay_ahead
        return None if ahead is None else self.loop.time() + ahead

    @property
    def relay_id(self) -> str | None:
        """The DID the relay is held to (R-298); None until one is known."""
        return self._core.server_id

    @property
    def last_problem(self) -> ConnectionFailed | None:
        """How the last connection, or attempt to connect, ended; None if none has ended."""
        return self._last_problem

    @property
    def round_trip(self) -> float | None:
        """The round trip of the last ping, in seconds; None before the first one and between connections."""
        return None if self._socket is None else self._socket.latency or None

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
            self._fail(
                failure
                or ConnectionFailed(
                    "the connection was cancelled, as asyncio.run does when it ends; open a new one"
                )
            )
            self._first.set()
            self._changed()
            statistics = self._core.statistics
            _log.info(
                "%s: closed after %d connections, %d packets published, %d delivered",
                shown(self._url),
                statistics.connections,
                statistics.publishes_acknowledged,
                statistics.events_delivered,
            )

    def _fail(self, reason: StrataError) -> None:
        """End everything permanently. The first reason is the one that all callers receive."""
        self.failure = self.failure or reason
        with self.step as core:
            core.fail(self.failure)

    async def _keep_connected(self) -> None:
        options = self._options
        backoff = Backoff(base=options.backoff_base, cap=options.backoff_cap, random=random.random)
        while True:
            try:
                socket, announced = await dial(self._url, ssl=self.ssl, options=self._dialing)
            except Exception as error:
                self._core.statistics.connections_failed += 1
                self._judge(error)
            else:
                made_at = self.loop.time()
                ended = await self._serve(socket, announced)
                self._judge(ended)
                lasted = self.loop.time() - made_at
                # A relay that says goodbye has not failed: it makes way for another one, or restarts.
                if lasted >= (options.backoff_base if _said_goodbye(ended) else options.stable_after):
                    backoff.reset()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(backoff.next_delay()):
                    await self._hurry.wait()
                    self._hurry.clear()
                    backoff.reset()

    def _described(self, error: Exception) -> ConnectionFailed:
        return describe(error, self._url, self._options.proxy)

    def _judge(self, error: Exception) -> None:
        problem = self._described(error)
        if not may_retry(error):
            raise problem from error
        self._last_problem = problem
        _log.debug("%s: trying again: %s", shown(self._url), problem)

    async def _serve(self, socket: ClientSocket, announced: Announced) -> Exception:
        """Run one connection until it ends; return the error it ended with."""
        _log.info("%s: connected, extensions %s", shown(self._url), sorted(announced.extensions))
        self._socket = socket
        try:
            with self.step as core:
                core.connection_made(announced, self.loop.time(), unix_now=time.time())
            self._first.set()
            self._changed()
            async with asyncio.TaskGroup() as tasks:
                writer = tasks.create_task(self._write(socket), name="strata-relay-writer")
                ended = await self._read(socket)
                writer.cancel()
            return ended
        finally:
            self._socket = None
            with self.step as core:
                core.connection_lost()
            self._changed()
            await hang_up(socket, self._options.close_timeout)

    async def _read(self, socket: ClientSocket) -> Exception:
        while True:
            try:
                data = await socket.recv(decode=False)
            except ConnectionClosed as closed:
                return closed
            with self.step as core:
                core.receive_message(data, self.loop.time())
            while self._core.must_pause:
                self._may_read.clear()
                await self._may_read.wait()

    async def _write(self, socket: ClientSocket) -> None:
        """Send waiting frames. If the relay accepts none for `write_timeout`, abort, which ends `_read`."""
        while True:
            self._writable.clear()
            try:
                for frame in self._core.data_to_send():
                    async with PeerTimeout(self._options.write_timeout):
                        await socket.send(frame, text=True)
                if self._core.wants_ping:
                    async with PeerTimeout(self._options.write_timeout):
                        self._pong = await socket.ping()
                    with self.step as core:
                        core.pinged(self.loop.time())
                    asyncio.ensure_future(self._pong).add_done_callback(self._on_pong)
            except ConnectionClosed:
                return
            except TimeoutError:
                socket.transport.abort()
                return
            await self._writable.wait()

    def _on_pong(self, pong: asyncio.Future[float]) -> None:
        if pong is self._pong and not pong.cancelled() and pong.exception() is None:
            with self.step as core:
                core.answered()

    # Before and after every step.

    def _look(self) -> None:
        """Tell the core what time it is, and when the relay was last heard."""
        if self._runner is None:
            return
        heard_at = -math.inf if self._socket is None else self._socket.heard_at
        is_away = self._core.look(self.loop.time(), unix_now=time.time(), heard_at=heard_at)
        if is_away and self._socket is None:
            self._hurry.set()

    def _deliver(self) -> None:
        """Wake the writer, pass on changes, arm the timer."""
        core = self._core
        for change in core.changes():
            if isinstance(change, AuthenticationSettled):
                self._authentication_settled(change.outcome)
            elif isinstance(change, ShortChallenge):
                left = max(change.seconds_left, 0)
                _log.warning("%s: only %.0f s to answer the relay's challenge", shown(self._url), left)
            elif isinstance(change, PublishSettled):
                waiter = self._publishes.pop(change.handle, None)
                if waiter is None or waiter.done():
                    continue  # cancelled meanwhile
                if isinstance(change.outcome, Published):
                    waiter.set_result(change.outcome)
                else:
                    if isinstance(change.outcome, RequestTimeout) and self._socket is None:
                        change.outcome.__cause__ = self._last_problem  # no relay was connected
                    waiter.set_exception(change.outcome)
            else:
                ended = change.phase is Phase.ENDED
                arrived = self._arrivals.pop(change, None) if ended else self._arrivals.get(change)
                if arrived is not None:
                    arrived.set()
        if core.has_data_to_send or core.wants_ping:
            self._writable.set()
        if core.is_gone and self._socket is not None:
            self._hurry.set()
            self._socket.transport.abort()
        if not core.must_pause:
            self._may_read.set()
        self._arm()

    def _authentication_settled(self, outcome: Authenticated | StrataError) -> None:
        for waiter in self._authentications:
            if waiter.done():
                continue  # cancelled meanwhile
            if isinstance(outcome, Authenticated):
                waiter.set_result(outcome)
            else:
                waiter.set_exception(outcome)
        if isinstance(outcome, Authenticated):
            _log.debug("%s: authenticated as %s", shown(self._url), outcome.author_id)
            if self._is_stranger:
                self._is_stranger = False
                self._warn_of_first_use()
            self._pin()
        elif self.failure is None:
            _log.debug("%s: not authenticated: %s", shown(self._url), outcome)

    def _warn_of_first_use(self) -> None:
        """Warn that no DID was known for this relay: it could have forwarded another's challenge (R-298)."""
        level = logging.WARNING if self._pins is None else logging.INFO
        text = "%s: authenticated at first sight of %s; relay_id or pins hold a relay to its DID"
        _log.log(level, text, shown(self._url), self._core.server_id)

    def _pin(self) -> None:
        """Write the relay's DID to the pin file, in the background: a failing disk harms no message."""
        relay_id = self._core.server_id
        if self._pins is None or self._pinning is not None or relay_id is None:
            return

        def done(pinning: asyncio.Future[str]) -> None:
            if not pinning.cancelled() and pinning.exception() is not None:
                _log.warning("%s: the relay could not be pinned: %s", shown(self._url), pinning.exception())

        self._pinning = self.loop.run_in_executor(None, self._pins.add, self._url, relay_id)
        self._pinning.add_done_callback(done)

    def _arm(self) -> None:
        wake_at = self._core.get_timer()
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
        with self.step as core:
            core.handle_timer(self.loop.time())
