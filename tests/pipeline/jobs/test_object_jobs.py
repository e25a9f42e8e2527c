"""Jobs on a lake in a bucket: archive, audit, compact, erase, restore, and the readers; others refuse."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from pyspark.sql import SparkSession
from strata_pipeline.cli import app
from strata_pipeline.cli.audit import _tell
from strata_pipeline.errors import LakeBusy, LakeError
from strata_pipeline.jobs.archive import archive
from strata_pipeline.jobs.audit import Audited, audit
from strata_pipeline.jobs.compact import compact
from strata_pipeline.jobs.copy import copy_lake
from strata_pipeline.jobs.erase import erase
from strata_pipeline.jobs.restore import restore
from strata_pipeline.jobs.tables import DayWindow
from strata_pipeline.jobs.trust import trust
from strata_pipeline.lake.delta import DeltaPublished, publish
from strata_pipeline.lake.object_lake import ObjectLake
from strata_pipeline.lake.places import open_lake
from strata_pipeline.lake_format import Manifest, StoredObject
from typer.testing import CliRunner

from tests.support import relay_logs
from tests.support.file_faults import Killed
from tests.support.lakes import DAY, NOON, sql
from tests.support.object_lakes import NO_GRACE, requests, rows, unnamed
from tests.support.object_stores import Asked, ObjectServer
from tests.support.toy_lakes import faults


@pytest.fixture(scope="module")
def original(spark: SparkSession, new_log: Callable[..., str], object_places) -> tuple[str, str, list]:
    """A log and its lake: eight batches of two days, packets of two kinds, and a row in quarantine. The last
    two batches have packets that came from a peer."""
    url, place, made = new_log(), object_places(), relay_logs.make_many(40, at=NOON)
    relay_logs.append(url, made[:20], NOON)
    relay_logs.append(url, made[20:], NOON + DAY)
    sql(url, f"UPDATE packets SET author_id = 'x' WHERE packet_id = '\\x{made[3].digest.hex()}'")
    theirs = "SELECT sequence FROM packets ORDER BY sequence DESC LIMIT 7"
    sql(url, f"UPDATE packets SET witnessed_at = {NOON + 9} WHERE sequence IN ({theirs})")
    done = archive(spark, url, place, batch_rows=5)
    assert (done.batches, done.packets, done.quarantined, done.behind) == (8, 39, 1, 0)
    return url, place, made


@pytest.fixture(scope="module")
def copied(original, object_places) -> Callable[[], ObjectLake]:
    """Makes copies of the lake, to be damaged."""

    def make() -> ObjectLake:
        lake, place = ObjectLake.open(original[1]), object_places()
        copy = ObjectLake(lake.store.at(place))
        names = list(lake.store.keys(""))
        for name, content in zip(names, lake.store.get_all(names), strict=True):
            copy.store.put(name, content)
        copy.load()
        return copy

    return make


def test_the_lake_holds_the_log_and_an_audit_says_so(spark, original):
    url, place, _ = original
    audited = audit(spark, place, url=url)
    assert audited.holds and audited.compared_up_to == audited.reached
    assert (audited.batches, audited.packets, audited.quarantined, audited.left_behind) == (8, 39, 1, 0)
    assert len(rows(place)) == 40 and unnamed(place) == []
    lake = ObjectLake.open(place)
    assert [summary.batches for summary in lake.chain.sealed] == [4]
    later = audit(spark, place, since=lake.manifests[5].hash)
    assert later.holds and (later.batches, later.packets) == (2, 10)
    again = archive(spark, url, place)
    assert (again.batches, again.tip) == (0, lake.tip)


def test_witnesses_are_in_the_bucket_and_an_audit_checks_them(spark, copied):
    lake = copied()
    assert lake.witnesses.times_of(lake.manifests).times.tolist() == [NOON + 9] * 7
    changed, missing = (f"_witnesses/{name}" for name in lake.witnesses.names())
    lake.store.put(changed, lake.store.get(changed)[:-1])
    lake.store.delete([missing])
    strangers = [f"_witnesses/0000000007-{'ab' * 32}.csv", "_witnesses/notes"]
    for name in strangers:
        lake.store.put(name, b"")
    audited = audit(spark, lake.place)
    assert audited.counts == {"witness: changed": 1, "witness: missing": 1, "witness: surplus": 2}
    assert {one.file for one in audited.findings} == {
        lake.store.url(name) for name in (changed, missing, *strangers)
    }


def test_readers_get_the_days_and_kinds_that_they_ask_for(spark, original):
    _, place, made = original
    lake = ObjectLake.open(place)
    window = DayWindow(lake)
    assert window.rows == 39
    found = window.packets(spark).frame.orderBy("sequence").toArrow()
    sound = [packet for packet in made if packet is not made[3]]
    assert found["body"].to_pylist() == [packet.canonical for packet in sound]
    assert found["received_at"].to_pylist() == [NOON] * 19 + [NOON + DAY] * 20
    last = DayWindow(lake, 1).packets(spark, "REACTION").frame.toArrow()
    assert {*last["packet_id"].to_pylist()} == {
        packet.digest for packet in made[20:] if packet.content_type == "REACTION"
    }


def test_a_report_is_written_to_a_disk(spark, original, tmp_path):
    # It reads only the folders of statements, and there are none.
    assert trust(spark, original[1], output=tmp_path).edges == 0 and (tmp_path / "trust.html").exists()


def test_a_relay_is_restored_from_a_bucket(spark, original, new_log):
    _, place, made = original
    fresh = new_log()
    done = restore(spark, fresh, place)
    assert (done.packets, done.damaged, done.left) == (39, 1, 0)
    reader = spark.read.format("relay_log").option("url", fresh).load()
    restored = reader.select("sequence", "body", "witnessed_at").orderBy("sequence").toArrow()
    assert restored["witnessed_at"].to_pylist() == [None] * 33 + [NOON + 9] * 7
    assert restored["body"].to_pylist() == [b"" if packet is made[3] else packet.canonical for packet in made]
    assert set(restored["sequence"].to_pylist()) == set(rows(place))


def spoil(content: bytes) -> bytes:
    """Change a byte in the middle, where the pages are."""
    place = len(content) // 2
    return content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :]


def harmed(lake: ObjectLake) -> dict[str, tuple[Manifest, set[str], set[str]]]:
    """Damage a batch in each possible way; returns the expected findings, and the objects to be named."""
    batches = [(manifest, lake.listing(manifest).objects) for manifest in lake.manifests]
    store = lake.store

    def told(*objects: StoredObject) -> set[str]:
        return {store.url(one.name) for one in objects}

    (changed, [one, *_]), (gone, [lost, *_]), (swapped, [first, second, *_]), (surplus, [theirs, *_]), (
        unlisted, _,
    ), (forged, _), *_ = batches[1:]  # fmt: skip
    store.put(one.name, spoil(store.get(one.name)))
    store.delete([lost.name])
    contents = store.get(first.name), store.get(second.name)
    store.put(first.name, contents[1])
    store.put(second.name, contents[0])
    stranger = StoredObject(
        name=theirs.name.replace(".parquet", "0.parquet"), size=0, rows=0, hash=theirs.hash
    )
    store.put(stranger.name, store.get(theirs.name))
    listings = {number: name for name in store.keys("_objects") for number in [int(name.split("/")[1][:10])]}
    store.delete([listings[unlisted.number]])
    text = store.get(listings[forged.number])
    store.put(listings[forged.number], text.replace(b'"rows": 2', b'"rows": 1'))
    return {
        "changed": (changed, {"file: changed"}, told(one)),
        "gone": (gone, {"file: missing", "batch: count"}, told(lost)),
        "swapped": (swapped, {"file: changed", "row: misplaced"}, told(first, second)),
        "surplus": (surplus, {"file: surplus"}, told(stranger)),
        "unlisted": (unlisted, {"batch: listing", "batch: count"}, {store.url(listings[unlisted.number])}),
        "forged": (forged, {"batch: listing", "batch: count"}, {store.url(listings[forged.number])}),
    }


@pytest.fixture(scope="module")
def damage(spark, original, copied) -> tuple[dict[str, Any], Audited, ObjectLake]:
    lake = copied()
    told = harmed(lake)
    return told, audit(spark, lake.place), lake


@pytest.mark.parametrize("what", ["changed", "gone", "swapped", "surplus", "unlisted", "forged"])
def test_every_harm_is_found_and_its_objects_are_named(damage, what):
    told, audited, _ = damage
    manifest, reasons, objects = told[what]
    assert objects <= {finding.file for finding in audited.findings}
    found = {
        f"{finding.about}: {finding.reason}"
        for finding in audited.findings
        if finding.file in objects or finding.sequence == manifest.up_to
    }
    assert reasons <= found


def test_sound_batches_are_not_among_the_findings(damage):
    told, audited, lake = damage
    spans = [manifest.span for manifest, _, _ in told.values()]
    sound = [one.span for one in lake.manifests if one.span not in spans]
    assert len(sound) == 2
    for finding in audited.findings:
        assert not any(str(span) in (finding.file or "") for span in sound)
        assert not any(span.after < (finding.sequence or 0) <= span.up_to for span in sound)


def test_who_reads_damage_is_told_and_no_job_computes_with_it(spark, damage, new_log):
    _, _, lake = damage
    with pytest.raises(LakeError, match=r"s3://lakes/.*\.parquet .*Bring"):
        restore(spark, new_log(), lake.place)
    with pytest.raises(LakeError, match="objects of a batch cannot be told"):
        trust(spark, lake.place)


def two_batches(lake: ObjectLake) -> int:
    """The number of bytes of bodies that makes a part of two batches."""
    return sum(manifest.body_bytes for manifest in lake.manifests[:2]) + 100


def test_a_compacted_lake_holds_the_same_for_all_who_read_it(
    spark, original, copied, new_log, tmp_path, capsys
):
    url, lake = original[0], copied()
    with pytest.raises(LakeError, match="there is no lake"):
        compact(spark, f"{lake.place}-nowhere")
    done = compact(spark, lake.place, file_bytes=two_batches(lake))
    assert (done.days, done.waiting, done.deleted) == (1, 0, 0) and done.files_after < done.files_before
    assert [len(unit.manifests) for unit in ObjectLake.open(lake.place).units(20_000)[0]] == [2, 2]
    audited = audit(spark, lake.place, url=url)
    assert audited.holds and (audited.packets, audited.quarantined) == (39, 1)
    assert audited.left_behind == done.files_before  # they stay for a day
    _tell(audited)
    said = f"{done.files_before} objects were replaced, or left by interrupted writers: archive, compact and"
    assert said in capsys.readouterr().out
    assert audit(spark, lake.place, since=lake.manifests[1].hash).holds
    assert restore(spark, new_log(), lake.place).packets == 39  # each batch checked against its manifest
    assert copy_lake(lake.place, tmp_path).tip == lake.tip and faults(tmp_path) == []
    again = CliRunner().invoke(app, ["compact", "--lake", lake.place, "--grace", "0", "--json"])
    assert again.exit_code == 0, again.output
    said = msgspec.json.decode(again.stdout.splitlines()[-1])  # larger parts, and no grace
    assert (said["days"], said["deleted"], said["files_before"]) == (1, done.files_before, done.files_after)
    done = compact(spark, lake.place, again=[20_000])  # a day that is compact
    assert (done.days, done.files_before) == (1, done.files_after)
    with ObjectLake.replace(lake.place, NO_GRACE):
        pass
    assert unnamed(lake.place) == [] and len(rows(lake.place)) == 40
    assert archive(spark, url, lake.place).batches == 0


def test_harm_to_a_compacted_day_is_found_and_named(spark, copied):
    lake = copied()
    compact(spark, lake.place, file_bytes=two_batches(lake))
    lake.load()
    store = lake.store
    (changed, *_), (lost, theirs, *_) = (part.objects for part in lake.parts(20_000))
    store.put(changed.name, spoil(store.get(changed.name)))
    store.put(surplus := theirs.name.replace(".parquet", "0.parquet"), store.get(theirs.name))
    store.delete([lost.name])
    audited = audit(spark, lake.place)
    found = {(f"{one.about}: {one.reason}", one.file) for one in audited.findings}
    for reason, name in (("changed", changed.name), ("missing", lost.name), ("surplus", surplus)):
        assert (f"file: {reason}", store.url(name)) in found
    assert audited.counts["batch: count"] == 2  # both batches of the part that lacks an object
    assert {one.sequence for one in audited.findings if one.reason == "count"} == {
        manifest.up_to for manifest in lake.manifests[2:4]
    }


def test_what_a_relay_has_erased_goes_from_a_bucket_as_well(spark, place, new_log, tmp_path):
    url, made = new_log(), relay_logs.make_many(20, at=NOON)
    relay_logs.append(url, made, NOON)
    relay_logs.append(url, later := relay_logs.make_many(4, first=50, at=NOON + DAY), NOON + DAY)
    archive(spark, url, place, batch_rows=5, delta=True)
    relay_logs.erase(url, *(made[number].packet_id for number in (1, 7, 19)), later[0].packet_id)
    tip = ObjectLake.open(place).tip
    assert compact(spark, place).days == 1
    done = erase(spark, url, place)
    assert (done.tombstones, done.days, done.packets, done.waiting, done.deleted) == (4, 1, 3, 1, 0)
    assert done.searched == 2
    # The Delta log has each day.
    assert publish(open_lake(place)) == DeltaPublished(version=3, manifest=4, added=0, removed=0, rows=21)
    audited = audit(spark, place, url=url)
    assert audited.counts == {"log: altered": 1} and audited.erased == 3  # that of the day that continues
    assert (audited.packets, audited.quarantined) == (21, 3) and ObjectLake.open(place).tip == tip
    told = CliRunner().invoke(
        app, ["erase", "--lake", place, "--database-url", url, "--grace", "0", "--json"]
    )
    assert told.exit_code == 0, told.output
    said = msgspec.json.decode(told.stdout.splitlines()[-1])
    assert said["packets"] == 0 and said["waiting"] == 1 and said["deleted"] > 8 and said["searched"] == 1
    assert unnamed(place) == []
    left = [packet.canonical for n, packet in enumerate(made) if n not in (1, 7, 19)]
    found = DayWindow(ObjectLake.open(place)).packets(spark).frame.orderBy("sequence").toArrow()
    assert found["body"].to_pylist() == left + [packet.canonical for packet in later]
    assert restore(spark, new_log(), place).packets == 21
    # A copy is without it too, reports that, and continues after it was killed.
    for copy in (f"{place}-copy", tmp_path / "copy"):
        assert copy_lake(place, copy).erasures == 1
        audited = audit(spark, copy)
        assert audited.holds and (audited.packets, audited.quarantined, audited.erased) == (21, 3, 3)
    with requests() as sent:
        copy_lake(place, f"{place}-whole")
    first = next(n for n, one in enumerate(sent) if "_manifests/0" in one)
    with requests(first + 1), pytest.raises(Killed):
        copy_lake(place, f"{place}-half")
    audited = audit(spark, f"{place}-half")
    assert audited.counts == {"erasure: unreached": 1}, "manifests that are lost would look the same"
    assert (audited.packets, audited.quarantined) == (4, 1)
    assert copy_lake(place, f"{place}-half").batches == 4 and audit(spark, f"{place}-half").erased == 3
    # If the empty rows are lost, everything else is checked, and each damage is reported.
    store = ObjectLake.open(place).store
    store.delete(list(store.keys("quarantine")))
    audited = audit(spark, place)
    assert audited.counts.keys() == {"file: missing", "batch: count", "erasure: unchecked"}
    assert audited.packets == 21


def test_of_two_archives_one_says_that_it_came_second_and_the_next_run_goes_on(
    spark, object_server: ObjectServer, place, log_url
):
    relay_logs.append(log_url, relay_logs.make_many(12))
    archive(spark, log_url, place, batch_rows=4, stopped=lambda: True)
    met: list[threading.Thread] = []

    def overtake(asked: Asked) -> None:
        if asked.is_conditional and asked.key.endswith("_manifests/0000000001.json") and not met:
            other = {"batch_rows": 6, "stopped": lambda: True}
            met.append(threading.Thread(target=archive, args=(spark, log_url, place), kwargs=other))
            met[0].start()
            met[0].join()

    object_server.before = overtake
    with pytest.raises(LakeBusy, match="another archive has put manifest 1"):
        archive(spark, log_url, place, batch_rows=4)
    object_server.behave()
    done = archive(spark, log_url, place, batch_rows=4)
    assert (done.batches, len(done.left_behind)) == (1, 3)
    assert len(rows(place)) == 12 and ObjectLake.open(place).reached == done.reached


def test_a_place_that_is_none_is_refused_before_spark_starts():
    refused = CliRunner().invoke(app, ["audit", "--lake", "s3://no"])
    assert refused.exit_code == 2 and "s3://bucket/prefix" in refused.output
