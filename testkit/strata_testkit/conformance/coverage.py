"""Which MUST rows the checks cover, and why the others cannot be seen from outside.

`UNSEEN` is part of the product: a reader of "every MUST holds" can see which rows were not judged. A test
compares it with the requirements.
"""

# Core: no I/O, no clock, no randomness (held by tests/test_layout.py).

from __future__ import annotations

from collections.abc import Iterable

from strata_testkit.conformance.checks import all_checks

__all__ = ["JUDGED_SECTIONS", "UNSEEN", "uncovered"]

JUDGED_SECTIONS = frozenset(range(1, 18))
"""The sections of the requirements that can be judged from outside."""

_CLIENT = "a duty of clients"
_CONFIGURED = "needs a relay configured for it"
_DOCUMENT = "needs a DID Document that the relay has from its configuration"
_RESTART = "needs the relay, its database or its clock to be stopped"
_ROOTS = "needs a root that the relay has from its configuration"
_INSIDE = "a property of the source, not of what it sends"

UNSEEN = {
    "R-010": _INSIDE,
    "R-028": _CLIENT,
    "R-034": _CLIENT,
    "R-036": _CLIENT,
    "R-055": _CLIENT,
    "R-056": _DOCUMENT,
    "R-064": _CONFIGURED,
    "R-065": _DOCUMENT,
    "R-075": _CLIENT,
    "R-082": "shows only when the delay of a recovery is over",
    "R-090": _CLIENT,
    "R-091": _CLIENT,
    "R-105": _CLIENT,
    "R-106": _CLIENT,
    "R-108": _RESTART,
    "R-125": _CLIENT,
    "R-176": _RESTART,
    "R-186": _CONFIGURED,
    "R-187": _CONFIGURED,
    "R-189": _RESTART,
    "R-193": _CLIENT,
    "R-197": _CLIENT,
    "R-200": _RESTART,
    "R-211": "needs a peer that may replicate",
    "R-212": _CLIENT,
    "R-221": _ROOTS,
    "R-222": _ROOTS,
    "R-223": _ROOTS,
    "R-224": _ROOTS,
    "R-225": _ROOTS,
    "R-227": _CLIENT,
    "R-228": _CLIENT,
    "R-230": _CLIENT,
    "R-244": _INSIDE,
    "R-245": _CLIENT,
    "R-248": _CLIENT,
    "R-274": "takes as long as a challenge lives",
    "R-293": _CLIENT,
    "R-294": _CLIENT,
    "R-295": _CLIENT,
    "R-297": _CLIENT,
    "R-298": _CLIENT,
    "R-307": _INSIDE,
    "R-308": _INSIDE,
    "R-310": _RESTART,
    "R-311": "needs several processes on one database",
    "R-323": _CONFIGURED,
    "R-324": _INSIDE,
}
"""The MUST rows of those sections that no check can judge, with the reason."""


def uncovered(rows: Iterable[str]) -> set[str]:
    """The rows that are neither judged by a check nor listed in `UNSEEN`."""
    covered = {row for check in all_checks() for row in check.rows}
    return set(rows) - covered - UNSEEN.keys()
