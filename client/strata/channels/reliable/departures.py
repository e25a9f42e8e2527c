"""Own messages on their way out of this process, for whoever waits until they are out.

A message is out once the transport has all its chunks. It leaves the wait too when it is refused for good.
`NotSent` names refused messages, unless the program has heard the event of the refusal. An asyncio shell.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable

from strata.channels.reliable.errors import NotSent
from strata.channels.reliable.events import ChannelEvent, FailureStage, ReliableMessageSendError
from strata.channels.reliable.requests import Requests
from strata.protocol.errors import StrataError

__all__ = ["Departures"]

_log = logging.getLogger("strata.reliable")

_MAX_REFUSED = 1_024
"""Most refusals that nobody has heard of; then the oldest is forgotten, and the log has it."""


class _Wait:
    """One call that waits, and the messages that it waits for."""

    def __init__(self, waiting: Iterable[str]) -> None:
        self.waiting = set(waiting)
        self.refused: dict[str, str] = {}
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def leave(self, request_id: str) -> None:
        self.waiting.discard(request_id)
        if not self.waiting:
            self.end()

    def end(self, error: Exception | None = None) -> None:
        if self.ended.done():
            return
        if error is None:
            self.ended.set_result(None)
        else:
            self.ended.set_exception(error)


class Departures:
    """Waits for the messages of one channel to go out."""

    def __init__(self, requests: Requests) -> None:
        self._requests = requests
        self._waits: list[_Wait] = []
        self._refused: dict[str, str] = {}
        """Refused messages that neither an event nor an error has told the program of, with the reasons."""

    def note(self, events: Iterable[ChannelEvent], *, heard: bool) -> None:
        """The engine has made a step, and this is what it tells. `heard`: the program listens to refusals."""
        for event in events:
            if not isinstance(event, ReliableMessageSendError) or event.stage is not FailureStage.DISPATCH:
                continue
            for wait in self._waits:
                if event.request_id in wait.waiting:
                    wait.refused[event.request_id] = event.error
            if not heard:
                self._refused[event.request_id] = event.error
                if len(self._refused) > _MAX_REFUSED:
                    del self._refused[next(iter(self._refused))]
        for request_id in self._requests.departed():
            for wait in self._waits:
                wait.leave(request_id)

    def end(self, error: Exception | None = None) -> None:
        """Let nobody wait any longer: nothing more goes out. With `error` they get it."""
        for wait in self._waits:
            wait.end(error)

    async def drain(self, timeout: float | None) -> None:
        """Wait until every message accepted so far is out, for so many seconds at most. None has no limit.

        Raises `NotSent` for messages that are not out by then and for refused ones that nobody was told of,
        and what `end` was given. Cancelling changes nothing.
        """
        wait = _Wait(self._requests.unsent)
        await self._until_out(wait, timeout)
        refused = self.take_refused() | wait.refused
        if wait.waiting or refused:
            raise NotSent(tuple(each for each in self._requests.unsent if each in wait.waiting), refused)

    async def settle(self, timeout: float) -> None:
        """Wait as `drain` does, and leave what is not out to whoever looks next."""
        try:
            await self._until_out(_Wait(self._requests.unsent), timeout)
        except StrataError as error:
            _log.info("nothing more goes out: %s", error)

    async def _until_out(self, wait: _Wait, timeout: float | None) -> None:
        if not wait.waiting:
            return
        self._waits.append(wait)
        try:
            async with asyncio.timeout(timeout):
                await wait.ended
        except TimeoutError:
            pass
        finally:
            self._waits.remove(wait)

    def take_refused(self) -> dict[str, str]:
        """The refused messages, with the reasons, that nobody was told of. The program is told now."""
        refused, self._refused = self._refused, {}
        return refused
