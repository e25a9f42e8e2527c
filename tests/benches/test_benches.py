"""Every benchmark, briefly, against a real relay: they run, totals are exact, reports are complete.

The measured values are not checked here. A run checks itself: each publish has its own OK, each subscriber
gets each packet once, each stream the whole log; otherwise it is void.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benches.__main__ import main

ROOT = Path(__file__).parents[2]

MEASURES = {
    "publish": ["acknowledged, 8 x 32", "CPU of relay and PostgreSQL"],
    "fanout": ["10 subscribers, 8 x 32 in flight", "10 subscribers, 1 in flight"],
    "latency": ["PUBLISH to OK, p50", "PUBLISH to OK, p99"],
    "catchup": ["one stream, gapless", "pages of 500, one reader", "pages of 500, 4 readers"],
    "idle": ["a connection, of 50", "the same with a live subscription"],
    "checks": [
        "all but the signature, plain packet",
        "message decoded",
        "schema, canonical form, size, id",
        "rate limit",
        "policy, nothing listed",
        "freshness",
        "key of a plain author",
        "rules of its type, a POST",
        "provenance, no header",
        "equivalence key, a POST",
        "policy, 1000 on every list",
        "key of a plain author, first seen",
        "key chain of an author, in memory",
        "signature, chain of 1",
        "signature, chain of 3",
        "signature, chain of 50",
        "signature, oldest of 16 live keys",
        "provenance, header UNKNOWN",
        "provenance, attested SOFTWARE",
        "provenance, the same by a manifest",
        "provenance, AI_MODEL, chain of 2",
    ],
    "identities": [
        "300 authors with a key chain",
        "CPU of relay and PostgreSQL",
        "KEY_EVENTs stored",
        "each one's first packet after a restart",
        "memory of a chain",
    ],
    "opening": [
        "ready line",
        "all identities known",
        "PUBLISH to OK right after the ready line, p50",
        "memory of an identity",
    ],
    "hostile": [
        "p50 beside 100 idle",
        "p99 beside 100 idle",
        "p50 beside 100 idle and 56 hostile",
        "p99 beside 100 idle and 56 hostile",
    ]
    if sys.platform == "linux"
    else [],
    "scaling": [
        "published at one relay",
        "the same beside 5 sessions that LISTEN",
        "the same followed by a second relay",
        "published at two relays",
        "a relay that follows: CPU for each packet",
        "a relay that reads by federation: CPU for each packet",
        "a relay that follows over a bus: CPU for each packet",
        "a standby: CPU for each packet published",
        "history from the primary: CPU of PostgreSQL for each packet",
        "history from the standby: CPU of PostgreSQL for each packet",
    ],
    "federation": [
        "OK upstream to EVENT at the reader, p50",
        "OK upstream to EVENT at the reader, p99",
        "a backlog read, verified and stored",
        "a ring of three: packets that come twice",
        "a ring of three without a group: packets that come twice",
        "5,000 packets, 0 differences: bytes",
        "5,000 packets, 0 differences: rounds",
        "5,000 packets, 10 differences: bytes",
        "5,000 packets, 10 differences: rounds",
    ],
}


FROM_SCRATCH = "latency"
"""The benchmark that runs as users run it: in a separate process, on a relay that creates its data folder."""


def run_benches(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "benches", *arguments], cwd=ROOT, capture_output=True, text=True, timeout=110
    )


@pytest.mark.timeout(600)  # ten relays on a busy machine
@pytest.mark.parametrize("bench", MEASURES)
def test_each_benchmark_runs_and_reports(bench: str, capsys: pytest.CaptureFixture[str]) -> None:
    if bench == FROM_SCRATCH:
        done = run_benches("--brief", "--json", bench)
        code, out, err = done.returncode, done.stdout, done.stderr
    else:
        code = main(["--brief", "--json", bench])
        out, err = capsys.readouterr()
    assert code == 0, err
    measures = json.loads(out)["measures"]
    assert [measure["name"] for measure in measures] == MEASURES[bench]
    for measure in measures:
        assert measure["bench"] == bench
        assert measure["unit"]
        assert measure["limit"] > 0
        assert measure["limit_name"]
        assert measure["ratio"] == pytest.approx(measure["value"] / measure["limit"])
        assert (measure["met"] is None) == (measure["target"] is None)


def test_an_unknown_benchmark_is_refused_with_the_known_ones() -> None:
    done = run_benches("nothing")
    assert done.returncode == 2
    assert "publish, fanout, latency, catchup, idle" in done.stderr


def test_a_relay_that_does_not_start_makes_the_run_void() -> None:
    done = run_benches("--brief", "--serve", f"{sys.executable} -c 'raise SystemExit(3)'", "latency")
    assert done.returncode == 1
    assert "void: the relay did not start" in done.stderr
