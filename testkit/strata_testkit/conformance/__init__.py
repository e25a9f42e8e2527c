"""Does a relay do what RFC-0004 says? Checks that test a relay from outside, and their results.

    context = await survey("wss://relay.example.net/strata")
    results = await run_checks(all_checks(), context)

Any RFC-0004 relay can be judged. Rows that rest on an addition, or on a decision of this project where the
documents are silent, apply only to relays that announce it. The command is `strata conformance URL`.
"""

from __future__ import annotations

from strata_testkit.conformance.checks import all_checks
from strata_testkit.conformance.context import Context, Subject, survey
from strata_testkit.conformance.model import Check, Keyword, Outcome, Result
from strata_testkit.conformance.peer import Patience
from strata_testkit.conformance.runner import Selection, run_checks
from strata_testkit.conformance.verdicts import Failed, Skipped

__all__ = [
    "Check",
    "Context",
    "Failed",
    "Keyword",
    "Outcome",
    "Patience",
    "Result",
    "Selection",
    "Skipped",
    "Subject",
    "all_checks",
    "run_checks",
    "survey",
]
