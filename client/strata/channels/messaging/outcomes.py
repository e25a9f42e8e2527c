"""The outcome of a message as an awaitable value, for any messaging node.

A node answers `send` at once and reports the outcome by an event (C-261). `Outcomes` joins the two.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable

from strata.channels.awaiting import answer_of
from strata.channels.messaging.node import MessagingNode
from strata.channels.messaging.values import NodeMessageError, NodeMessageSent

__all__ = ["Outcome", "Outcomes"]

Outcome = NodeMessageSent | NodeMessageError


class Outcomes:
    """The outcomes of messages sent through one node. Belongs to one event loop; `close` it when done."""

    def __init__(self, node: MessagingNode) -> None:
        self._events = node.message_events
        self._waiting: dict[str, asyncio.Future[Outcome]] = {}
        self._events.on(NodeMessageSent.name, self._resolve)
        self._events.on(NodeMessageError.name, self._resolve)

    def close(self) -> None:
        """Stop listening to the node. Outcomes that are still open are cancelled. Idempotent."""
        self._events.off(NodeMessageSent.name, self._resolve)
        self._events.off(NodeMessageError.name, self._resolve)
        for outcome in list(self._waiting.values()):
            outcome.cancel()

    def is_waiting(self, request_id: str) -> bool:
        """Whether the outcome of the message with this request id is still open."""
        return request_id in self._waiting

    async def begin(self, request_id: str, sending: Awaitable[object]) -> asyncio.Future[Outcome]:
        """Wait until `node.send` or `node.send_again` has taken a message with this request id.

            outcome = await (await outcomes.begin("r", node.send(envelope, request_id="r")))

        The future has the outcome once the node reports it. Raises what `sending` raises. Cancelling cancels
        `sending`, so the message may be sent or not.
        """
        outcome: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()
        self._waiting[request_id] = outcome
        outcome.add_done_callback(lambda _: self._forget(request_id, outcome))
        try:
            await answer_of(lambda: sending)
        except BaseException:
            outcome.cancel()
            raise
        return outcome

    def _forget(self, request_id: str, outcome: asyncio.Future[Outcome]) -> None:
        if self._waiting.get(request_id) is outcome:
            del self._waiting[request_id]

    def _resolve(self, event: Outcome) -> None:
        outcome = self._waiting.pop(event.request_id, None)
        if outcome is not None and not outcome.done():
            outcome.set_result(event)
