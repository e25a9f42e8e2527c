"""Handlers by event name: order, failures, and handlers that are added and removed."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass
from typing import ClassVar

import pytest
from strata.channels.messaging import EventEmitter


@dataclass(frozen=True)
class Rang:
    name: ClassVar[str] = "rang"
    times: int = 1


@dataclass(frozen=True)
class Knocked:
    name: ClassVar[str] = "knocked"


@pytest.fixture
def emitter() -> EventEmitter:
    return EventEmitter(["rang", "knocked"])


@pytest.mark.req("C-026")
async def test_handlers_are_called_in_the_order_they_were_added_in(emitter):
    called: list[str] = []
    for name in ("first", "second", "third"):
        emitter.on("rang", lambda event, name=name: called.append(f"{name} {event.times}"))
    await emitter.emit(Rang(2))
    assert called == ["first 2", "second 2", "third 2"]


@pytest.mark.req("C-026")
async def test_an_event_reaches_the_handlers_of_its_own_name_alone(emitter):
    rang: list[Rang] = []
    knocked: list[Knocked] = []
    emitter.on("rang", rang.append)
    emitter.on("knocked", knocked.append)
    await emitter.emit(Knocked())
    assert rang == [] and knocked == [Knocked()]


@pytest.mark.req("C-026")
async def test_a_handler_that_was_taken_off_is_called_no_more(emitter):
    called: list[Rang] = []
    handler = emitter.on("rang", called.append)
    await emitter.emit(Rang(1))
    emitter.off("rang", handler)
    await emitter.emit(Rang(2))
    assert called == [Rang(1)]


async def test_taking_off_what_was_never_added_is_no_fault(emitter):
    emitter.off("rang", print)
    assert emitter.count("rang") == 0


async def test_a_coroutine_is_waited_for_before_the_next_handler_is_called(emitter):
    called: list[str] = []

    async def slow(_: object) -> None:
        await asyncio.sleep(0)
        called.append("slow")

    emitter.on("rang", slow)
    emitter.on("rang", lambda _: called.append("quick"))
    await emitter.emit(Rang())
    assert called == ["slow", "quick"]


@pytest.mark.parametrize("kind", ["function", "coroutine"])
async def test_a_handler_that_raises_stops_nobody_and_is_logged(emitter, kind, caplog):
    called: list[Rang] = []

    def breaks(_: object) -> None:
        raise RuntimeError("broken handler")

    async def breaks_later(_: object) -> None:
        await asyncio.sleep(0)
        raise RuntimeError("broken handler")

    emitter.on("rang", breaks if kind == "function" else breaks_later)
    emitter.on("rang", called.append)
    with caplog.at_level(logging.ERROR, "strata.events"):
        await emitter.emit(Rang())
    assert called == [Rang()]
    assert "broken handler" in caplog.text


async def test_handlers_may_come_and_go_while_an_event_is_told(emitter):
    called: list[str] = []

    def once(_: object) -> None:
        called.append("once")
        emitter.off("rang", once)
        emitter.on("rang", lambda _: called.append("late"))

    emitter.on("rang", once)
    emitter.on("rang", lambda _: called.append("other"))
    await emitter.emit(Rang())
    assert called == ["once", "other"], "whoever comes during an event hears the next one"
    called.clear()
    await emitter.emit(Rang())
    assert called == ["other", "late"]


async def test_cancelling_whoever_emits_cancels_the_handler_it_waits_for(emitter):
    ended: list[str] = []

    async def waits(_: object) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.append("cancelled")

    emitter.on("rang", waits)
    task = asyncio.create_task(emitter.emit(Rang()))
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.wait([task])
    assert task.cancelled() and ended == ["cancelled"]


def test_an_unknown_name_is_refused_and_the_known_ones_are_listed(emitter):
    for call in (
        lambda: emitter.on("rings", print),
        lambda: emitter.off("rings", print),
        lambda: emitter.count("rings"),
    ):
        with pytest.raises(ValueError, match="rang, knocked"):
            call()
    assert emitter.names == ("rang", "knocked")


def test_it_says_how_many_listen(emitter):
    assert emitter.count("knocked") == 0
    emitter.on("knocked", print)
    emitter.on("knocked", str)
    assert emitter.count("knocked") == 2 and emitter.count("rang") == 0
