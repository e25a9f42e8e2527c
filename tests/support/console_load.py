"""What a flood of packets costs the console's page: `python -m tests.support.console_load`.

Events are fed to the page as if its socket had brought them. What is told is how much of the processor our
own script takes, for each event and for each frame that the browser draws, and beside it what styles, layout
and drawing take: those are the browser's, and without a graphics card they are the greater part. Times are
processor times of the page's main thread, so that a busy machine counts for little; how far frames lie apart
is real time.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.support.bare_client import open_client
from tests.support.browsers import browser, watched
from tests.support.made_packets import make, new_identity
from tests.support.relay_process import RelayProcess

if TYPE_CHECKING:
    from playwright.async_api import Browser, CDPSession, Page

__all__ = ["FEED", "Load", "flood", "opened"]

FEED = """
const Real = WebSocket;
window.WebSocket = class extends Real {
    send(text) {
        const message = JSON.parse(text);
        if (message.gapless) window.tail = { socket: this, id: message.subscription_id };
        super.send(text);
    }
};
const events = (packet, first, count) => {
    const received = Math.floor(Date.now() / 1000);
    return Array.from({ length: count }, (_, at) => {
        const id = "0x" + String(first + at).padStart(64, "0");
        const text = packet.replace(/0x[0-9a-f]{64}/, id);
        return `{"type":"EVENT","subscription_id":"${window.tail.id}","packet":${text},` +
            `"received_at":${received},"cursor":"c${first + at}"}`;
    });
};
const bring = (data) => window.tail.socket.onmessage({ data });
window.feed = (packet, count, first = 0) => events(packet, first, count).forEach(bring);

// More different packets than a list keeps, made before anything is measured.
window.flood = async (packet, rate, seconds) => {
    const made = events(packet, 0, 12000);
    const frames = [];
    let isOver = false;
    window.most = 0;
    const elements = document.getElementsByTagName("*");
    const frame = (at) => {
        frames.push(at);
        window.most = Math.max(window.most, elements.length);
        if (!isOver) requestAnimationFrame(frame);
    };
    await new Promise((done) => setTimeout(done, 300));
    requestAnimationFrame(frame);
    const begun = performance.now();
    let brought = 0;
    // A few in each task, as a socket brings them: else what a busy machine has held up would come as one.
    const { port1, port2 } = new MessageChannel();
    await new Promise((done) => {
        const bringSome = () => {
            const passed = (performance.now() - begun) / 1000;
            const due = Math.floor(rate * Math.min(passed, seconds));
            const until = Math.min(due, brought + 40);
            for (; brought < until; brought++) bring(made[brought % made.length]);
            if (brought < due) port2.postMessage(null);
            else if (passed >= seconds) done();
            else setTimeout(bringSome, 4);
        };
        port1.onmessage = bringSome;
        bringSome();
    });
    isOver = true;
    return { brought, frames };
};
"""
"""Events by the thousand, as if the relay had sent them."""

LONGEST_TRACE = 30
"""In seconds: longer floods are measured without single tasks."""
_OPENINGS = 9
_PARTS = ("ScriptDuration", "RecalcStyleDuration", "LayoutDuration", "TaskDuration")


@dataclass(frozen=True)
class Load:
    """The cost of a flood. Times are processor seconds of the page's main thread."""

    events: int
    frames: int
    seconds: float
    script: float
    styles_and_layout: float
    rest: float
    """Drawing, garbage collection and other work of the browser."""
    task: float
    """The longest task at the 99.9th percentile: nothing is drawn meanwhile."""
    longest: float
    """The longest task of all."""
    frame: tuple[float, float]
    """The time of a frame itself, at the 50th and 99th percentiles: the drawing task and the script in it."""
    busy: tuple[float, float]
    """All work of the thread from one frame to the next, at the 50th and 99th percentiles. It should fit
    between two refreshes of a screen, which are 16.7 ms apart."""
    late: float
    """The distance between two frames at the 99th percentile, in milliseconds."""
    elements: int
    """The largest number of elements that the page had at a time."""
    heap_bytes: int
    """The size of the heap at the end, after a collection."""

    def lines(self) -> list[str]:
        """The figures as text for people."""
        frame, rate = 1000 / max(self.frames, 1), self.frames / self.seconds
        return [
            f"{self.events:,} events in {self.seconds:.0f} s, {rate:.0f} frames a second",
            f"our script: {1e6 * self.script / max(self.events, 1):.1f} us an event, "
            f"{frame * self.script:.2f} ms a frame, {100 * self.script / self.seconds:.0f} % of the thread",
            f"styles and layout: {frame * self.styles_and_layout:.2f} ms a frame; "
            f"drawing and the rest: {frame * self.rest:.2f} ms a frame",
            f"a task of the page's thread: {1000 * self.task:.1f} ms at most of 999 in 1000, "
            f"the longest {1000 * self.longest:.1f} ms"
            if self.longest
            else "single tasks were not looked at",
            f"a frame itself: {1000 * self.frame[0]:.1f} ms, {1000 * self.frame[1]:.1f} ms of 99 in 100; "
            f"busy from frame to frame: {1000 * self.busy[0]:.1f} ms, {1000 * self.busy[1]:.1f} ms"
            if self.frame[1]
            else "single frames were not looked at",
            f"frames apart, 99 of 100: {self.late:.0f} ms of real time",
            f"elements: {self.elements} at most; heap afterwards: {self.heap_bytes / 1e6:.1f} MB",
        ]


