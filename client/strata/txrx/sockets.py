"""Sockets to listen on, and connections to make, for each kind of address (T-088 … T-091, T-098; A-169)."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import socket
import ssl
import stat
from collections.abc import Callable, Iterable
from typing import TypeAlias

from strata.relays.reaching import reach
from strata.txrx.addresses import TcpAddress, TlsAddress, UnixAddress
from strata.txrx.errors import AddressInUse, TxRxIOError

__all__ = ["NetAddress", "SocketFile", "connect", "listen", "tune"]

_log = logging.getLogger(__name__)

NetAddress: TypeAlias = TcpAddress | TlsAddress | UnixAddress

_BACKLOG = 512
_TRIES = 10
"""How many free ports are tried if the system must choose one for several addresses."""
_KEEPALIVE_SECONDS = 15
_UNIX_BUFFER = 1024 * 1024
_NOT_HERE = frozenset({errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT})
"""The errors of an address that this machine lacks, such as the one of IPv6 that `localhost` often has."""


class SocketFile:
    """The file of a Unix socket, removed at the end unless another file has replaced it."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._inode = os.stat(path).st_ino

    def remove(self) -> None:
        """Remove the file, if that is possible; otherwise the next server replaces it."""
        try:
            if os.stat(self._path).st_ino == self._inode:
                os.unlink(self._path)
        except FileNotFoundError:
            pass
        except OSError as error:  # for instance, if the program has dropped its privileges
            _log.warning("%s stays behind: %s", self._path, error.strerror)


async def listen(address: NetAddress) -> tuple[NetAddress, list[socket.socket], SocketFile | None]:
    """Open listening sockets. Returns them with their real address. Raises `AddressInUse`, `TxRxIOError`."""
    if isinstance(address, UnixAddress):
        listening = _listen_unix(address)
        return address, [listening], None if address.is_abstract else SocketFile(address.path)
    try:
        sockets = await _listen_tcp(address.host, address.port)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise AddressInUse(f"{address} is served already") from None
        raise TxRxIOError(f"{address} cannot be served: {error.strerror or error}") from None
    except ValueError as error:  # a host that the system refuses to look up
        raise TxRxIOError(f"{address} cannot be served: {error}") from None
    port = sockets[0].getsockname()[1]
    if isinstance(address, TlsAddress):
        return TlsAddress(address.host, port, address.scheme), sockets, None
    return TcpAddress(address.host, port), sockets, None


async def connect(
    address: NetAddress, protocol: Callable[[], asyncio.BaseProtocol], context: ssl.SSLContext | None
) -> None:
    """Attempt to connect once.

    Raises `OSError`, of which `ssl.SSLError` is a subclass, and `ValueError` for an impossible host name.
    """
    loop = asyncio.get_running_loop()
    if isinstance(address, UnixAddress):
        # The socket is made here, since not every event loop supports abstract names.
        with contextlib.ExitStack() as stack:
            one = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
            one.setblocking(False)
            await loop.sock_connect(one, address.socket_path)
            await loop.create_unix_connection(protocol, sock=one)
            stack.pop_all()
    else:
        host = "localhost" if address.host == "*" else address.host
        name = None if context is None else host
        reached = await reach(host, address.port)
        await loop.create_connection(protocol, sock=reached, ssl=context, server_hostname=name)


def tune(transport: asyncio.BaseTransport) -> None:
    """Make the system send small frames at once, and detect a peer whose machine is gone."""
    found: socket.socket | None = transport.get_extra_info("socket")
    if found is None:
        return
    if found.family == socket.AF_UNIX:
        with contextlib.suppress(OSError):
            # Unlike the buffers of TCP, those of a Unix socket do not grow automatically.
            found.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _UNIX_BUFFER)
        return
    with contextlib.suppress(OSError):
        found.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        found.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in (("KEEPIDLE", 4), ("KEEPINTVL", 1)):
            if hasattr(socket, f"TCP_{name}"):
                option = getattr(socket, f"TCP_{name}")
                found.setsockopt(socket.IPPROTO_TCP, option, _KEEPALIVE_SECONDS * value // 4)


async def _listen_tcp(host: str, port: int) -> list[socket.socket]:
    """Open one socket for each address of a host, all on the same port."""
    loop = asyncio.get_running_loop()
    found = await loop.getaddrinfo(
        None if host == "*" else host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )
    tries_left = 1 if port else _TRIES
    while True:
        tries_left -= 1
        try:
            return _bound(dict.fromkeys(found), host, port)
        except OSError as error:
            # A port that is free at the first address may be in use at another one.
            if error.errno != errno.EADDRINUSE or not tries_left:
                raise


def _bound(
    addresses: Iterable[tuple[int, int, int, str, tuple[object, ...]]], host: str, port: int
) -> list[socket.socket]:
    with contextlib.ExitStack() as stack:
        sockets: list[socket.socket] = []
        missing: dict[object, OSError] = {}
        for family, kind, protocol, _, where in addresses:
            if sockets and port == 0:
                where = (where[0], sockets[0].getsockname()[1], *where[2:])
            try:
                sockets.append(stack.enter_context(_open(family, kind, protocol, where)))
            except OSError as error:
                if error.errno not in _NOT_HERE:
                    raise
                missing[where[0]] = error
        for left_out, problem in missing.items():
            if not sockets:
                raise problem
            _log.warning("%s is served without its address %s: %s", host, left_out, problem.strerror)
        stack.pop_all()
        return sockets


def _open(family: int, kind: int, protocol: int, where: tuple[object, ...]) -> socket.socket:
    with contextlib.ExitStack() as stack:
        one = stack.enter_context(socket.socket(family, kind, protocol))
        one.setblocking(False)
        one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            one.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        one.bind(where)
        one.listen(_BACKLOG)
        stack.pop_all()
        return one


def _listen_unix(address: UnixAddress) -> socket.socket:
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listening.setblocking(False)
        try:
            listening.bind(address.socket_path)
        except OSError as error:
            if error.errno != errno.EADDRINUSE or address.is_abstract or not _remove_stale(address.path):
                raise
            listening.bind(address.socket_path)
        listening.listen(_BACKLOG)
    except OSError as error:
        listening.close()
        if error.errno == errno.EADDRINUSE:
            raise AddressInUse(f"{address} is served already, or something else is there") from None
        raise TxRxIOError(f"{address} cannot be served: {error.strerror or error}") from None
    except BaseException:
        listening.close()
        raise
    return listening


def _remove_stale(path: str) -> bool:
    """Remove the socket file of a server that is gone, and no other file; False if it was not removed."""
    try:
        before = os.stat(path, follow_symlinks=False)
        if not stat.S_ISSOCK(before.st_mode):
            return False
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            probe.settimeout(1.0)
            try:
                probe.connect(path)
            except ConnectionRefusedError:
                pass
            else:
                return False
        if os.stat(path, follow_symlinks=False).st_ino == before.st_ino:
            os.unlink(path)
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return True
