"""Finished days of a bucket rewritten: killed at every request, by two at once, and the remains."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from datetime import timedelta

import pytest
from blake3 import blake3
from msgspec.structs import replace
from strata_pipeline.errors import LakeBusy, PipelineError
from strata_pipeline.jobs.audit_erasures import check_erasures
from strata_pipeline.jobs.audit_result import Audited
from strata_pipeline.jobs.copy import copy_lake
from strata_pipeline.jobs.object_days import RemovedRows, Run, erase_from_day, still_there
from strata_pipeline.jobs.parts import PartDone, PartWork, rewrite_part
from strata_pipeline.lake.erasure_commit import put_record
from strata_pipeline.lake.lake import Lake
from strata_pipeline.lake.object_lake import ObjectLake
from strata_pipeline.lake.rewrite_attempts import DEFAULT_GRACE, Grace, rewrites, sweep_days
from strata_pipeline.lake_format import (
    LakeError,
    encode_generation,
    generation_name,
    seal_erasure,
    seal_generation,
)
from strata_pipeline.transforms.emptying import read_aside

from tests.support.file_faults import Killed
from tests.support.object_lakes import (
    NO_GRACE,
    begin_with,
    compacted,
    erased,
    inline,
    named,
    put_batch,
    requests,
    rows,
    rows_apart,
    tombstones,
    unnamed,
)
from tests.support.object_stores import Asked, ObjectServer
from tests.support.toy_lakes import DAY
from tests.support.toy_lakes import place as sequence

SOUND = [sequence(n) for n in (1, 2, 3, 5, 6, 7, 8)] + [sequence(n, DAY + 1) for n in (1, 2, 3)]
ASIDE = [sequence(4)]
GONE = [sequence(n) for n in (2, 8)]
LEFT = [n for n in SOUND if n not in GONE]


def begun(where: str) -> None:
    """Make a lake of a finished day in four batches, with a quarantined row, and of an unfinished day."""
    put_batch(where, [1, 2, 3], [4])
    put_batch(where, [5, 6])
    put_batch(where, [7])
    put_batch(where, [8])
    put_batch(where, [1, 2, 3], day=DAY + 1)


def bring_all(lake: ObjectLake) -> None:
    with lake.at_hand(lake.manifests):
        pass


def erased_all(where: str, run: Run = inline) -> int:
    return erased(where, *GONE, run=run)


def swept(where: str) -> list[str]:
    """The remains when no grace is left."""
    with ObjectLake.replace(where, NO_GRACE):
        pass
    return unnamed(where)


def settled(where: str) -> None:
    """Check that an audit of names would report nothing."""
    lake = ObjectLake.open(where)
    assert lake.unexpected(lake.days())[0] == []


@pytest.mark.parametrize(
    ("act", "after"),
    [(compacted, (SOUND, ASIDE)), (erased_all, (LEFT, sorted(ASIDE + GONE)))],
)
def test_killed_at_every_request_a_day_is_the_old_or_the_new_and_the_next_run_ends_it(in_memory, act, after):
    first, where = next(in_memory), next(in_memory)
    begun(first)
    begin_with(where, first)
    before = rows_apart(where)
    assert before == (SOUND, ASIDE)
    with requests() as sent:
        assert act(where)
    assert rows_apart(where) == after
    settled(where)
    commit = next(n for n, one in enumerate(sent) if one.startswith("put _generations"))
    assert sent[commit - 1].startswith("put _days/") and len(sent) == commit + 1 > 6
    assert not act(where)
    assert swept(where) == [] and rows_apart(where) == after

    for last in range(1, len(sent)):
        begin_with(where := next(in_memory), first)
        with requests(last), pytest.raises(Killed):
            act(where)
        assert rows_apart(where) == before, sent[last]
        settled(where)
        put_batch(where, [4], day=DAY + 1)  # an archive continues, and deletes nothing that may still count
        assert act(where)
        grown = [*after[0], sequence(4, DAY + 1)], after[1]
        assert rows_apart(where) == grown
        settled(where)
        assert swept(where) == [] and rows_apart(where) == grown, sent[last]


def test_killed_amid_the_deleting_the_next_run_goes_on(in_memory):
    first, where = next(in_memory), next(in_memory)
    begun(first)
    compacted(first)
    begin_with(where, first)
    with requests() as sent:
        swept(where)
    assert sum(one.startswith("delete packets") for one in sent) == 6 and "delete _attempts/day" in sent[-1]
    for last in range(2, len(sent)):
        begin_with(where := next(in_memory), first)
        with requests(last), pytest.raises(Killed):
            swept(where)
        assert rows_apart(where) == (SOUND, ASIDE)
        settled(where)
        assert swept(where) == []


def test_small_parts_are_joined_and_stay_as_they_are_afterwards(in_memory):
    where = next(in_memory)
    begun(where)
    assert not compacted(where, part_bytes=100)  # each batch is a part already
    assert compacted(where, part_bytes=250)  # the toy lakes record 100 bytes for each batch
    lake = ObjectLake.open(where)
    parts = lake.parts(DAY)
    assert [part.span for part in parts] == [(0, sequence(6)), (sequence(6), sequence(8))]
    assert sum(one.rows for part in parts for one in part.objects) == 8
    kinds = [sorted(one.name.split("/")[3] for one in part.objects if "kind" in one.name) for part in parts]
    assert kinds == [["kind=NOTE", "kind=POST"], ["kind=POST"]]
    assert not compacted(where, part_bytes=250)
    assert compacted(where, part_bytes=400) and len(ObjectLake.open(where).parts(DAY)) == 1
    assert rows_apart(where) == (SOUND, ASIDE) and swept(where) == []


def test_an_erasure_leaves_other_parts_as_they_are_and_is_bound_by_its_record(in_memory):
    where = next(in_memory)
    begun(where)
    before = named(ObjectLake.open(where))
    assert erased(where, sequence(2)) == 1 and erased(where, sequence(2)) == 0
    lake = ObjectLake.open(where)
    [record] = lake.erasures.records
    assert (record.erased, [one.sequence for one in lake.erasures.tombstones(record)]) == (1, [sequence(2)])
    assert [one.packets for one in record.batches] == [2] and lake.rows_of(DAY) == 6
    assert len(before & named(lake)) == len(before) - 3  # the two kinds and the quarantine of the first batch
    # A later compaction, and a second erasure, change nothing else.
    assert compacted(where) and erased(where, *GONE) == 1
    assert rows_apart(where) == (LEFT, sorted(ASIDE + GONE)) and swept(where) == []
    assert [one.previous for one in ObjectLake.open(where).erasures.records] == ["0" * 64, record.hash]
    lake.store.put(f"_erased/{lake.generations.records[0].attempt}.jsonl", b"")
    with pytest.raises(LakeError, match=r"_erased/.* its hash does not recompute"):
        list(lake.erasures.tombstones(record))


def test_of_a_row_that_was_put_aside_the_place_is_left_and_the_batch_holds(in_memory):
    where = next(in_memory)
    begun(where)
    tip = ObjectLake.open(where).tip
    assert compacted(where) and erased(where, *ASIDE) == 1
    lake = ObjectLake.open(where)
    assert (lake.tip, rows_apart(where)) == (tip, (SOUND, ASIDE))
    with lake.at_hand(lake.chain.of_day(DAY), "quarantine") as layout:
        rows = read_aside(layout.folders_of_day(layout.quarantine, DAY))
    assert rows["is_erased"].to_pylist() == [True]
    assert swept(where) == []
    check_erasures(lake, (), audited := Audited())
    assert (audited.counts, audited.erased) == ({}, 1)
    assert erased(where, *ASIDE) == 0
    # Together with packets of the same batch, and after one was erased from it.
    assert erased(where, *GONE) == 2
    check_erasures(ObjectLake.open(where), (), audited := Audited())
    assert (audited.counts, audited.erased) == ({}, 3)


def test_a_row_put_aside_under_another_id_stays_and_is_told_of(in_memory):
    where = next(in_memory)
    begun(where)
    with ObjectLake.replace(where) as lake:
        [(one, text)] = tombstones(*ASIDE).values()
        for other in (
            dataclasses.replace(one, packet_id="0x" + "ab" * 32),
            dataclasses.replace(one, received_at=one.received_at + 1),
        ):
            assert still_there(lake, DAY, {ASIDE[0]: (other, text)}) == ({}, 1)
            assert erase_from_day(lake, DAY, {ASIDE[0]: (other, text)}, inline) == RemovedRows()


def test_a_record_with_more_tombstones_than_rows_were_put_aside_proves_nothing(in_memory, tmp_path):
    where = next(in_memory)
    begun(where)
    assert erased(where, *ASIDE) == 1
    copy_lake(where, tmp_path)
    lake = Lake.open(tmp_path)
    [record] = lake.erasures.records
    [batch] = record.batches
    # The same tombstone again, to give the batch another digest; and one for a packet that stays.
    stay = b"".join(text + b"\n" for _, text in tombstones(sequence(3)).values())
    for text in (lake.erasures.text_of(record), stay):
        forged = lake.erasures.next(DAY, 0, [replace(batch, contents="ab" * 32)], text, emptied=1)
        put_record(lake, forged, text)
        lake.erasures.load()
    liar = lake.erasures.next(DAY, 0, [], stay)  # it claims to remove a packet
    put_record(lake, liar, stay)
    lake.erasures.load()
    check_erasures(lake, (), audited := Audited())
    told = " ".join(str(one.detail) for one in audited.findings)
    assert audited.counts == {"erasure: count": 6, "erasure: row": 1}
    assert told.count("takes 0 packets out of batch") == 3 and "a row that was erased before" in told


def test_tombstones_of_another_log_or_of_rows_never_archived_change_nothing(in_memory):
    where = next(in_memory)
    begun(where)
    with ObjectLake.replace(where) as lake:
        [(one, text)] = tombstones(sequence(3)).values()
        stranger = {sequence(2): (dataclasses.replace(one, sequence=sequence(2)), text)}
        gone = erase_from_day(lake, DAY, stranger, inline)
        assert gone.rows == 0 and "and the lake has 0x" in gone.strangers[0]
        # Removed from the log before it was archived: there is no such row.
        assert erase_from_day(lake, DAY, tombstones(sequence(99)), inline) == RemovedRows()
    assert swept(where) == [] and rows_apart(where) == (SOUND, ASIDE)
    with ObjectLake.replace(where) as lake:
        gone = erase_from_day(lake, DAY, {**stranger, **tombstones(sequence(1))}, inline)
    assert gone.rows == 1 and len(gone.strangers) == 1, "a wrong tombstone does not hold up the others"
    assert rows_apart(where)[0] == SOUND[1:]


@pytest.mark.parametrize(
    ("act", "rival", "after"),
    [
        (compacted, compacted, (SOUND, ASIDE)),
        (compacted, erased_all, (LEFT, sorted(ASIDE + GONE))),
        (erased_all, compacted, (SOUND, ASIDE)),
        (erased_all, erased_all, (LEFT, sorted(ASIDE + GONE))),
    ],
)
def test_of_two_at_one_day_only_one_counts(in_memory, act, rival, after):
    where = next(in_memory)
    begun(where)

    def overtaken(lake, works):
        done = inline(lake, works)
        rival(where)
        return done

    with pytest.raises(LakeBusy, match=r"somebody else has written 2024-10-04 of .* nothing of this attempt"):
        act(where, run=overtaken)
    assert rows_apart(where) == after
    settled(where)
    act(where)
    assert rows_apart(where) == (after if act is compacted else (LEFT, sorted(ASIDE + GONE)))
    assert swept(where) == []


def test_a_server_tells_the_second_of_two_that_put_one_generation(object_server: ObjectServer, place):
    begun(place)
    met: list[str] = []

    def overtake(asked: Asked) -> None:
        if asked.is_conditional and asked.key.endswith("_generations/0000000000.json") and not met:
            met.append(asked.key)
            compacted(place)  # from the first request to the last, while ours waits

    object_server.before = overtake
    with pytest.raises(LakeBusy, match="somebody else has written"):
        erased_all(place)
    assert met and rows_apart(place) == (SOUND, ASIDE)
    assert erased_all(place) == 2 and rows_apart(place) == (LEFT, sorted(ASIDE + GONE))
    assert swept(place) == []


def test_of_two_at_two_days_both_count_whoever_is_first(in_memory):
    where = next(in_memory)
    begun(where)
    put_batch(where, [4], day=DAY + 1)
    put_batch(where, [1], day=DAY + 2)

    def overtaken(lake, works):
        compacted(where, DAY + 1)
        put_batch(where, [2], day=DAY + 2)
        return inline(lake, works)

    assert erased(where, *GONE, run=overtaken) == 2
    more = [sequence(4, DAY + 1), sequence(1, DAY + 2), sequence(2, DAY + 2)]
    assert rows_apart(where) == (LEFT + more, sorted(ASIDE + GONE))
    lake = ObjectLake.open(where)
    assert [one.day for one in lake.generations.records] == [DAY + 1, DAY] and swept(where) == []


def test_what_a_killed_compaction_has_left_goes_with_what_was_erased_and_the_attempt_stays_known(in_memory):
    first, where = next(in_memory), next(in_memory)
    begun(first)
    begin_with(where, first)
    with requests() as sent:
        compacted(where)
    begin_with(where := next(in_memory), first)
    listed = next(n for n, one in enumerate(sent) if one.startswith("put _days"))
    with requests(listed), pytest.raises(Killed):
        compacted(where)
    [left] = rewrites(ObjectLake.open(where).store)
    assert left.written(ObjectLake.open(where).store)
    assert erased_all(where)
    with ObjectLake.replace(where, Grace(timedelta(days=1), timedelta())) as lake:
        assert left.written(lake.store) == [] and rewrites(lake.store) == [left]
    assert swept(where) == []


def test_readers_that_have_begun_read_on_for_the_grace_period(in_memory):
    where = next(in_memory)
    begun(where)
    reader = ObjectLake.open(where)
    old = named(reader)
    compacted(where)
    bring_all(reader)  # its objects are there, unchanged
    with ObjectLake.write(where) as lake:
        assert lake.left.deleted == []
        [committed] = [one.modified_at for one in lake.store.listed("_generations")]
        nearly = sweep_days(lake.store, lake, committed + timedelta(hours=23, minutes=59), DEFAULT_GRACE)
        assert nearly.deleted == []
        done = sweep_days(lake.store, lake, committed + timedelta(days=1), DEFAULT_GRACE)
    assert set(done.deleted) == {name for name in old if "day=2024-10-04" in name}
    with pytest.raises(LakeError, match=r"is missing\. Bring its objects back"):
        bring_all(reader)
    assert rows_apart(where) == (SOUND, ASIDE) and unnamed(where) == []


def test_what_an_erasure_has_replaced_goes_after_an_hour_with_all_that_was_replaced_before(in_memory):
    where = next(in_memory)
    begun(where)
    compacted(where)
    erased(where, *GONE)
    with ObjectLake.write(where) as lake:
        last = max(one.modified_at for one in lake.store.listed("_generations"))
        assert sweep_days(lake.store, lake, last + timedelta(minutes=59), DEFAULT_GRACE).deleted == []
        assert len(sweep_days(lake.store, lake, last + timedelta(hours=1), DEFAULT_GRACE).deleted) == 10
    assert unnamed(where) == [] and rows_apart(where) == (LEFT, sorted(ASIDE + GONE))


def test_nothing_is_deleted_while_what_counts_is_not_all_there(in_memory):
    where = next(in_memory)
    begun(where)
    compacted(where)
    lake = ObjectLake.open(where)
    [lost, *_] = [one.name for part in lake.parts(DAY) for one in part.objects]
    content = lake.store.get(lost)
    lake.store.delete([lost])  # an incomplete copy
    assert len(swept(where)) > 5
    lake.store.put(lost, content)
    [listing] = lake.store.keys("_days")
    content = lake.store.get(listing)
    for harm in (content.replace(b"kind=POST", b"kind=NOTE"), None):
        if harm is None:
            lake.store.delete([listing])
        else:
            lake.store.put(listing, harm)
        with ObjectLake.replace(where, NO_GRACE) as opened:
            assert opened.left.deleted == []
        with pytest.raises(LakeError, match=r"cannot be used: it was changed|of a day cannot be told"):
            rows(where)
        units, [fault] = ObjectLake.open(where).units(DAY)
        assert fault.reason == "listing" and fault.file == lake.store.url(listing) and len(units) == 4
    lake.store.put(listing, content)
    assert swept(where) == [] and rows_apart(where) == (SOUND, ASIDE)


def test_lost_generations_or_manifests_stop_writing(in_memory):
    where = next(in_memory)
    begun(where)
    compacted(where)
    erased(where, *GONE)
    assert swept(where) == []
    store = ObjectLake.open(where).store
    kept = {name: store.get(name) for name in store.keys("_generations")}
    for number, why in enumerate(["generation 0 cannot be used: it is missing", "generations are missing"]):
        store.delete([name := f"_generations/{number:010}.json"])
        with pytest.raises(LakeError, match=why):
            put_batch(where, [9], day=DAY + 1)
        store.put(name, kept[name])
    numbers = [name for name in store.keys("_manifests") if "days" not in name]
    manifests = {name: store.get(name) for name in [*numbers, *store.keys("_objects")]}
    store.delete([name for name in manifests if "0000000004" in name])
    store.delete(store.keys("_manifests/days"))
    with pytest.raises(LakeError, match="its chain ends before that: manifests are missing"):
        put_batch(where, [9], day=DAY + 1)
    for name, content in manifests.items():
        store.put(name, content)
    put_batch(where, [9], day=DAY + 1)
    assert rows_apart(where)[0] == [*LEFT, sequence(9, DAY + 1)]


@pytest.mark.parametrize("left", [0, 1])
def test_an_audit_asks_for_a_tombstone_for_each_row_that_was_taken_out(in_memory, left):
    where = next(in_memory)
    begun(where)
    assert erased_all(where) == 2 and erased(where, sequence(3)) == 1
    lake, audited = ObjectLake.open(where), Audited()
    check_erasures(lake, (), audited)
    assert audited.holds and audited.erased == 3
    # A writer there can bind another file of tombstones, and also the records after it.
    first, second = lake.generations.records
    assert first.erasure is not None and second.erasure is not None
    text = b"".join(lake.erasures.text_of(first.erasure).splitlines(keepends=True)[:left])
    lake.store.put(f"_erased/{first.attempt}.jsonl", text)
    false = seal_erasure(replace(first.erasure, tombstones=blake3(text).hexdigest()))
    after = seal_erasure(replace(second.erasure, previous=false.hash))
    forged = [seal_generation(replace(first, erasure=false))]
    forged.append(seal_generation(replace(second, erasure=after, previous=forged[0].hash)))
    for one in forged:
        lake.store.put(f"_generations/{generation_name(one.number)}", encode_generation(one))
    check_erasures(ObjectLake.open(where), (), audited := Audited())
    assert audited.counts == {"erasure: count": 3 - left}
    told = {one.sequence: one.detail for one in audited.findings}
    assert f"packets out of batch {lake.manifests[3].span} (m" in str(told[sequence(8)])
    check_erasures(ObjectLake.open(where), (), since := Audited(after=sequence(8)))
    assert since.counts == {"erasure: count": 1}


@pytest.mark.parametrize("act", [compacted, erased_all])
def test_what_tasks_still_put_after_another_has_failed_is_nobodys_and_goes(in_memory, act):
    where, asked = next(in_memory), list[PartWork]()
    begun(where)

    def fail(lake: ObjectLake, works: Sequence[PartWork]) -> list[PartDone]:
        asked.extend(works)
        inline(lake, works[:1])
        raise PipelineError("a part is damaged")

    with pytest.raises(PipelineError):
        act(where, run=fail)
    store = ObjectLake.open(where).store
    assert not any(asked[0].attempt in name for name in store.keys("packets"))
    done = rewrite_part(store, asked[-1])  # Spark has been told to end it, which it has not noticed
    assert done.part.objects
    settled(where)
    with ObjectLake.replace(where) as lake:
        assert sorted(lake.left.kept) == sorted(one.name for one in done.part.objects)
    assert swept(where) == [] and rows_apart(where) == (SOUND, ASIDE)


def test_a_day_that_does_not_hold_stays_as_it_is_and_nothing_is_left_behind(in_memory):
    where = next(in_memory)
    begun(where)
    lake = ObjectLake.open(where)
    [one, *_] = lake.parts(DAY)[1].objects
    content = lake.store.get(one.name)
    lake.store.put(one.name, content[:-1] + b"x")
    before = set(lake.store.keys(""))
    for act in (compacted, lambda place_: erased(place_, sequence(5))):
        with pytest.raises(LakeError, match=r"has other bytes than were written; the day stays as it is"):
            act(where)
    assert {name for name in lake.store.keys("") if "_attempts/" not in name} <= before
    with ObjectLake.replace(where, NO_GRACE):
        pass
    assert {name for name in lake.store.keys("") if "probe" not in name} <= before
    lake.store.put(one.name, content)
    assert rows_apart(where) == (SOUND, ASIDE)
