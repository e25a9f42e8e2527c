"""The same inputs each time against a live relay: those of the corpus, then drawn ones of every kind."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest

from tests.fuzz.grammar import FUZZER, LEVELS, draw, from_json
from tests.fuzz.live import CORPUS, fuzz, read_corpus
from tests.support.relay_process import RelayProcess, running

SEED = 20261122
INPUTS = 400
SETTINGS: dict[str, Any] = {
    "max_packet_age_seconds": 3_153_600_000,
    "dedup_window_seconds": 3_153_600_000,
    "replication_peers": [FUZZER.did],
}
"""The packets of the corpus never become too old, and authenticated clients may compare sets."""


@pytest.fixture(scope="module")
def fuzzed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RelayProcess]:
    with running(RelayProcess(tmp_path_factory.mktemp("relay"), **SETTINGS)) as relay:
        yield relay
        assert relay.is_running(), relay.last_words()


@pytest.mark.timeout(300)
@pytest.mark.req("R-123", "R-126", "R-176", "R-321")
async def test_whatever_is_sent_every_promise_is_kept(fuzzed: RelayProcess) -> None:
    report = await fuzz(fuzzed, SEED, inputs=INPUTS, first=read_corpus(CORPUS), guilty=print)
    assert not report.broken
    assert set(report.levels) >= set(LEVELS)
    assert set(report.requests) == {"PUBLISH", "SUBSCRIBE", "UNSUBSCRIBE", "AUTH", "RECONCILE"}
    assert {"Ok", "AuthOk", "EndOfHistory", "Event", "Error invalid_schema"} <= set(report.answers)
    assert report.answers["Reconciled"] > 5
    assert min(report.acknowledged, report.read_again, report.canary, report.closed.total()) > 0


def test_a_seed_draws_the_same_inputs_again_and_the_corpus_keeps_them_whole() -> None:
    drawn = [draw(random.Random(7), 1_800_000_000) for _ in range(2)]
    assert drawn[0] == drawn[1] != draw(random.Random(8), 1_800_000_000)
    for number in range(100):
        made = draw(random.Random(number), 1_800_000_000)
        again = from_json(made.as_json())
        assert (again.pieces, again.step) == (made.pieces, made.step)
