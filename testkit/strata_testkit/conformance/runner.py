"""Run the checks: a bounded number at a time, each with a deadline, and all under a common one.

The checks of one run can run concurrently, since each has its own identities and types. Checks that flood the
relay run afterwards, one by one, and checks that conclude run last. If the relay reports a rate limit, no
check begins until its limits have recovered, and the checks that it refused run again.
"""

from __future__ import annotations

import asyncio
import fnmatch
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from websockets.exceptions import ConnectionClosed, InvalidHandshake

from strata_testkit.conformance.context import Context
from strata_testkit.conformance.model import Check, Keyword, Outcome, Result
from strata_testkit.conformance.verdicts import Failed, Skipped, Throttled

__all__ = ["Selection", "run_checks"]

_ORDER = list(Keyword)
_MOST_ATTEMPTS = 6
_LONGEST_PAUSE = 120
"""The longest time, in seconds, that a run waits for a limit to recover."""


@dataclass(frozen=True, slots=True)
class Selection:
    """Which checks to run: by row (`R-152`, `R-1*`) or name, by least level, and whether they may flood."""

    patterns: tuple[str, ...] = ()
    level: Keyword = Keyword.MAY
    floods: bool = False

    def of(self, checks: Sequence[Check]) -> list[Check]:
        """The checks selected, in their order."""
        return [check for check in checks if self._takes(check)]

    def _takes(self, check: Check) -> bool:
        if check.floods and not self.floods:
            return False
        if _ORDER.index(check.level) > _ORDER.index(self.level):
            return False
        names = (*check.rows, check.name)
        return not self.patterns or any(
            fnmatch.fnmatchcase(name, pattern) for name in names for pattern in self.patterns
        )


async def run_checks(
    checks: Sequence[Check],
    context: Context,
    *,
    concurrency: int = 8,
    timeout: float = 300.0,
    report: Callable[[Result], None] = lambda result: None,
) -> list[Result]:
    """Run the checks and return their results in the same order; call `report` with each as it ends.

    At most `concurrency` run at a time. Checks that have not ended after `timeout` seconds fail. Nothing that
    a relay does makes this raise; cancelling ends the running checks and closes their connections.
    """
    results: dict[Check, Result] = {}
    gate = _Gate()

    def done(result: Result) -> None:
        results[result.check] = result
        report(result)

    try:
        async with asyncio.timeout(timeout):
            side_by_side = [check for check in checks if not check.floods and not check.concludes]
            await _run_together(side_by_side, context, concurrency, gate, done)
            for check in sorted(set(checks) - set(side_by_side), key=lambda check: check.concludes):
                done(await _run(check, context, gate))
    except TimeoutError:
        for check in checks:
            if check not in results:
                done(
                    Result(
                        check, Outcome.FAILED, 0.0, "an end of the run in time", f"{timeout:g} s were over"
                    )
                )
    return [results[check] for check in checks]


async def _run_together(
    checks: Sequence[Check],
    context: Context,
    concurrency: int,
    gate: _Gate,
    done: Callable[[Result], None],
) -> None:
    waiting = iter(checks)

    async def work() -> None:
        for check in waiting:  # shared: each worker takes the next one
            done(await _run(check, context, gate))

    async with asyncio.TaskGroup() as tasks:
        for number in range(concurrency):
            tasks.create_task(work(), name=f"conformance-{number}")


class _Gate:
    """Keeps checks from beginning while the relay's limits recover."""

    def __init__(self) -> None:
        self._opens_at = 0.0

    def close(self, pause: float) -> None:
        """Let no check begin for `pause` seconds."""
        self._opens_at = max(self._opens_at, time.monotonic() + pause)

    async def passed(self) -> None:
        """Wait until a check may begin."""
        # The gate may be closed again meanwhile, and there is no event to wait for, only time.
        while (remaining := self._opens_at - time.monotonic()) > 0:  # noqa: ASYNC110
            await asyncio.sleep(remaining)


async def _run(check: Check, context: Context, gate: _Gate) -> Result:
    """Run one check to its result, repeating it while the relay's limits cut it short."""
    if check.extension is not None and not context.subject.announces(check.extension):
        return Result(check, Outcome.SKIPPED, 0.0, seen=f"the relay does not announce {check.extension}")
    for _ in range(_MOST_ATTEMPTS):
        await gate.passed()
        try:
            return await _attempt(check, context)
        except Throttled as limit:
            if limit.pause > _LONGEST_PAUSE:
                break
            gate.close(limit.pause)
    return Result(check, Outcome.SKIPPED, 0.0, seen="the relay limits what may be asked of it")


async def _attempt(check: Check, context: Context) -> Result:
    """Run one check to its result. Raises `Throttled`."""
    started_at = time.monotonic()
    deadline = asyncio.timeout(check.timeout)
    outcome, expected, seen = Outcome.PASSED, "", ""
    try:
        async with deadline:
            await check.run(context)
    except Exception as error:
        outcome, expected, seen = _judged(_first(error), check, timed_out=deadline.expired())
    return Result(check, outcome, time.monotonic() - started_at, expected, seen)


def _first(error: Exception) -> Exception:
    """The error of a group that explains the others: a limit if there is one, else the relay's fault."""
    if not isinstance(error, ExceptionGroup):
        return error
    leaves = [_first(inner) for inner in error.exceptions]
    return min(leaves, key=lambda leaf: (not isinstance(leaf, Throttled), not isinstance(leaf, Failed)))


def _judged(error: Exception, check: Check, *, timed_out: bool) -> tuple[Outcome, str, str]:
    """What a check's error says about the relay: the outcome, what was expected and what was seen."""
    match error:
        case Throttled():
            raise error
        case Failed():
            return Outcome.FAILED, error.expected, error.seen
        case Skipped():
            return Outcome.SKIPPED, "", str(error)
        case ConnectionClosed():
            return Outcome.FAILED, "a connection that stays open", str(error)
        case TimeoutError() if timed_out:
            return Outcome.FAILED, f"an end within {check.timeout:g} s", "the check was still waiting"
        case InvalidHandshake() | OSError():
            return Outcome.FAILED, "a connection", str(error) or type(error).__name__
        case _:
            return Outcome.BROKEN, "", f"{type(error).__name__}: {error}"
