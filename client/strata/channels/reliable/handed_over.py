"""A message that a channel hands to its program: the program says when it is done with it."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Protocol

from strata.channels.reliable.errors import ChannelNotOpen

__all__ = ["HandedOver", "TakesAcks", "hand_over"]


class TakesAcks(Protocol):
    """Hands messages over, and hears that the program is done with them."""

    async def ack(self, messages: Iterable[object]) -> None: ...


class HandedOver:
    """What a channel hands over: a program says that it is done with it."""

    __slots__ = ("_handed_by",)
    _handed_by: weakref.ref[TakesAcks]

    async def ack(self) -> None:
        """Acknowledge this message, as `ReliableChannel.ack`: it never comes again.

        Returns once the store has forgotten it. With `at_most_once`, or acknowledged already, it changes
        nothing. Raises `ChannelNotOpen` once the channel that handed it over is closed, `PersistenceError` if
        the store failed for good, `ChannelFailed`, and `ValueError` for a copy, and for a message that was
        not handed over (as those of `history`). Cancelling stops the wait alone.
        """
        if not hasattr(self, "_handed_by"):
            raise ValueError("only a message that a channel has handed over can be acknowledged, and no copy")
        handed_by = self._handed_by()
        if handed_by is None:
            raise ChannelNotOpen
        await handed_by.ack([self])


def hand_over(message: HandedOver, handed_by: TakesAcks) -> None:
    """Say who hears of a message's `ack`.

    Whoever keeps the message keeps no channel with it, and no copy or pickle of it has the reference.
    """
    object.__setattr__(message, "_handed_by", weakref.ref(handed_by))
