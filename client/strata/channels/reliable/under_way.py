"""Messages that a node has taken and not answered: bounded, and each gets its outcome or is given up."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from strata.channels.messaging.node import MessagingNode
from strata.channels.messaging.outcomes import Outcome, Outcomes
from strata.channels.messaging.values import NodeMessageError
from strata.channels.rate_limit.values import Transmission
from strata.channels.reliable.ephemerals import Ephemeral
from strata.channels.reliable.membership import HubMember
from strata.relays.peer_timeout import PeerTimeout

__all__ = ["Consignment", "UnderWay"]

_MAX_MESSAGES = 64
_MAX_BYTES = 4 << 20
_ANSWER_TIMEOUT = 120.0


@dataclass(frozen=True, slots=True, eq=False)
class Consignment:
    """A message on its way to a node, or held by it, for one channel."""

    member: HubMember
    sent: Transmission | Ephemeral
    size_bytes: int


class UnderWay:
    """The messages of all channels that a node has taken and not answered."""

    def __init__(
        self,
        node: MessagingNode,
        *,
        on_outcome: Callable[[Consignment, Outcome], None],
        on_ended: Callable[[], None],
    ) -> None:
        """`on_ended` is called when a message is no longer under way, so that another one may be."""
        self._outcomes = Outcomes(node)
        self._on_outcome = on_outcome
        self._on_ended = on_ended
        self._waiting: dict[Consignment, asyncio.Task[None] | None] = {}
        """The task that awaits the outcome of each message, once the node has taken the message."""
        self._size_bytes = 0
        self._settled = asyncio.Event()

    @property
    def is_full(self) -> bool:
        """Whether the next message must wait for an outcome."""
        return len(self._waiting) >= _MAX_MESSAGES or self._size_bytes >= _MAX_BYTES

    def free_name(self, request_id: str) -> str:
        """A free name for a request to the node; programs of two channels may choose the same request id."""
        name, number = request_id, 1
        while self._outcomes.is_waiting(name):
            number += 1
            name = f"{request_id}:{number}"
        return name

    async def hand_to_node(
        self, consignment: Consignment, request_id: str, sending: Awaitable[object]
    ) -> None:
        """Return once the node has taken a message. Raises as `sending` does; then call `end`."""
        self._waiting[consignment] = None
        self._size_bytes += consignment.size_bytes
        outcome = await self._outcomes.begin(request_id, sending)
        if consignment in self._waiting:
            waiting = self._await_outcome(consignment, request_id, outcome)
            self._waiting[consignment] = asyncio.create_task(waiting, name=f"strata-outcome {request_id}")
        else:  # it was given up in the meantime
            outcome.cancel()

    async def _await_outcome(
        self, consignment: Consignment, request_id: str, outcome: asyncio.Future[Outcome]
    ) -> None:
        try:
            async with PeerTimeout(_ANSWER_TIMEOUT):
                told = await outcome
        except TimeoutError:
            told = NodeMessageError(request_id, None, "the node has not answered", "timeout")
        self._on_outcome(consignment, told)

    def end(self, consignment: Consignment) -> bool:
        """Count a message as no longer under way; False if it was given up before."""
        if consignment not in self._waiting:
            return False
        task = self._waiting.pop(consignment)
        if task is not None and task is not asyncio.current_task():
            task.cancel()
        self._size_bytes -= consignment.size_bytes
        self._settled.set()
        self._on_ended()
        return True

    async def settled(self, member: HubMember, timeout: float) -> list[Transmission | Ephemeral]:
        """Wait until a channel has nothing under way. Returns messages given up after `timeout` seconds."""
        try:
            async with PeerTimeout(timeout):
                while any(each.member is member for each in self._waiting):
                    self._settled.clear()
                    await self._settled.wait()
        except TimeoutError:
            pass
        left = [each for each in self._waiting if each.member is member]
        for each in left:
            self.end(each)
        return [each.sent for each in left]

    def stop_listening(self) -> None:
        """Stop listening to the node's answers."""
        self._outcomes.close()

    def give_up(self) -> None:
        """Give up everything that is under way."""
        for consignment in list(self._waiting):
            self.end(consignment)