async def _times(session: CDPSession) -> dict[str, float]:
    found = await session.send("Performance.getMetrics")
    return {each["name"]: each["value"] for each in found["metrics"]}


@dataclass(frozen=True)
class _Task:
    """One task of the page's thread."""

    at: float
    ends: float
    """Both in microseconds of real time."""
    seconds: float
    """Processor time."""


def _tasks(trace: bytes) -> tuple[list[_Task], list[float]]:
    """The tasks of the page's thread and the times at which frames began, both in order of time."""
    events = json.loads(trace)["traceEvents"]
    threads = {
        (each["pid"], each["tid"])
        for each in events
        if each["name"] == "thread_name" and each["args"]["name"] == "CrRendererMain"
    }
    ours = [each for each in events if (each["pid"], each["tid"]) in threads]
    tasks = [
        _Task(each["ts"], each["ts"] + each.get("dur", 0), each.get("tdur", 0) / 1e6)
        for each in ours
        if each["name"] == "ThreadControllerImpl::RunTask"
    ]
    frames = sorted(each["ts"] for each in ours if each["name"] == "FireAnimationFrame")
    return sorted(tasks, key=lambda task: task.at), frames


def _per_frame(tasks: list[_Task], frames: list[float]) -> tuple[list[float], list[float]]:
    """Processor seconds of each task that drew a frame, and of all tasks since the previous frame."""
    drawn, busy = [], []
    since = 0.0
    waiting = iter(frames)
    frame = next(waiting, math.inf)
    for task in tasks:
        since += task.seconds
        if task.at <= frame < task.ends:
            drawn.append(task.seconds)
            busy.append(since)
            since = 0.0
        while frame < task.ends:
            frame = next(waiting, math.inf)
    return sorted(drawn), sorted(busy[1:])


def _at(part: float, ordered: list[float]) -> float:
    return ordered[int(part * len(ordered))] if ordered else 0.0


