"""What a check is, and how it ends.

A check is a small async function that takes a `Context` and either returns, raises `Failed` with what it
expected and what it saw, or raises `Skipped`. A `Group` holds the checks of one section of the requirements;
calling it returns the decorator that adds one. The first line of the function's docstring is the check's
title: the rule, as a sentence about relays.
"""

from __future__ import annotations

import enum
import inspect
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass

from strata_testkit.conformance.context import Context

__all__ = [
    "SECTIONS",
    "Check",
    "CheckFunction",
    "Group",
    "Keyword",
    "Outcome",
    "Result",
]

CheckFunction = Callable[[Context], Coroutine[object, object, None]]

SECTIONS = {
    1: "JSON and canonical form",
    2: "Encodings, hashes and identifiers",
    3: "Packet structure",
    4: "Identity: DIDs and DID Documents",
    5: "Key validity and key events",
    6: "Time, freshness, expiry",
    7: "Duplicates and replay",
    8: "Size",
    9: "Connection and message rules",
    10: "SUBSCRIBE, EVENT, UNSUBSCRIBE",
    11: "PUBLISH and OK",
    12: "ERROR and codes",
    13: "Provenance verification",
    14: "Checks by content type",
    15: "AUTH and capabilities",
    16: "Storage, indexing, queries",
    17: "Rate limits, policy, abuse",
}
"""The sections of the requirements that the checks are grouped by."""

DEFAULT_TIMEOUT = 30.0


class Keyword(enum.StrEnum):
    """How binding a row is (RFC 2119)."""

    MUST = "MUST"
    SHOULD = "SHOULD"
    MAY = "MAY"


class Outcome(enum.StrEnum):
    """How a check ended."""

    PASSED = "passed"
    FAILED = "failed"
    SKIPPED = "skipped"
    BROKEN = "broken"
    """The check itself failed, which says nothing about the relay."""


@dataclass(frozen=True, slots=True)
class Check:
    """One check, with the rows that it judges.

    `extension` names an addition that the relay must announce for the check to apply. `floods` marks a check
    that sends so much that it runs only on request, and alone. `concludes` marks a check that runs after all
    others and judges what they saw. `timeout` is in seconds.
    """

    name: str
    title: str
    rows: tuple[str, ...]
    level: Keyword
    section: int
    source: str
    run: CheckFunction
    extension: str | None
    floods: bool
    concludes: bool
    timeout: float


@dataclass(frozen=True, slots=True)
class Result:
    """How one check ended. A failure has `expected` and `seen`; the reason of a skip is in `seen`."""

    check: Check
    outcome: Outcome
    seconds: float
    expected: str = ""
    seen: str = ""


class Group:
    """The checks of one section, in the order in which they are written."""

    def __init__(self, section: int) -> None:
        self._section = section
        self._checks: list[Check] = []

    def __iter__(self) -> Iterator[Check]:
        return iter(self._checks)

    def __call__(
        self,
        *rows: str,
        source: str,
        level: Keyword = Keyword.MUST,
        extension: str | None = None,
        floods: bool = False,
        concludes: bool = False,
        timeout: float = DEFAULT_TIMEOUT,
    ) -> Callable[[CheckFunction], CheckFunction]:
        """Add the decorated function as a check of these rows."""

        def add(run: CheckFunction) -> CheckFunction:
            name = getattr(run, "__name__", "")
            title = (inspect.getdoc(run) or name).partition("\n")[0]
            self._checks.append(
                Check(
                    name.replace("_", "-"),
                    title,
                    rows,
                    level,
                    self._section,
                    source,
                    run,
                    extension,
                    floods,
                    concludes,
                    timeout,
                )
            )
            return run

        return add
