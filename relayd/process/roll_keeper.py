"""Answers, for one process, which sessions are open (`relayd.roll`)."""

from __future__ import annotations

import asyncio
from typing import Final

import msgspec

from relayd.logs import get_logger, problem_of
from relayd.relay import RunningRelay
from relayd.roll import Question, SessionSelection, parts_of
from relayd.sessions.registry import OpenSocket
from relayd.store.types import StoreError

__all__ = ["RollKeeper"]

_log = get_logger("relayd.server")

_MOST_WAITING: Final = 8
"""The questions that wait for their turn; beyond it, the asker must ask again."""


class RollKeeper:
    """Takes questions as they arrive and answers them one by one."""

    def __init__(self, relay: RunningRelay) -> None:
        self._relay = relay
        self._questions: asyncio.Queue[Question] = asyncio.Queue(_MOST_WAITING)

    def ask(self, payload: str) -> None:
        """A notification has arrived. It is ignored if it is no question, or is for another process."""
        try:
            question = _DECODER.decode(payload)
        except msgspec.MsgspecError:
            return
        if self._relay.store.roll.process in question.of and not self._questions.full():
            self._questions.put_nowait(question)

    async def run(self) -> None:
        """Answer until cancelled."""
        while True:
            question = await self._questions.get()
            try:
                await self._answer(question)
            except StoreError as error:
                _log.warning("roll_unanswered", problem=problem_of(error))
            except Exception as error:
                self._relay.faults.caught("background", error)

    async def _answer(self, question: Question) -> None:
        roll, registry, selection = self._relay.store.roll, self._relay.registry, SessionSelection(question)
        looked = asyncio.Event()

        def look(socket: OpenSocket) -> None:
            session = socket.described(roll.process)
            if session is not None:
                selection.add(session)

        registry.each(list(registry.sockets), look, looked.set)
        await looked.wait()
        parts = list(parts_of(roll.process, selection.total, selection.page()))
        await roll.answer(question.reply, parts)


_DECODER: Final = msgspec.json.Decoder(Question)
