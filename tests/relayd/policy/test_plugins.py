"""An operator's own policies: what they are asked, what may result, and what no plug-in can do."""

from __future__ import annotations

import asyncio
import sys
import threading
from functools import partial
from importlib.metadata import EntryPoint, EntryPoints
from typing import Literal

import pytest
import structlog
from strata.protocol import packets
from strata.protocol.errors import ErrorCode, InvalidPacket
from strata.protocol.ids import Identity
from strata.protocol.packets import Packet
from typer.testing import CliRunner

from relayd.cli import app
from relayd.config import ConfigurationError, Settings
from relayd.policy import Plugins, PolicyRequest, Refusal, calls, plugins

ALICE = Identity(bytes(31) + b"a")
PACKET = packets.build(ALICE, {"type": "POST", "text": "the marker text"}, timestamp=1000)
NO = Refusal(ErrorCode.POLICY_REJECTED, "no", "why")
LONG, SHORT = 30.0, 0.02


class Verdicts(list[tuple[str, str]]):
    def __call__(self, name: str, verdict: str) -> None:
        self.append((name, verdict))


@pytest.fixture
def verdicts() -> Verdicts:
    return Verdicts()


@pytest.fixture
def made(verdicts):
    """Make plug-ins by name; they are closed after the test."""
    opened: list[Plugins] = []

    def make(timeout: float = LONG, failure: Literal["refuse", "accept"] = "refuse", **named) -> Plugins:
        opened.append(
            Plugins(named, timeout=timeout, failure=failure, clock=lambda: 1234, on_verdict=verdicts)
        )
        return opened[-1]

    yield make
    for one in opened:
        one.close()
        one.close()


async def refusal(plugins: Plugins, packet: Packet = PACKET) -> InvalidPacket:
    with pytest.raises(InvalidPacket) as caught:
        await plugins.check(packet, None)
    return caught.value


def sync(request: PolicyRequest) -> Refusal | None:
    return NO


async def asynchronous(request: PolicyRequest) -> Refusal | None:
    await asyncio.sleep(0)
    return NO


class SyncObject:
    def __call__(self, request: PolicyRequest) -> Refusal | None:
        return NO


class AsyncObject:
    async def __call__(self, request: PolicyRequest) -> Refusal | None:
        return NO

    async def method(self, request: PolicyRequest) -> Refusal | None:
        return NO


async def configured(answer: Refusal | None, request: PolicyRequest) -> Refusal | None:
    return answer


@pytest.mark.req("R-185", "R-187")
@pytest.mark.parametrize(
    "plugin", [sync, asynchronous, SyncObject(), AsyncObject(), AsyncObject().method, partial(configured, NO)]
)
async def test_a_refusal_is_the_answer_whatever_kind_of_callable_gives_it(made, verdicts, plugin):
    error = await refusal(made(one=plugin))
    assert (error.code, error.reason, error.detail) == ("policy_rejected", "no", "why")
    assert verdicts == [("one", "refused")]


async def test_a_plug_in_sees_the_packet_the_identity_and_the_time(made):
    seen: list[PolicyRequest] = []
    plugins = made(one=seen.append, two=lambda request: None)
    await plugins.check(PACKET, "did:strata:gateway")
    assert seen == [PolicyRequest(PACKET, "did:strata:gateway", 1234)]


def test_no_plug_ins_are_false_and_some_are_true(made):
    assert not Plugins()
    assert made(one=sync)


async def test_they_are_asked_in_order_until_one_refuses(made, verdicts):
    answers = {"a": None, "b": Refusal(ErrorCode.RATE_LIMITED, "slowly", retry_after=7), "c": NO}
    plugins = made(**{name: partial(configured, answer) for name, answer in answers.items()})
    error = await refusal(plugins)
    assert (error.code, error.retry_after) == ("rate_limited", 7)
    assert verdicts == [("a", "passed"), ("b", "refused")]


