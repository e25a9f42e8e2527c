"""Running checks and reporting their outcomes."""

from __future__ import annotations

import asyncio
import io

import pytest
from rich.console import Console
from strata_testkit.conformance import Failed, Keyword, Outcome, Result, Skipped, report
from strata_testkit.conformance.context import Context, Subject
from strata_testkit.conformance.model import Group
from strata_testkit.conformance.runner import run_checks
from strata_testkit.conformance.verdicts import DECISIONS, Throttled
from websockets.exceptions import ConnectionClosedError
from websockets.frames import Close

CHECKS = Group(1)
MARGIN = 0.05


@CHECKS("R-001", source="x")
async def it_holds(context: Context) -> None:
    """It holds"""


@CHECKS("R-002", source="x")
async def it_fails(context: Context) -> None:
    """It fails"""
    raise Failed("one thing", "another\x1b[31m [bold]thing[/bold]")


@CHECKS("R-003", source="x", level=Keyword.SHOULD)
async def it_is_skipped(context: Context) -> None:
    """It is skipped"""
    raise Skipped("not here")


@CHECKS("R-004", source="x")
async def it_breaks(context: Context) -> None:
    """It breaks"""
    raise ZeroDivisionError("our own fault")


@CHECKS("R-005", source="x")
async def it_is_closed(context: Context) -> None:
    """It is closed"""
    raise ConnectionClosedError(Close(1008, "go away"), None)


@CHECKS("R-006", source="x", timeout=MARGIN)
async def it_waits(context: Context) -> None:
    """It waits for ever"""
    await asyncio.Event().wait()


@CHECKS("R-007", source="x", extension=DECISIONS)
async def it_goes_further(context: Context) -> None:
    """It goes further than the documents"""


@CHECKS("R-009", source="x")
async def it_fails_in_a_group(context: Context) -> None:
    """It fails in a group"""
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(it_breaks(context), name="one")
        tasks.create_task(it_fails(context), name="other")


@CHECKS("R-011", source="x", concludes=True)
async def it_concludes(context: Context) -> None:
    """It concludes"""
    raise Failed("nothing left", ",".join(sorted(task.get_name() for task in asyncio.all_tasks())))


def context(*extensions: str) -> Context:
    return Context(Subject("ws://127.0.0.1:1/strata", extensions=frozenset(extensions)))


async def outcomes(**options) -> dict[str, Result]:
    return {result.check.name: result for result in await run_checks(list(CHECKS), context(), **options)}


async def test_each_end_has_its_outcome():
    results = await outcomes()
    assert {name: result.outcome for name, result in results.items()} == {
        "it-holds": Outcome.PASSED,
        "it-fails": Outcome.FAILED,
        "it-is-skipped": Outcome.SKIPPED,
        "it-breaks": Outcome.BROKEN,
        "it-is-closed": Outcome.FAILED,
        "it-waits": Outcome.FAILED,
        "it-goes-further": Outcome.SKIPPED,
        "it-fails-in-a-group": Outcome.FAILED,
        "it-concludes": Outcome.FAILED,
    }
    assert results["it-is-skipped"].seen == "not here"
    assert "go away" in results["it-is-closed"].seen
    assert "ZeroDivisionError" in results["it-breaks"].seen
    assert "conformance-" not in results["it-concludes"].seen, "it runs when the others have ended"


async def test_decisions_are_judged_where_they_are_announced():
    (check,) = [check for check in CHECKS if check.extension]
    (result,) = await run_checks([check], context("gapless"))
    assert result.outcome is Outcome.PASSED


async def test_what_has_not_ended_in_time_has_failed():
    group = Group(1)

    @group("R-001", source="x")
    async def wait_for_ever(context: Context) -> None:
        await asyncio.Event().wait()

    (result,) = await run_checks(list(group), context(), timeout=MARGIN)
    assert (result.outcome, result.expected) == (Outcome.FAILED, "an end of the run in time")


async def test_no_more_run_at_a_time_than_allowed_and_each_is_reported_once():
    running: set[str] = set()
    most = 0
    group = Group(1)
    for number in range(9):

        async def count(context: Context, number: int = number) -> None:
            nonlocal most
            running.add(str(number))
            most = max(most, len(running))
            for _ in range(3):
                await asyncio.sleep(0)
            running.discard(str(number))

        count.__name__ = f"check_{number}"
        group("R-001", source="x")(count)
    reported: list[Result] = []
    results = await run_checks(list(group), context(), concurrency=3, report=reported.append)
    assert most == 3
    assert sorted(result.check.name for result in reported) == [result.check.name for result in results]


async def test_what_a_limit_refused_is_run_again_when_it_may():
    attempts: list[float] = []
    group = Group(1)

    @group("R-001", source="x")
    async def ask_for_too_much(context: Context) -> None:
        attempts.append(asyncio.get_running_loop().time())
        if len(attempts) == 1:
            raise Throttled(1)

    @group("R-002", source="x")
    async def ask_for_ever(context: Context) -> None:
        raise ExceptionGroup("several", [Failed("a", "b"), Throttled(0)])

    again, never = await run_checks(list(group), context(), concurrency=1)
    assert again.outcome is Outcome.PASSED
    assert attempts[1] - attempts[0] >= 1
    assert never.outcome is Outcome.SKIPPED and "limits" in never.seen


async def test_cancelling_a_run_ends_its_checks():
    ended = asyncio.Event()
    group = Group(1)

    @group("R-001", source="x")
    async def wait(context: Context) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    run = asyncio.create_task(run_checks(list(group), context()), name="run")
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    run.cancel()
    with pytest.raises(asyncio.CancelledError):
        await run
    await asyncio.wait_for(ended.wait(), 5)


async def test_the_table_shows_failures_last_and_cannot_be_steered():
    results = list((await outcomes()).values())
    summary = report.summarise(results, 1.5)
    console = Console(file=io.StringIO(), width=120, force_terminal=False)
    report.write_table(results, summary, console)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "\x1b" not in text and "[bold]thing[/bold]" in text
    assert text.index("expected: one thing") > text.index("1. JSON and canonical form")
    assert text.rstrip().splitlines()[-1].startswith("6 MUST checks do not hold: ")
    assert "strata conformance URL --only it-fails" in text
    report.write_list(list(CHECKS), console)


@pytest.mark.parametrize(
    ("names", "conforms"),
    [
        (["it-holds"], True),
        (["it-holds", "it-is-skipped"], True),
        (["it-is-skipped"], False),
        (["it-holds", "it-fails"], False),
        (["it-holds", "it-breaks"], False),
    ],
)
async def test_a_relay_conforms_if_no_must_fails_and_something_was_judged(names, conforms):
    results = await outcomes()
    summary = report.summarise([results[name] for name in names], 1.0)
    assert summary.conforms is conforms
    assert report.summary_record(summary, "ws://x")["conforms"] is conforms


async def test_records_are_plain():
    result = (await outcomes())["it-fails"]
    record = report.record(result)
    assert (record["check"], record["rows"], record["level"]) == ("it-fails", ["R-002"], "MUST")
    assert (record["result"], record["expected"]) == ("failed", "one thing")
