"""Probe logs into scores: the same figures as a client's."""

from __future__ import annotations

import gzip
import json
import random
from pathlib import Path

import msgspec
import pyarrow.parquet as pq
import pytest
import typer
from strata.relays.conduct import WINDOW_SECONDS, Aspect
from strata.relays.pool.reputation import Observation, Reputation
from strata.relays.pool.score_file import ScoreFile
from strata_pipeline.cli.reputation import reputation_command
from strata_pipeline.errors import UsageError
from strata_pipeline.jobs import tables
from strata_pipeline.jobs.reputation import Scored, reputation
from typer.testing import CliRunner

from tests.support.file_faults import Killed

NOW = 1_760_000_123.25
RELAYS = [f"wss://relay-{n}.example/strata" for n in range(5)]


def line(observation):
    return msgspec.json.encode(observation).decode() + "\n"


def some(seed, count):
    """The observations of a client over eight days: some are too old."""
    chance = random.Random(seed)
    seen = []
    for _ in range(count):
        kind = chance.choice(list(Aspect))
        good = chance.choice((0, 1, 3, 250))
        bad = 0 if chance.random() < 0.7 else chance.randrange(4)
        measured = kind in (Aspect.PING, Aspect.PUBLISH, Aspect.HISTORY) and chance.random() < 0.8
        value = chance.uniform(0.01, 3) * (1 if kind is not Aspect.HISTORY else 1e6) if measured else None
        at = NOW - chance.uniform(0, WINDOW_SECONDS + 90_000)
        seen.append(Observation(chance.choice(RELAYS), at, kind, good, bad, value))
    return seen


def expected(seen):
    """By relay, the judgement of a client that has seen all of this in order."""
    client = Reputation()
    for one in sorted(seen, key=lambda one: one.at):
        client.record(one)
    told = {}
    for url in {one.url for one in seen}:
        score = client.score(url, NOW)
        client.judge(url, NOW)
        saved = client.saved(url)
        told[url] = {
            "standing": saved.standing.value, "score": score.value, "integrity": score.integrity,
            "latency_seconds": score.latency, "throughput_bytes": score.throughput, "uptime": score.uptime,
            "last_seen_at": saved.last_seen_at,
        }  # fmt: skip
    return told


def figures(scored):
    return {
        row["url"]: {name: row[name] for name in row if name not in ("url", "observations")}
        for row in scored.relays
    }


def test_many_clients_logs_give_the_figures_of_one_that_saw_it_all(spark, tmp_path):
    clients = [some(seed, 150) for seed in range(3)]
    everything = [one for seen in clients for one in seen]
    (tmp_path / "laptop").mkdir()
    for number, seen in enumerate(clients[:2]):
        (tmp_path / "laptop" / f"{number}.jsonl").write_text("".join(map(line, seen)))
    # The third submits twice, and the second export contains the first.
    with gzip.open(tmp_path / "phone.jsonl.gz", "wt") as file:
        file.writelines(map(line, clients[2]))
    (tmp_path / "phone.0.jsonl").write_text("".join(map(line, clients[2][:40])))
    (tmp_path / "notes.txt").write_text("not a log\n")

    scored = reputation(spark, tmp_path, at=NOW)
    assert (scored.lines, scored.malformed, scored.future) == (490, 0, 0)
    oldest = (NOW - WINDOW_SECONDS) // 3600 * 3600
    too_old = [one for one in everything if one.at < oldest]
    assert scored.old >= len(too_old) > 0
    # To the last digit. A client also drops entries that are too old, but has then still seen the relay.
    counting = [one for one in everything if one.at >= oldest]
    assert figures(scored) == expected(counting)
    scores_of_all = {url: told["score"] for url, told in expected(everything).items()}
    assert {row["url"]: row["score"] for row in scored.relays} == scores_of_all
    assert [row["score"] for row in scored.relays] == sorted(scores_of_all.values(), reverse=True)
    assert sum(row["observations"] for row in scored.relays) == len(counting)


def test_what_a_client_has_kept_is_scored_as_that_client_scores_it(spark, tmp_path):
    seen = sorted(some(9, 60), key=lambda one: one.at)
    with ScoreFile(tmp_path / "relays.db") as file:
        file.write(seen, [], NOW)
        kept = file.observations(NOW - WINDOW_SECONDS)
    client = Reputation()
    for one in kept:
        client.record(one)
    (tmp_path / "log.jsonl").write_text("".join(map(line, kept)))
    scored = reputation(spark, tmp_path, at=NOW)
    assert len(scored.relays) > 3
    for row in scored.relays:
        assert row["score"] == client.score(row["url"], NOW).value


