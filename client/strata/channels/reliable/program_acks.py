"""Messages that a channel hands over, and that the program acknowledges when it is done with them."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Protocol

from strata.channels.reliable.errors import ChannelNotOpen

__all__ = ["HandedOver", "TakesAcks", "hand_over"]


class TakesAcks(Protocol):
    """Hands messages over, and is notified when the program is done with them."""

    async def ack(self, messages: Iterable[object]) -> None: ...


class HandedOver:
    """A message that a channel hands over and the program acknowledges."""

    __slots__ = ("_handed_by",)
    _handed_by: weakref.ref[TakesAcks]

    async def ack(self) -> None:
        """Acknowledge this message, as `ReliableChannel.ack` does: it never comes again.

        Returns once the store has removed it. Changes nothing with `at_most_once`, or if the message is
        already acknowledged. Raises `ChannelNotOpen` once the channel that handed it over is closed,
        `PersistenceError` if the store failed permanently, `ChannelFailed`, and `ValueError` for a copy or a
        message that was not handed over (such as those of `history`). Cancelling stops only the wait.
        """
        if not hasattr(self, "_handed_by"):
            raise ValueError("only a message that a channel has handed over can be acknowledged, and no copy")
        handed_by = self._handed_by()
        if handed_by is None:
            raise ChannelNotOpen
        await handed_by.ack([self])


def hand_over(message: HandedOver, handed_by: TakesAcks) -> None:
    """Set the object that is notified of a message's `ack`.

    A reference to the message does not keep the channel alive, and no copy or pickle of it has the reference.
    """
    object.__setattr__(message, "_handed_by", weakref.ref(handed_by))
