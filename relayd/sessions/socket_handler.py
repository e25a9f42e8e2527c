"""Who owns a socket: what it is told of, in the order of a socket's life."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Final, Protocol

from websockets.http11 import Request

from relayd.roll import OpenSession

__all__ = ["NOBODY", "SocketHandler"]


class SocketHandler(Protocol):
    """The owner of a socket, which hears of its events; they stand here in order."""

    def accepted(self, peer: str | None) -> bool:
        """A socket was accepted from this address. False drops it without a word."""

    def requested(self, request: Request, now: float) -> None:
        """The opening handshake, or a plain HTTP request: answer it with `accept`, `reject` or `respond`."""

    def received(self, data: bytes, is_text: bool, now: float) -> None:
        """One whole message; text is known to be UTF-8."""

    def review(self) -> None:
        """About once a second while open: what the peer was let in by must still hold."""

    def tick(self) -> None:
        """About once a second while open, unless the peer reads too slowly."""

    def worked(self, seconds: float, now: float) -> float:
        """A step's work for the peer took so long. How long nothing is to be read from it now, in seconds."""

    def turn(self, now: float) -> float:
        """The place of the peer's next step among the steps of others: the lowest is first."""

    @property
    def account(self) -> Hashable:
        """Whose bytes the socket holds."""

    @property
    def held_bytes(self) -> int:
        """What is kept for the peer besides what the socket holds."""

    def described(self, process: str) -> OpenSession | None:
        """The session as operators see it; None before it is one."""

    def expelled(self) -> None:
        """An operator ends the session."""

    def refuse_publishes(self, refuse: bool) -> None:
        """Whether the peer may publish nothing now."""

    def closing(self) -> None:
        """Nothing further will be sent: let go of what feeds this socket. Called once or more."""

    def ended(self, reason: str) -> None:
        """The socket is gone."""


class _Nobody:
    """The owner of a socket that has ended: nothing that comes late concerns anybody."""

    account: Hashable = None
    held_bytes = 0

    def accepted(self, peer: str | None) -> bool:
        return False

    def requested(self, request: Request, now: float) -> None:
        pass

    def received(self, data: bytes, is_text: bool, now: float) -> None:
        pass

    def review(self) -> None:
        pass

    def tick(self) -> None:
        pass

    def worked(self, seconds: float, now: float) -> float:
        return 0.0

    def turn(self, now: float) -> float:
        return now

    def described(self, process: str) -> OpenSession | None:
        return None

    def expelled(self) -> None:
        pass

    def refuse_publishes(self, refuse: bool) -> None:
        pass

    def closing(self) -> None:
        pass

    def ended(self, reason: str) -> None:
        pass


NOBODY: Final[SocketHandler] = _Nobody()