def test_malformed_lines_are_put_aside_and_a_clock_that_jumped_counts_for_nothing(spark, tmp_path):
    good = Observation(RELAYS[0], NOW, Aspect.CONNECT, good=3)
    malformed = [
        b"no json",
        b'{"url": "wss://a", "at": 1e999, "kind": "ping"}',
        b'{"url": "wss://a", "at": 1760000000, "kind": "guess"}',
        b'{"url": "wss://a", "at": 1760000000, "kind": "ping", "good": -1}',
        b'{"url": "wss://a", "at": 1760000000, "kind": "ping", "value": -0.5}',
        b'{"url": "%s", "at": %d, "kind": "history", "good": 9, "value": 1e308}' % (RELAYS[0].encode(), NOW),
        b'{"at": 1760000000, "kind": "ping"}',
        b'{"url": "wss://\xff", "at": 1760000000, "kind": "ping"}',
        b"[" * 5000,
    ]
    future = Observation(RELAYS[0], NOW + 1, Aspect.VALIDITY, bad=1000)
    old = Observation(RELAYS[0], NOW - WINDOW_SECONDS - 3600, Aspect.VALIDITY, bad=1000)
    of_a_newer_client = json.dumps({**msgspec.to_builtins(good), "kind": "ping", "by": "v9"}).encode()
    lines = [line(one).strip().encode() for one in (good, future, old)]
    (tmp_path / "a.jsonl").write_bytes(b"\n".join([*lines, b"", *malformed, of_a_newer_client]) + b"\n")

    scored = reputation(spark, tmp_path, at=NOW, output=tmp_path / "out")
    assert (scored.lines, scored.malformed, scored.future, scored.old) == (13, len(malformed), 1, 1)
    assert [(row["url"], row["observations"], row["integrity"]) for row in scored.relays] == [
        (RELAYS[0], 2, 1.0)
    ]
    aside = pq.read_table(tmp_path / "out" / "malformed")
    assert sorted(aside["line"].to_pylist()) == sorted(malformed)
    assert {name.rpartition("/")[2] for name in aside["file"].to_pylist()} == {"a.jsonl"}
    assert pq.read_table(tmp_path / "out" / "relay_scores").to_pylist() == scored.relays
    [kept] = (tmp_path / "out" / "relay_score_history").iterdir()
    assert kept.name == f"at={int(NOW)}" and pq.ParquetDataset(kept).read().num_rows == len(scored.relays)


def test_scores_stay_until_others_take_their_place(spark, tmp_path, monkeypatch):
    log, output = tmp_path / "a.jsonl", tmp_path / "out"
    log.write_text(line(Observation(RELAYS[0], NOW - 60, Aspect.PING, 10, 0, 0.02)) + "?\n")
    before = reputation(spark, tmp_path, at=NOW, output=output).relays

    def killed(draft: Path, target: Path) -> None:
        raise Killed

    monkeypatch.setattr(tables, "put", killed)
    log.write_text(line(Observation(RELAYS[1], NOW - 60, Aspect.PING, 10, 0, 0.02)))
    with pytest.raises(Killed):
        reputation(spark, tmp_path, at=NOW, output=output)
    assert pq.read_table(output / "relay_scores").to_pylist() == before
    assert pq.read_table(output / "malformed").num_rows == 1
    with pytest.raises(UsageError, match="cannot be written"):
        reputation(spark, tmp_path, at=NOW, output=log / "out")


def test_the_command_prints_a_line_for_each_relay(spark, tmp_path):
    seen = [
        Observation("wss://good.example", NOW - 60, Aspect.PING, 10, 0, 0.02),
        Observation("wss://bad.example\x1b[2J", NOW - 60, Aspect.VALIDITY, 0, 9),
    ]
    (tmp_path / "a.jsonl").write_text("".join(map(line, seen)) + "?\n")
    app = typer.Typer()
    app.command()(reputation_command)
    told = CliRunner().invoke(app, ["--probes", str(tmp_path), "--at", str(NOW), "--json"])
    assert told.exit_code == 0, told.output
    *relays, done = map(json.loads, told.stdout.splitlines())
    assert [(one["url"], one["standing"]) for one in relays] == [
        ("wss://good.example", "active"),
        ("wss://bad.example\x1b[2J", "blacklisted"),
    ]
    assert (done["relays"], done["lines"], done["malformed"]) == (2, 3, 1)

    shown = CliRunner().invoke(app, ["--probes", str(tmp_path), "--at", "2025-10-09T08:55:24Z"]).stdout
    assert "active" in shown and "1 malformed lines" in shown
    assert "\x1b" not in shown
    wrong = CliRunner().invoke(app, ["--probes", str(tmp_path), "--at", "noon"])
    assert wrong.exit_code == 2 and "Unix seconds" in wrong.stderr


def test_without_a_folder_there_is_nothing_to_read(spark, tmp_path):
    with pytest.raises(UsageError, match="is not a folder; put there what `strata relays export` prints"):
        reputation(spark, tmp_path / "nowhere")
    assert reputation(spark, tmp_path, at=NOW) == Scored(NOW)
    late = Observation("wss://good.example", NOW + 60, Aspect.PING, 10, 0, 0.02)
    (tmp_path / "a.jsonl").write_text(f"{line(late)}no observation\n")
    assert reputation(spark, tmp_path, at=NOW) == Scored(NOW, lines=2, malformed=1, future=1)
