"""Connecting to a host that has several addresses, of which some may not answer (RFC 8305).

A host often has an IPv6 and an IPv4 address, and a network through which only one of them can be reached. An
attempt at an address that does not answer ends only after minutes. So the next address is tried soon after
the one before, and the first that answers counts.
"""

from __future__ import annotations

import asyncio
import errno
import socket
from collections.abc import Sequence
from itertools import chain, zip_longest
from typing import TypeAlias

__all__ = ["reach"]

_HEAD_START = 0.25
"""Seconds from one attempt to the next, if there is no answer (RFC 8305 §5)."""
_MOST_ADDRESSES = 16
_NOWHERE = frozenset({errno.ENETUNREACH, errno.EHOSTUNREACH, errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT})
"""Errors that tell about the way to an address and not about the host."""

_Found: TypeAlias = tuple[int, int, int, str, tuple[object, ...]]
"""What `getaddrinfo` tells of an address."""


async def reach(host: str, port: int) -> socket.socket:
    """Return a socket that is connected to the host, a name or an address, and that does not block.

    Raises `OSError`, of which `socket.gaierror` is a subclass, and `ValueError` for an impossible name. The
    caller must bound the time. Cancelling closes all sockets.
    """
    try:  # an address is only parsed; for a name the system may have to ask others
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST)
    except socket.gaierror:
        found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return await _first_of(_alternating(found)[:_MOST_ADDRESSES])


def _alternating(found: Sequence[_Found]) -> list[_Found]:
    """The addresses in the system's order, but of one family and the other in turn (RFC 8305 §4)."""
    first = [one for one in found if one[0] == found[0][0]]
    others = [one for one in found if one[0] != found[0][0]]
    return [one for one in chain.from_iterable(zip_longest(first, others)) if one is not None]


async def _first_of(addresses: Sequence[_Found]) -> socket.socket:
    waiting, tries, failures = list(reversed(addresses)), set[asyncio.Task[socket.socket]](), list[OSError]()
    try:
        while waiting or tries:
            if waiting:
                tries.add(asyncio.create_task(_connected(waiting.pop())))
            head_start = _HEAD_START if waiting else None
            done, _ = await asyncio.wait(tries, timeout=head_start, return_when=asyncio.FIRST_COMPLETED)
            for each in done:
                tries.discard(each)
                error = each.exception()
                if error is None:
                    return each.result()
                if not isinstance(error, OSError):
                    raise error
                failures.append(error)
    finally:
        for each in tries:
            each.add_done_callback(_let_go)
            each.cancel()
        if tries:
            await asyncio.wait(tries)
    raise next((error for error in failures if error.errno not in _NOWHERE), failures[0])


async def _connected(address: _Found) -> socket.socket:
    family, kind, protocol, _, where = address
    one = socket.socket(family, kind, protocol)
    try:
        one.setblocking(False)
        await asyncio.get_running_loop().sock_connect(one, where)
    except BaseException:
        one.close()
        raise
    return one


def _let_go(attempt: asyncio.Task[socket.socket]) -> None:
    """Close what another attempt was faster than."""
    if not attempt.cancelled() and attempt.exception() is None:
        attempt.result().close()