@pytest.mark.parametrize(
    "refusal",
    [
        {"code": ErrorCode.INTERNAL_ERROR, "reason": "no"},
        {"code": ErrorCode.POLICY_REJECTED, "reason": ""},
        {"code": ErrorCode.POLICY_REJECTED, "reason": "x" * 201},
        {"code": ErrorCode.POLICY_REJECTED, "reason": "two\nlines"},
        {"code": ErrorCode.POLICY_REJECTED, "reason": "no", "detail": ""},
        {"code": ErrorCode.POLICY_REJECTED, "reason": "no", "detail": "\x00"},
        {"code": ErrorCode.POLICY_REJECTED, "reason": "no", "retry_after": 1},
        {"code": ErrorCode.RATE_LIMITED, "reason": "no"},
        {"code": ErrorCode.RATE_LIMITED, "reason": "no", "retry_after": 0},
        {"code": ErrorCode.RATE_LIMITED, "reason": "no", "retry_after": 10**9},
    ],
)
def test_a_refusal_says_something_that_may_be_sent(refusal):
    with pytest.raises(ValueError):
        Refusal(**refusal)


# The cost of a broken plug-in.


def raises(request: PolicyRequest) -> None:
    raise KeyError(request.packet.content["text"])


async def raises_later(request: PolicyRequest) -> None:
    await asyncio.sleep(0)
    raise KeyError(request.packet.content["text"])


def exits(request: PolicyRequest) -> None:
    sys.exit("the marker text")


async def exits_later(request: PolicyRequest) -> None:
    sys.exit("the marker text")


def stops(request: PolicyRequest) -> None:
    raise StopIteration


async def cancels_itself(request: PolicyRequest) -> None:
    task = asyncio.current_task()
    assert task is not None
    task.cancel()
    await asyncio.sleep(LONG)


BROKEN = [raises, raises_later, exits, exits_later, stops, cancels_itself]


@pytest.mark.parametrize("plugin", BROKEN)
async def test_one_that_raises_refuses_for_now_and_says_where_it_broke(made, verdicts, plugin):
    with structlog.testing.capture_logs() as logs:
        error = await refusal(made(one=plugin))
        await refusal(made(one=plugin))
    assert (error.code, error.detail) == ("internal_error", "policy_unavailable")
    assert error.code.retry.name == "AGAIN"
    assert verdicts == [("one", "raised")] * 2
    assert logs[0]["event"] == "policy_plugin_failed" and logs[0]["plugin"] == "one"
    assert "marker" not in repr(logs), "an exception may quote the packet"


@pytest.mark.parametrize("plugin", BROKEN)
async def test_where_failures_accept_the_next_one_is_asked(made, verdicts, plugin):
    await made(failure="accept", one=plugin, two=lambda request: None).check(PACKET, None)
    assert verdicts == [("one", "raised"), ("two", "passed")]


async def test_an_answer_that_is_none_is_a_failure(made, verdicts):
    error = await refusal(made(one=lambda request: "yes"))
    assert error.detail == "policy_unavailable"
    assert verdicts == [("one", "invalid")]


async def test_failures_do_not_flood_the_log(made):
    plugins = made(failure="accept", one=raises_later)
    with structlog.testing.capture_logs() as logs:
        for _ in range(100):
            await plugins.check(PACKET, None)
    assert len(logs) == 1


async def test_cancelling_the_question_cancels_the_plug_in(made):
    started, ended = asyncio.Event(), asyncio.Event()

    async def waits(request: PolicyRequest) -> None:
        try:
            started.set()
            await asyncio.sleep(LONG)
        finally:
            ended.set()

    question = asyncio.create_task(made(one=waits).check(PACKET, None))
    await started.wait()
    question.cancel()
    with pytest.raises(asyncio.CancelledError):
        await question
    await ended.wait()


async def test_one_that_hangs_is_left_at_the_deadline(made, verdicts):
    async def waits(request: PolicyRequest) -> None:
        await asyncio.Event().wait()

    assert (await refusal(made(SHORT, one=waits))).detail == "policy_unavailable"
    assert verdicts == [("one", "timeout")]