async def flood(page: Page, packet: str, *, rate: int, seconds: float) -> Load:
    """Feed a page that was opened with `FEED`."""
    session = await page.context.new_cdp_session(page)
    await session.send("Performance.enable", {"timeDomain": "threadTicks"})
    browser_ = page.context.browser
    assert browser_ is not None
    is_traced = seconds <= LONGEST_TRACE
    if is_traced:
        await browser_.start_tracing(page=page, categories=["toplevel", "devtools.timeline"])
    before, begun = await _times(session), time.monotonic()
    said: dict[str, Any] = await page.evaluate("(asked) => window.flood(...asked)", [packet, rate, seconds])
    after, ended = await _times(session), time.monotonic()
    tasks, traced_frames = _tasks(await browser_.stop_tracing()) if is_traced else ([], [])
    drawn, busy = _per_frame(tasks, traced_frames)
    lengths = sorted(task.seconds for task in tasks)
    await session.send("HeapProfiler.collectGarbage")
    heap = (await _times(session))["JSHeapUsedSize"]
    script, styles, layout, task = (after[name] - before[name] for name in _PARTS)
    apart = sorted(later - sooner for sooner, later in zip(said["frames"], said["frames"][1:], strict=False))
    await session.detach()
    return Load(
        events=said["brought"],
        frames=len(said["frames"]),
        seconds=ended - begun,
        script=script,
        styles_and_layout=styles + layout,
        rest=task - script - styles - layout,
        task=_at(0.999, lengths),
        longest=lengths[-1] if lengths else 0.0,
        frame=(_at(0.5, drawn), _at(0.99, drawn)),
        busy=(_at(0.5, busy), _at(0.99, busy)),
        late=_at(0.99, apart),
        elements=await page.evaluate("window.most"),
        heap_bytes=int(heap),
    )


async def opened(page: Page, url: str) -> None:
    """Open the live page so that it can be fed."""
    await page.add_init_script(FEED)
    await page.goto(url)
    await page.get_by_text("Connected").first.wait_for()
    await page.wait_for_function("() => window.tail !== undefined")


async def connected_after(chromium: Browser, url: str) -> float:
    """Milliseconds of real time from the address to a page that is connected, with an empty cache."""
    async with watched(chromium, url) as (page, _):
        await page.goto(url)
        seen = await page.wait_for_function(
            "() => document.body.innerText.includes('Connected') && performance.now()"
        )
        return float(await seen.json_value())


async def _run(relay: RelayProcess, rate: int, seconds: float, profile: bool) -> None:
    packet = make(new_identity(), "The tide table for Tuesday is up: low water 06:12, high water 12:31.")
    async with open_client(relay.ws) as client, browser() as chromium:
        await client.publish(packet)
        opening = sorted([await connected_after(chromium, relay.http) for _ in range(_OPENINGS)])
        median, most = opening[_OPENINGS // 2], opening[-1]
        print(f"connected after {median:.0f} ms, {most:.0f} ms at most, of {_OPENINGS} visits")
        async with watched(chromium, relay.http) as (page, watch):
            await opened(page, relay.http)
            await flood(page, packet.canonical.decode(), rate=rate, seconds=2)  # a warm-up, for the compiler
            session = await page.context.new_cdp_session(page)
            if profile:
                await session.send("Profiler.enable")
                await session.send("Profiler.setSamplingInterval", {"interval": 200})
                await session.send("Profiler.start")
            load = await flood(page, packet.canonical.decode(), rate=rate, seconds=seconds)
            if profile:
                _print_profile((await session.send("Profiler.stop"))["profile"])
            print(*load.lines(), *watch.errors, sep="\n")


def _print_profile(profile: dict[str, Any]) -> None:
    nodes = {node["id"]: node["callFrame"] for node in profile["nodes"]}
    own: dict[str, float] = {}
    for id_, delta in zip(profile["samples"], profile["timeDeltas"], strict=False):
        frame = nodes[id_]
        name = f"{frame['functionName']} {frame['url'].rpartition('/')[2]}:{frame['columnNumber']}"
        own[name] = own.get(name, 0) + delta / 1000
    for name, spent in sorted(own.items(), key=lambda each: -each[1])[:30]:
        print(f"{spent:8.1f} ms {name}")


def main() -> None:
    """Measure it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rate", type=int, default=10_000, help="events a second")
    parser.add_argument("--seconds", type=float, default=10.0, help="600 for the heap of ten minutes")
    parser.add_argument("--profile", action="store_true", help="tell which functions take the time")
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        relay = RelayProcess(Path(folder)).start()
        try:
            asyncio.run(_run(relay, chosen.rate, chosen.seconds, chosen.profile))
        finally:
            relay.kill()


if __name__ == "__main__":
    main()
