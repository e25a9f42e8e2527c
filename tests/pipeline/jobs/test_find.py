"""What retention has dropped from the log is found in the lake, and can be erased from it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from pyspark.sql import SparkSession
from strata.protocol.packets import Packet
from strata.protocol.places import place_line
from strata_pipeline.cli import app
from strata_pipeline.errors import LakeError, LogError, PipelineError
from strata_pipeline.jobs.archive import archive
from strata_pipeline.jobs.audit import audit
from strata_pipeline.jobs.compact import compact
from strata_pipeline.jobs.copy import copy_lake
from strata_pipeline.jobs.erase import erase
from strata_pipeline.jobs.find import Searched, find
from strata_pipeline.jobs.restore import restore
from strata_pipeline.lake.object_lake import ObjectLake
from strata_pipeline.transforms.emptying import DAMAGED
from typer.testing import CliRunner

from relayd import cli
from tests.support import relay_logs
from tests.support.lakes import DAY, NOON, bodies, sql

LATER = NOON + 10 * DAY


def days(url: str, first: str = "POST") -> list[Packet]:
    """A log of three days of ten packets of ten authors, of which the first is of type `first`; and of a
    later day."""
    made = []
    for day in range(3):
        at = NOON + day * DAY
        today = relay_logs.make_many(9, authors=10, first=10 * day + 1, at=at)
        made += [relay_logs.make(10 * day, type=first, at=at), *today]
        relay_logs.append(url, made[-10:], at)
    relay_logs.append(url, relay_logs.make_many(3, first=90, at=LATER), LATER)
    return made


def searched(spark: SparkSession, place: str | Path, **asked: list[str]) -> tuple[list[str], Searched]:
    done = Searched()
    return [place.packet_id for place in find(spark, place, done, **asked)], done


def ran(*arguments: str, exit_code: int = 0, stdin: str = "") -> dict[str, object]:
    told = CliRunner().invoke(cli.app, [*arguments, "--json"], input=stdin, prog_name="relayd")
    assert told.exit_code == exit_code, told.output
    found: dict[str, object] = json.loads(told.stdout)
    return found


def test_what_retention_has_dropped_is_erased_from_the_lake(spark, new_log, tmp_path):
    url, lake, copy = new_log(), tmp_path / "lake", tmp_path / "copy"
    made = days(url)
    archive(spark, url, lake, batch_rows=4)
    copy_lake(lake, copy)
    relay_logs.drop_days(url, LATER)
    author = made[3].author_id
    gone = [packet for packet in made if packet.author_id == author]
    erase_by_author = ("erase", "--author", author, "--reason", "request 32", "--database-url", url)
    assert ran(*erase_by_author) == {"erased": 0, "spared": 0, "absent": 0}, "the log has none of it"

    found = CliRunner().invoke(app, ["find", "--lake", str(lake), "--author", author])
    assert (found.exit_code, found.stderr) == (0, "3 places\n"), found.output
    assert all(author not in line and len(json.loads(line)) == 3 for line in found.stdout.splitlines())
    places = ("erase", "--places", "-", "--reason", "request 32", "--database-url", url)
    would = ran(*places, "--dry-run", stdin=found.stdout)
    assert (would["dropped"], would["dry_run"]) == (3, True)
    assert erase(spark, url, lake).tombstones == 0
    done = ran(*places, stdin=found.stdout)
    assert (done["erased"], done["dropped"], done["already"], done["refused"]) == (0, 3, 0, 0)
    done = ran(*places, stdin=found.stdout)
    assert (done["dropped"], done["already"]) == (0, 3)

    erased = erase(spark, url, lake)
    assert (erased.tombstones, erased.days, erased.packets) == (3, 3, 3)
    copy_lake(lake, copy)
    left = [packet.canonical for packet in made if packet not in gone]
    for place in (lake, copy):
        assert bodies(place)[:-3] == left
        there = b"".join(path.read_bytes() for path in place.rglob("*") if path.is_file())
        assert not any(packet.canonical in there or author.encode() in there for packet in gone)
        for against in (None, url):
            audited = audit(spark, place, url=against)
            assert (audited.holds, audited.erased) == (True, 3), audited.counts
    assert erase(spark, url, lake).packets == 0
    assert searched(spark, lake, authors=[author]) == ([], Searched())
    # A log that is restored from this lake keeps the tombstones, and what they tell is erased already.
    restored = new_log()
    assert restore(spark, restored, lake).erased == 3
    done = ran(*places[:-1], restored, stdin=found.stdout)
    assert (done["already"], done["refused"]) == (3, 0)


def test_packets_that_carry_keys_stay_and_absent_ids_are_counted(spark, new_log, tmp_path):
    url = new_log()
    made = days(url, "KEY_EVENT")
    archive(spark, url, tmp_path, batch_rows=7)
    ids = [made[number].packet_id for number in (10, 4, 25)]
    assert searched(spark, tmp_path, packet_ids=[*ids, "0x" + "ee" * 32]) == (
        [ids[1], ids[2]], Searched(places=2, spared=1, absent=1)
    )  # fmt: skip
    told = CliRunner().invoke(app, ["find", "--lake", str(tmp_path), *ids, "0x" + "EE" * 32])
    assert told.exit_code == 1
    assert told.stderr == (
        "2 places; 1 packets stay: they carry keys, or revoke them; 1 of the packets are not in the lake\n"
    )
    counts = CliRunner().invoke(app, ["find", "--lake", str(tmp_path), ids[1], "--json"])
    assert json.loads(counts.stdout)["packet_id"] == ids[1]
    assert json.loads(counts.stderr) == {
        "event": "found", "places": 1, "quarantined": 0, "spared": 0, "erased": 0, "unnamed": 0, "absent": 0
    }  # fmt: skip
    # Of the day that the log still has, the row is emptied.
    relay_logs.drop_days(url, NOON + 3 * DAY)
    places = ("erase", "--places", "-", "--reason", "x", "--database-url", url)
    done = ran(*places, stdin=told.stdout)
    assert (done["erased"], done["dropped"]) == (1, 1)
    assert erase(spark, url, tmp_path).packets == 2
    assert searched(spark, tmp_path, packet_ids=ids) == ([], Searched(spared=1, erased=2))
    # These are no key events, as an audit notices.
    assert audit(spark, tmp_path, url=url).counts == {"packet: invalid_schema": 3}


def test_rows_in_quarantine_are_found_too(spark, new_log, tmp_path):
    url = new_log()
    made = days(url)
    ids = [f"packet_id = '\\x{packet.digest.hex()}'" for packet in made[:6]]
    sql(
        url,
        f"UPDATE packets SET body = body || ' ' WHERE {ids[1]}",
        f"UPDATE packets SET packet_id = substring(packet_id FOR 31) WHERE {ids[2]}",
        f"UPDATE packets SET received_at = {2**60} WHERE {ids[3]}",
        "UPDATE packets SET author_id = '', content_type = '', body = '',"
        f" annotation = '{DAMAGED.decode()}'::bytea WHERE {ids[5]}",
    )
    archive(spark, url, tmp_path)
    restored = searched(spark, tmp_path, packet_ids=[made[5].packet_id])
    assert restored == ([made[5].packet_id], Searched(places=1, quarantined=1)), "empty, and not erased"
    authors = [packet.author_id for packet in made[1:5]]
    relay_logs.drop_days(url, LATER)
    names, done = searched(spark, tmp_path, authors=authors)
    assert len(names) == 11
    assert done == Searched(places=11, quarantined=2, unnamed=1)
    told = CliRunner().invoke(app, ["find", "--lake", str(tmp_path), *(f"--author={did}" for did in authors)])
    assert told.exit_code == 1
    assert "11 places, 2 of them of rows in quarantine; 1 rows in quarantine have a damaged" in told.stderr
    relay_logs.append(url, relay_logs.make_many(1, first=99, at=LATER + 90 * DAY), LATER + 90 * DAY)
    relay_logs.drop_days(url, LATER + 90 * DAY)  # and forget ids
    archive(spark, url, tmp_path)
    places = ("erase", "--places", "-", "--reason", "x", "--database-url", url)
    assert ran(*places, stdin=told.stdout)["dropped"] == 11
    erased = erase(spark, url, tmp_path)
    assert (erased.packets, erased.emptied, erased.aside) == (9, 2, 0)
    assert audit(spark, tmp_path, url=url).counts == {}


def test_the_whole_way_in_a_bucket(spark, place, new_log):
    url = new_log()
    made = days(url)
    archive(spark, url, place, batch_rows=4)
    relay_logs.drop_days(url, LATER)
    assert compact(spark, place).days == 3
    found = CliRunner().invoke(app, ["find", "--lake", place, made[4].packet_id, made[15].packet_id])
    assert (found.exit_code, found.stderr) == (0, "2 places\n"), found.output
    places = ("erase", "--places", "-", "--reason", "x", "--database-url", url)
    assert ran(*places, stdin=found.stdout)["dropped"] == 2
    erased = erase(spark, url, place, grace=0)
    assert erased.packets == 2 and erased.deleted > 0
    assert audit(spark, place, url=url).holds
    store = ObjectLake.open(place).store
    there = b"".join(store.get_all(list(store.keys(""))))
    assert made[4].canonical not in there and made[15].canonical not in there


def test_a_place_that_was_named_wrongly_holds_up_nothing(spark, new_log, tmp_path):
    url = new_log()
    made = days(url)
    archive(spark, url, tmp_path)
    later = LATER + 90 * DAY
    relay_logs.append(url, relay_logs.make_many(1, first=99, at=later), later)
    relay_logs.drop_days(url, later)  # and the ids
    searching = find(spark, tmp_path, Searched(), packet_ids=[made[4].packet_id, made[5].packet_id])
    right, other = searching
    wrong = replace(other, packet_id="0x" + "ee" * 32)
    lines = b"\n".join(map(place_line, (right, wrong))).decode()
    assert ran("erase", "--places", "-", "--reason", "x", "--database-url", url, stdin=lines)["dropped"] == 2
    for packets in (1, 0):  # a tombstone is never taken back
        with pytest.raises(
            LogError, match=r"names packet 0xeeee.*the lines for relayd erase --places"
        ) as told:
            erase(spark, url, tmp_path)
        assert ("1 packets were erased" in str(told.value)) is bool(packets)
    assert made[4].canonical not in bodies(tmp_path) and made[5].canonical in bodies(tmp_path)


def test_a_place_without_a_lake_and_a_damaged_lake_are_told(spark, log_url, tmp_path):
    with pytest.raises(LakeError, match="there is no lake in"):
        searched(spark, tmp_path / "nowhere", authors=["did:strata:a"])
    days(log_url)
    archive(spark, log_url, tmp_path)
    next((tmp_path / "packets").rglob("*.parquet")).write_bytes(b"torn")
    with pytest.raises((LakeError, PipelineError)):
        searched(spark, tmp_path, authors=["did:strata:a"])