async def test_one_that_swallows_its_cancelling_holds_up_nobody_beyond_the_deadline(made, verdicts):
    release = asyncio.Event()

    async def stubborn(request: PolicyRequest) -> None:
        while not release.is_set():
            try:
                await release.wait()
            except asyncio.CancelledError:
                continue

    plugins = made(SHORT, failure="accept", one=stubborn)
    # More calls than places: the later ones wait for a place in vain, and also leave at their deadline.
    await asyncio.gather(*(plugins.check(PACKET, None) for _ in range(calls._PLACES + 3)))
    assert verdicts == [("one", "timeout")] * (calls._PLACES + 3)
    release.set()
    await asyncio.wait(plugins._callers["one"]._tasks)
    await plugins.check(PACKET, None)
    assert verdicts[-1] == ("one", "passed")


async def test_threads_that_hang_keep_their_places_and_the_queue_stays_short(made, verdicts):
    release = threading.Event()
    hung = threading.Semaphore(0)

    def waits(request: PolicyRequest) -> None:
        hung.release()
        release.wait(LONG)

    plugins = made(SHORT, failure="accept", one=waits)
    await asyncio.gather(*(plugins.check(PACKET, None) for _ in range(calls._PLACES + 3)))
    assert verdicts == [("one", "timeout")] * (calls._PLACES + 3)
    # A late thread finds calls that have been given up, and drops them.
    assert plugins._callers["one"]._jobs.qsize() <= calls._PLACES - calls._THREADS
    release.set()
    answer = made(LONG, two=lambda request: None)
    await answer.check(PACKET, None)
    plugins._timeout = LONG
    await plugins.check(PACKET, None)  # the threads are back, and abandoned calls were skipped
    assert verdicts[-2:] == [("two", "passed"), ("one", "passed")]
    asked = 0
    while hung.acquire(blocking=False):
        asked += 1
    assert asked == calls._THREADS + 1


async def test_where_no_thread_can_start_no_place_is_lost(made, verdicts, monkeypatch):
    def refused(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    plugins = made(one=lambda request: None)
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refused)
        for _ in range(calls._PLACES):
            await refusal(plugins)
    await plugins.check(PACKET, None)
    assert verdicts == [("one", "raised")] * calls._PLACES + [("one", "passed")]


# Loading.


def entry_points_of(monkeypatch, *points: tuple[str, str]) -> None:
    found = EntryPoints(EntryPoint(name, value, plugins.ENTRY_POINT_GROUP) for name, value in points)
    monkeypatch.setattr(plugins, "entry_points", lambda group: found.select(group=group))


async def test_plug_ins_are_found_by_the_names_the_settings_give(monkeypatch):
    entry_points_of(monkeypatch, ("second", "operator:index"), ("first", "operator:neg"))
    loaded = plugins.load_plugins(("first", "second"))
    assert list(loaded) == ["first", "second"]
    made = Plugins.from_settings(Settings(policy_plugins=("first",), policy_timeout=LONG))
    assert (await refusal(made)).detail == "policy_unavailable"  # a packet has no negative
    made.close()


@pytest.mark.parametrize(
    ("names", "problem"),
    [
        (("secnd",), "secnd: not installed; the nearest is second"),
        (("second", "second"), "second: named twice"),
        (("gone",), "gone: cannot be loaded: ModuleNotFoundError"),
        (("number",), "number: not callable"),
        (("rival",), "rival: offered by several distributions"),
    ],
)
def test_one_that_cannot_be_used_is_a_configuration_error(monkeypatch, names, problem):
    entry_points_of(
        monkeypatch,
        ("second", "operator:index"),
        ("gone", "no_such_module:policy"),
        ("number", "sys:maxsize"),
        ("rival", "operator:neg"),
        ("rival", "operator:pos"),
    )
    with pytest.raises(ConfigurationError) as caught:
        plugins.load_plugins(names)
    assert problem in str(caught.value)


def test_where_nothing_is_installed_the_problem_says_so(monkeypatch):
    entry_points_of(monkeypatch)
    with pytest.raises(ConfigurationError, match=r"nothing offers relayd\.policies"):
        plugins.load_plugins(("any",))
    assert plugins.load_plugins(()) == {}


def test_check_config_looks_for_the_plug_ins_that_are_named(monkeypatch):
    monkeypatch.setenv("RELAYD_POLICY_PLUGINS", "nobody")
    done = CliRunner().invoke(app, ["check-config"])
    assert done.exit_code == 2
    assert "policy_plugins: nobody: not installed" in done.output
