"""Waiting until a channel's own messages are out of this process.

A message is out once the transport has all its chunks. The wait for it also ends when it is refused
permanently. `NotSent` names refused messages, unless the program has received the event of the refusal. An
asyncio shell.
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
"""The most unreported refusals that are kept; beyond that the oldest is forgotten."""


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
        """Refused messages that no event or error has reported to the program, with the reasons."""

    def note(self, events: Iterable[ChannelEvent], *, heard: bool) -> None:
        """The engine has made a step that reports these events. `heard`: the program listens to refusals."""
        for event in events:
            if not isinstance(event, ReliableMessageSendError) or event.stage is not FailureStage.DISPATCH:
                continue
            for wait in self._waits:
                if event.request_id in wait.waiting:
                    wait.refused[event.request_id] = event.error
            if not heard:
                self._refused[event.request_id] = event.error
                if len(self._refused) > _MAX_REFUSED:
                    forgotten = next(iter(self._refused))
                    reason = self._refused.pop(forgotten)
                    _log.warning("message %s was refused, and nobody asked: %s", forgotten, reason)
        for request_id in self._requests.departed():
            for wait in self._waits:
                wait.leave(request_id)

    def end(self, error: Exception | None = None) -> None:
        """End all waits, because nothing more goes out. With `error` they raise it."""
        for wait in self._waits:
            wait.end(error)

    async def drain(self, timeout: float | None) -> None:
        """Wait until every message accepted so far is out, for at most `timeout` seconds; None has no limit.

        Raises `NotSent` for messages that are not out by then and for unreported refused messages, and the
        error that `end` was given. Cancelling changes nothing.
        """
        wait = _Wait(self._requests.unsent)
        await self._until_out(wait, timeout)
        refused = self.take_refused() | wait.refused
        if wait.waiting or refused:
            raise NotSent(tuple(each for each in self._requests.unsent if each in wait.waiting), refused)

    async def settle(self, timeout: float) -> None:
        """Wait as `drain` does, but do not raise for messages that are not out."""
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
        """Return the unreported refused messages, with the reasons; they count as reported from now on."""
        refused, self._refused = self._refused, {}
        return refused
