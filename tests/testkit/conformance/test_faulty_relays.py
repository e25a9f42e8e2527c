"""The checks distinguish a broken relay from a sound one: each fault fails the check that exists for it."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest
from strata_testkit.conformance import (
    Check,
    Keyword,
    Outcome,
    Patience,
    Result,
    Selection,
    all_checks,
    run_checks,
    survey,
)

from tests.support.faulty_relay import FaultyRelay, faulty_relay

PATIENCE = Patience(answer=3.0, quiet=0.2, settle=0.05)

SECTIONS = (1, 2, 3, 6, 7, 8, 9, 10, 11, 12, 15)
"""The sections that the small relay implements."""

BEYOND = {
    "additions-are-announced": "it has no packets by URL",
    "revoked-keys-do-not-authenticate": "it knows no key events",
    "attestations-count-once-for-each-author": "it knows no content types",
    "the-first-fault-answers": "some of its faults are in what it does not know",
}

FAULTS = {
    "acknowledges before verifying": ["nothing-is-acknowledged-unverified"],
    "acknowledges twice": ["every-publish-has-one-answer"],
    "age does not matter": ["the-distant-past-is-refused"],
    "any AUTH will do": ["wrong-signatures-are-refused"],
    "arrival is the timestamp": ["arrival-is-recorded-once"],
    "bad packets are met with silence": ["every-publish-has-one-answer"],
    "capabilities are not enforced": ["capabilities-are-enforced"],
    "challenges are shared": ["challenges-are-sound", "challenges-belong-to-their-session"],
    "challenges are short": ["challenges-are-sound"],
    "challenges can be used again": ["challenges-are-used-once"],
    "challenges expire at once": ["challenges-leave-time"],
    "cursors are not checked": ["bad-cursors-are-refused"],
    "cursors are off by one": ["pages-meet-every-packet-once"],
    "desc is ignored": ["history-is-in-order-of-arrival"],
    "errors close": ["malformed-frames-are-errors", "unknown-types-are-errors"],
    "errors lack a reason": ["every-error-has-code-and-reason"],
    "events lack received_at": ["every-event-says-when-it-arrived"],
    "events lack their subscription": ["every-event-names-its-subscription"],
    "expired packets are served": ["expired-packets-are-served-nowhere"],
    "expiry does not matter": ["expired-packets-are-refused"],
    "filters combine with or": ["filters-combine"],
    "history has no cursors": ["history-has-cursors"],
    "history is in order of timestamps": ["history-is-in-order-of-arrival"],
    "ids are echoed wrongly": ["ids-of-messages-are-echoed"],
    "ids are not recomputed": ["a-wrong-id-is-refused", "ids-are-blake3"],
    "limits are not kept": ["limits-are-kept"],
    "live events come twice": ["each-subscription-has-its-event", "the-seam-is-tight"],
    "live heeds until": ["until-bounds-history-alone"],
    "live ignores since": ["since-is-an-inclusive-bound"],
    "markers come unasked": ["plain-peers-are-served", "the-marker-ends-history"],
    "members are camelCase": ["members-are-snake-case"],
    "numbers are respelled": ["every-packet-served-is-whole", "what-is-hard-to-keep-is-kept"],
    "own packets are withheld": ["publishers-see-their-own-packets"],
    "packets fall through the seam": ["the-seam-is-tight"],
    "prefixes of authors match": ["authors-compare-whole"],
    "reasons leak": ["no-reason-leaks"],
    "repeats are forwarded": ["repeats-are-dropped"],
    "repeats are stored": ["repeats-are-dropped", "sessions-at-once-store-once"],
    "requests are granted whole": ["capabilities-are-what-was-asked-and-granted"],
    "server_id is another's": ["challenges-are-sound"],
    "signatures are not verified": ["tampered-packets-are-nowhere", "the-signature-is-over-the-bytes"],
    "since is exclusive": ["since-is-an-inclusive-bound"],
    "strangers may replicate": ["capabilities-are-what-was-asked-and-granted"],
    "the future is fine": ["milliseconds-are-the-far-future", "the-future-is-refused"],
    "the same id adds": ["the-same-id-replaces"],
    "the size limit is off by one": ["the-size-limit-is-exact"],
    "there is no challenge": ["the-challenge-comes-first"],
    "types ignore case": ["types-are-case-sensitive", "types-compare-exactly"],
    "unknown members are dropped": ["every-packet-served-is-whole", "unknown-members-of-packets-are-kept"],
    "unsubscribe does nothing": ["unsubscribe-ends-it"],
}

# What the concluding checks judge must be seen first.
SEEN_BY = ["new-packets-are-forwarded", "a-wrong-id-is-refused", "what-is-hard-to-keep-is-kept"]
SEEN_BY += ["unknown-members-of-packets-are-kept", "malformed-frames-are-errors"]


def named(*names: str) -> list[Check]:
    return Selection(tuple(names)).of(all_checks())


async def judge(url: str, checks: list[Check], patience: Patience = PATIENCE) -> dict[str, Result]:
    context = await survey(url, patience=patience)
    return {result.check.name: result for result in await run_checks(checks, context, timeout=100)}


def within_reach() -> list[Check]:
    return [check for check in all_checks() if check.section in SECTIONS and check.name not in BEYOND]


async def test_a_sound_relay_passes_everything_within_its_reach():
    checks = [check for check in within_reach() if not check.floods]
    async with faulty_relay() as url:
        results = await judge(url, checks)
    wrong = {
        name: str(result)
        for name, result in results.items()
        if result.outcome is not Outcome.PASSED and result.check.extension != "http_packets"
    }
    assert not wrong
    assert len(results) > 100


async def test_a_plain_relay_passes_what_the_documents_ask_and_is_spared_the_rest():
    checks = [check for check in within_reach() if not check.floods and check.level is Keyword.MUST]
    async with faulty_relay(extensions=[]) as url:
        results = await judge(url, checks)
        # It marks the end of history by silence, and a slow machine is silent too.
        hasty = [result.check for result in results.values() if result.outcome is Outcome.FAILED]
        results |= await judge(url, hasty, Patience()) if hasty else {}
    failed = {n: str(r) for n, r in results.items() if r.outcome not in (Outcome.PASSED, Outcome.SKIPPED)}
    assert not failed
    skipped = {name for name, result in results.items() if result.outcome is Outcome.SKIPPED}
    assert skipped == {check.name for check in checks if check.extension is not None}


async def test_a_packet_that_expires_on_its_way_says_nothing_about_the_relay():
    async with faulty_relay(takes=2.1) as url:
        results = await judge(url, named("expired-packets-are-served-nowhere"), Patience(answer=20))
        assert [str(each.seen) for each in results.values() if each.outcome is not Outcome.PASSED] == []


@pytest.mark.parametrize("fault", FAULTS)
async def test_each_fault_is_found(fault: str):
    caught_by = FAULTS[fault]
    async with faulty_relay(fault) as url:
        results = await judge(url, named(*caught_by, *SEEN_BY))
    for name in caught_by:
        result = results[name]
        assert result.outcome is Outcome.FAILED, f"{name} {result.outcome}: {result.seen}"
        assert result.expected and result.seen


# The small relay stores every signed packet, whatever its content: it fails these rows for that reason.
IGNORANCE = {
    4: {
        "documents-are-whole",
        "documents-say-what-keys-do",
        "documents-follow-one-another",
        "forks-fail-closed",
    }
    | {"recovery-keys-sign-recovery-alone", "recovery-waits", "live-keys-override-recovery"}
    | {"impossible-policies-fail-closed", "dids-are-resolved-over-http"},
    5: {"added-keys-sign", "keys-have-their-window", "windows-have-a-skew", "back-dating-opens-no-window"}
    | {"keys-revoke-themselves", "key-events-are-whole", "rotation-ends-the-old-key", "the-chain-is-served"}
    | {"events-take-effect-at-once", "revocation-hides-nothing", "undeclared-recovery-is-refused"},
    13: {"unheard-of-origins-are-unknown", "unattested-software-is-unknown", "headers-without-media-count"}
    | {"downgrades-can-be-undone", "models-need-a-chain", "chains-need-a-known-root"}
    | {"hardware-needs-a-device", "manifests-are-whole", "manifests-say-which-keys"},
    14: {"edges-are-their-authors", "edges-have-a-strength", "edge-signatures-match", "corrections-are-whole"}
    | {"strong-edges-are-budgeted", "attestations-are-whole", "inner-signatures-are-verified"}
    | {"attestations-count-once-for-each-author", "metrics-count-once-for-each-moment"}
    | {"metrics-are-their-sources", "configurations-are-their-authors", "descriptors-are-their-relays"},
}


@pytest.mark.parametrize("section", IGNORANCE)
async def test_a_relay_that_judges_nothing_is_found_out(section: int):
    checks = [check for check in all_checks() if check.section == section]
    async with faulty_relay() as url:
        results = await judge(url, checks)
    outcomes = {name: result.outcome for name, result in results.items()}
    assert {name for name, outcome in outcomes.items() if outcome is Outcome.FAILED} == IGNORANCE[section]
    assert Outcome.BROKEN not in outcomes.values()


def test_the_faults_of_the_relay_and_of_this_list_are_the_same():
    source = Path(inspect.getfile(FaultyRelay)).read_text()
    assert set(re.findall(r'wrong\(\s*"([^"]+)"', source)) | set(
        re.findall(r'"([^"]+)" in self\.faults', source)
    ) == set(FAULTS)
