"""The owner of a socket, and the events it is notified of, in the order of a socket's life."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Final, Protocol

from websockets.http11 import Request

from relayd.roll import OpenSession

__all__ = ["NOBODY", "SocketHandler"]


class SocketHandler(Protocol):
    """The owner of a socket, which is notified of the socket's events; the methods stand in their order."""

    def accepted(self, peer: str | None) -> bool:
        """A socket was accepted from this address. Returning False drops it without an answer."""

    def requested(self, request: Request, now: float) -> None:
        """The opening handshake, or a plain HTTP request: answer it with `accept`, `reject` or `respond`."""

    def received(self, data: bytes, is_text: bool, now: float) -> None:
        """One whole message arrived; text is known to be UTF-8."""

    def review(self) -> None:
        """Check that the grounds for admitting the peer still hold; about once a second while open."""

    def tick(self) -> None:
        """Called about once a second while open, unless the peer reads too slowly."""

    def worked(self, seconds: float, now: float) -> float:
        """A step's work for the peer took this long. Returns how long not to read from it, in seconds."""

    def turn(self, now: float) -> float:
        """The place of the peer's next step among the steps of others: the lowest is first."""

    @property
    def account(self) -> Hashable:
        """The account that pays for the bytes the socket holds."""

    @property
    def held_bytes(self) -> int:
        """The bytes kept for the peer besides those that the socket holds."""

    def described(self, process: str) -> OpenSession | None:
        """The session as operators see it; None before there is a session."""

    def expelled(self) -> None:
        """An operator ends the session."""

    def refuse_publishes(self, refuse: bool) -> None:
        """Say whether publishes of the peer are refused."""

    def closing(self) -> None:
        """Nothing more will be sent: release what feeds this socket. Called once or more."""

    def ended(self, reason: str) -> None:
        """The socket is gone."""


class _Nobody:
    """The owner of a socket that has ended: late events are ignored."""

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
