"""Listening: sockets are counted when they are accepted, before TLS has cost anything.

The event loop's own server calls a protocol only after the TLS handshake. A peer that sends nothing would
hold a file, a peer that repeats its hello would hold the loop, and no limit would notice. Here each socket
gets its connection at once, which refuses or counts it; then the handshake begins, with a deadline.

One port may serve both TLS and plain clients: the client's first byte tells them apart.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import socket
import ssl
from collections.abc import Callable, Iterable
from typing import Final, Protocol

from relayd.logs import get_logger
from relayd.slices import Slices

__all__ = ["Acceptor", "NewConnection", "bind"]

_log = get_logger("relayd.accepting")

_BACKLOG: Final = 4096
_UNSENT_BYTES: Final = 128 * 1024
"""The bytes that the system keeps for a peer beyond those already sent. By default it takes megabytes for
each peer that reads nothing: the relay would read and frame them in vain, and learn only then that the peer
is slow."""
_ACCEPTED_AT_ONCE: Final = 64
_TRIES: Final = 10
"""How many free ports are tried if the system must choose one for several addresses."""
_NOT_HERE: Final = frozenset({errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT})
"""The errors of an address that this machine lacks."""
_PAUSE: Final = 0.5
"""How long nothing is accepted when the system has no room for another file, in seconds."""
_LONGEST_SHUTDOWN: Final = 3600.0
"""How long TLS may take to close a socket, in seconds: longer than any answer, because the connection ends a
peer that takes too little of what waits, or nothing (`Parting`)."""
_CLIENT_HELLO: Final = b"\x16"
"""The first byte of a TLS connection (RFC 8446 §5.1), with which no HTTP request begins."""


class NewConnection(Protocol):
    """The connection of an accepted socket."""

    @property
    def socket(self) -> asyncio.Protocol:
        """The protocol of the connection, used once the handshake is done."""

    def accepted(self, peer: str | None) -> bool:
        """A socket was accepted from this address. Returning False drops it without an answer."""

    def handshake_begins(self) -> None:
        """TLS is about to take time."""

    def handshake_ended(self, *, failed: bool) -> None:
        """TLS is done. If it failed, there are no further calls for the socket."""


def bind(host: str, port: int, *, reuse_port: bool) -> list[socket.socket]:
    """Sockets that listen on every address of `host`, all on one port, which the system chooses if it is 0.

    Addresses that this machine lacks are left out: `localhost` often has one of IPv6. Raises `OSError`, also
    if the machine lacks all of them; no socket stays open then.
    """
    found = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    tries_left = 1 if port else _TRIES
    while True:
        tries_left -= 1
        try:
            return _bound(dict.fromkeys(found), reuse_port)
        except OSError as error:
            # A port that is free at the first address may be taken at another.
            if error.errno != errno.EADDRINUSE or not tries_left:
                raise


def _bound(
    found: Iterable[tuple[int, int, int, str, tuple[object, ...]]], reuse_port: bool
) -> list[socket.socket]:
    with contextlib.ExitStack() as stack:
        listening: list[socket.socket] = []
        missing: dict[object, OSError] = {}
        for family, kind, protocol, _, (host, port, *more) in found:
            if listening and not port:
                port = listening[0].getsockname()[1]
            try:
                each = _open(family, kind, protocol, (host, port, *more), reuse_port)
            except OSError as error:
                if error.errno not in _NOT_HERE:
                    raise
                missing[host] = error
            else:
                listening.append(stack.enter_context(each))
        for host, problem in missing.items():
            if not listening:
                raise problem
            _log.warning("address_left_out", address=host, problem=problem.strerror)
        stack.pop_all()
        return listening


def _open(
    family: int, kind: int, protocol: int, where: tuple[object, ...], reuse_port: bool
) -> socket.socket:
    with contextlib.ExitStack() as stack:
        one = stack.enter_context(socket.socket(family, kind, protocol))
        one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if reuse_port:
            one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        if family == socket.AF_INET6:
            one.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        with contextlib.suppress(OSError, AttributeError):  # not every system has this option
            one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, _UNSENT_BYTES)
        one.bind(where)
        one.listen(_BACKLOG)
        one.setblocking(False)
        stack.pop_all()
        return one


class Acceptor:
    """Accepts on one listening socket until `close`. `connect` makes the connection of each socket.

    With `takes_plain` and `tls`, a client that begins without TLS is served too.
    """

    def __init__(
        self,
        listening: socket.socket,
        connect: Callable[[], NewConnection],
        *,
        tls: ssl.SSLContext | None,
        handshake_timeout: float,
        slices: Slices,
        takes_plain: bool = False,
    ) -> None:
        self._socket = listening
        self._takes_plain = takes_plain and tls is not None
        self._slices = slices
        self._connect = connect
        self._tls = tls
        self._handshake_timeout = handshake_timeout
        self._loop = asyncio.get_running_loop()
        self._arriving: set[asyncio.Task[None]] = set()
        self._pause: asyncio.TimerHandle | None = None
        self._loop.add_reader(listening, self._accept)

    @property
    def port(self) -> int:
        """The port, which the system may have chosen."""
        port: int = self._socket.getsockname()[1]
        return port

    def close(self) -> None:
        """Accept nothing more, and drop sockets in their handshake. Idempotent."""
        if self._socket.fileno() < 0:
            return
        self._stop()
        self._socket.close()
        for task in self._arriving:
            task.cancel()

    def _accept(self) -> None:
        for _ in range(_ACCEPTED_AT_ONCE):
            try:
                accepted, address = self._socket.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                if error.errno not in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM):
                    raise
                # The socket stays readable: trying again at once would go on forever.
                _log.warning("nothing_accepted", problem=error.strerror)
                self._stop()
                self._pause = self._loop.call_later(_PAUSE, self._resume)
                return
            accepted.setblocking(False)
            self._welcome(accepted, address[0])
            if self._slices.is_over():
                return  # others that wait are accepted in the next turn

    def _welcome(self, accepted: socket.socket, peer: str) -> None:
        connection = self._connect()
        if not connection.accepted(peer):
            accepted.close()
            return
        if self._tls is not None:
            connection.handshake_begins()
        task = self._loop.create_task(self._serve(accepted, connection), name="handshake")
        self._arriving.add(task)
        task.add_done_callback(self._arriving.discard)

    async def _serve(self, accepted: socket.socket, connection: NewConnection) -> None:
        failed = True
        tls = self._tls
        try:
            with contextlib.suppress(OSError, TimeoutError):  # TLS errors are OSErrors too
                accepted.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                if self._takes_plain and await self._first_byte(accepted) != _CLIENT_HELLO:
                    tls = None
                await self._loop.connect_accepted_socket(
                    lambda: connection.socket,
                    accepted,
                    ssl=tls,
                    # the deadline applies to a peer that is slow before the first byte, as after it.
                    ssl_handshake_timeout=None if tls is None else self._handshake_timeout,
                    ssl_shutdown_timeout=None if tls is None else _LONGEST_SHUTDOWN,
                )
                failed = False
        finally:
            connection.handshake_ended(failed=failed)

    async def _first_byte(self, accepted: socket.socket) -> bytes:
        """The client's first byte, which is left in the socket.

        Raises `TimeoutError` and `OSError`; then, or when it is cancelled, the socket is closed.
        """
        readable = asyncio.Event()
        self._loop.add_reader(accepted, readable.set)
        with contextlib.ExitStack() as undo:
            undo.callback(accepted.close)
            undo.callback(self._loop.remove_reader, accepted)
            async with asyncio.timeout(self._handshake_timeout):
                await readable.wait()
            first = accepted.recv(1, socket.MSG_PEEK)
            undo.pop_all()
        self._loop.remove_reader(accepted)
        return first

    def _stop(self) -> None:
        self._loop.remove_reader(self._socket)
        if self._pause is not None:
            self._pause.cancel()
            self._pause = None

    def _resume(self) -> None:
        self._pause = None
        self._loop.add_reader(self._socket, self._accept)
