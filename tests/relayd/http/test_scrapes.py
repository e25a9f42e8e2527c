"""`/metrics` under many scrapers."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest

from relayd.http import scrapes as scrapes_module
from relayd.http.scrapes import Scrapes


@pytest.mark.req("R-321")
async def test_a_crowd_of_scrapers_makes_the_relay_write_two_texts(eventually):
    threads: list[int] = []
    counted = 0

    def count() -> None:
        nonlocal counted
        counted += 1

    def render() -> tuple[str, bytes]:
        threads.append(threading.get_ident())
        return "text/plain", b"%d" % counted

    scrapes = Scrapes(count, render)
    crowd = [asyncio.create_task(scrapes.get()) for _ in range(500)]
    await eventually(lambda: threads)
    later = [asyncio.create_task(scrapes.get()) for _ in range(500)]
    crowd[0].cancel()
    assert {await each for each in crowd[1:]} == {("text/plain", b"1")}
    assert {await each for each in later} == {("text/plain", b"2")}, (
        "nobody gets what is older than the request"
    )
    assert len(threads) == counted == 2
    assert threading.get_ident() not in threads


async def test_a_text_that_cannot_be_written_fails_those_who_asked_for_it_and_no_others():
    texts = iter([b"", b"fine"])

    def render() -> tuple[str, bytes]:
        return "text/plain", next(texts) or 1 // 0  # type: ignore[return-value]

    scrapes = Scrapes(lambda: None, render)
    with pytest.raises(ZeroDivisionError):
        await scrapes.get()
    assert await scrapes.get() == ("text/plain", b"fine")


@pytest.mark.req("R-321")
async def test_texts_are_made_one_at_a_time_and_with_a_pause_between_them(monkeypatch, eventually):
    monkeypatch.setattr(scrapes_module, "_INTERVAL", 0.05)
    begun: list[float] = []
    go_on = threading.Event()

    def render() -> tuple[str, bytes]:
        begun.append(time.monotonic())
        go_on.wait(10)
        return "text/plain", b""

    scrapes = Scrapes(lambda: None, render)
    first = asyncio.create_task(scrapes.get())
    await eventually(lambda: begun)
    second = asyncio.create_task(scrapes.get())
    await asyncio.sleep(0.1)
    assert len(begun) == 1, "one at a time"
    second_begins_after = time.monotonic()
    go_on.set()
    await asyncio.gather(first, second)
    await scrapes.get()
    assert begun[2] - second_begins_after >= 0.05
