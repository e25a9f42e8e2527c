"""What an audit finds: any change of lake, manifests or log, and nothing in an unchanged lake."""

from __future__ import annotations

import json
import os
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.dataset as pads
import pyarrow.parquet as pq
import pytest
from strata.protocol import packets
from strata.protocol.documents import key_multibase
from strata.protocol.ids import Identity
from strata.protocol.keys import rotate_content
from strata_pipeline.errors import UsageError
from strata_pipeline.jobs.archive import archive
from strata_pipeline.jobs.audit import Audited, Finding, _verify, _whole, audit
from strata_pipeline.lake.lake import Lake
from strata_pipeline.lake_format import LakeError

from tests.support import relay_logs
from tests.support.footers import change, chunk, statistics
from tests.support.lakes import sql

NOON = 20_000 * 86_400 + 43_200


@pytest.fixture(scope="module")
def original(spark, new_log, tmp_path_factory) -> tuple[str, Path]:
    """A log and its lake: eight batches of packets of two kinds."""
    url, folder = new_log(), tmp_path_factory.mktemp("lake")
    relay_logs.append(url, relay_logs.make_many(40))
    archive(spark, url, folder, batch_rows=5)
    return url, folder


@pytest.fixture
def lake(original: tuple[str, Path], tmp_path: Path) -> Path:
    """A copy of the lake, to be damaged."""
    return shutil.copytree(original[1], tmp_path, dirs_exist_ok=True)


@pytest.fixture
def log(new_log: Callable[..., str], original: tuple[str, Path]) -> str:
    """The URL of a copy of the log."""
    return new_log(of=original[0])


def file_of(lake: Path, sequence_index: int = 0) -> tuple[Path, pa.Table]:
    path = sorted(lake.glob("packets/**/*.parquet"))[sequence_index]
    return path, pq.ParquetFile(path).read()


def column(table: pa.Table, name: str, change: Callable[[list], list]) -> pa.Table:
    index = table.schema.get_field_index(name)
    field = table.schema.field(name)
    return table.set_column(index, field, pa.array(change(table[name].to_pylist()), field.type))


def test_a_sound_lake_holds_beside_its_log_and_without_it(spark, log, lake):
    audited = audit(spark, lake, url=log)
    assert audited.holds and audited.findings == [] and audited.compared_up_to == audited.reached
    assert (audited.batches, audited.packets, audited.behind) == (8, 40, 0)
    assert audit(spark, lake).holds
    relay_logs.append(log, relay_logs.make_many(5, first=100))
    later = audit(spark, lake, url=log)
    assert later.holds and later.behind == 5


def flip_signature(table: pa.Table) -> pa.Table:
    def change(bodies: list) -> list:
        at = bodies[0].index(b'"signature":"0x') + 15
        digit = b"1" if bodies[0][at : at + 1] == b"0" else b"0"
        return [bodies[0][:at] + digit + bodies[0][at + 1 :], *bodies[1:]]

    return column(table, "body", change)


TAMPERINGS: dict[str, tuple[Callable[[pa.Table], pa.Table], set[str]]] = {
    "a signature": (flip_signature, {"batch: contents", "packet: invalid_signature", "log: altered"}),
    "a text": (
        lambda t: column(t, "body", lambda b: [b[0].replace(b"lorem", b"lurem"), *b[1:]]),
        {"batch: contents", "packet: packet_id_mismatch", "log: altered"},
    ),
    "a time of arrival": (
        lambda t: column(t, "received_at", lambda v: [v[0] + 1, *v[1:]]),
        {"batch: digest", "log: altered"},
    ),
    "an annotation": (
        lambda t: column(t, "annotation", lambda v: [b"{}", *v[1:]]),
        {"batch: contents", "log: altered"},
    ),
    "a size": (lambda t: column(t, "size", lambda v: [v[0] + 1, *v[1:]]), {"packet: columns_differ"}),
    "a row gone": (lambda t: t.slice(1), {"batch: count", "log: missing"}),
    "a row twice": (
        lambda t: pa.concat_tables([t, t.slice(0, 1)]),
        {"batch: count", "row: doubled", "packet: doubled"},
    ),
    "two rows in each other's place": (
        lambda t: column(t, "sequence", lambda v: [v[1], v[0], *v[2:]]),
        {"batch: digest", "log: altered"},
    ),
}


@pytest.fixture(scope="module")
def tampered(spark, original: tuple[str, Path], tmp_path_factory) -> tuple[Lake, Audited]:
    """A lake with a different change in each batch, and the findings of an audit."""
    lake = Lake.open(shutil.copytree(original[1], tmp_path_factory.mktemp("tampered") / "lake"))
    for manifest, (altered, _) in zip(lake.manifests, TAMPERINGS.values(), strict=True):
        path = min(lake.packets.glob(f"day=*/batch={manifest.span}/kind=*/*.parquet"))
        pq.write_table(altered(pq.ParquetFile(path).read()), path)
    return lake, audit(spark, lake.root, url=original[0])


@pytest.mark.parametrize("what", TAMPERINGS)
def test_every_change_of_the_lake_is_found(tampered, what):
    lake, audited = tampered
    assert not audited.holds and sum(audited.counts.values()) == len(audited.findings)
    assert all(finding.sequence is not None for finding in audited.findings)
    span = lake.manifests[list(TAMPERINGS).index(what)].span
    found = {
        f"{finding.about}: {finding.reason}"
        for finding in audited.findings
        if span.after < finding.sequence <= span.up_to
    }
    assert found == TAMPERINGS[what][1]


def test_changes_of_the_log_are_found(spark, log, lake, monkeypatch):
    table = pads.dataset(lake / "packets").to_table().sort_by("sequence")
    ids_there = table["packet_id"].to_pylist()
    sql(
        log,
        f"DELETE FROM packets WHERE packet_id = '\\x{ids_there[3].hex()}'",
        f"UPDATE packets SET received_at = received_at + 1 WHERE packet_id = '\\x{ids_there[5].hex()}'",
    )
    audited = audit(spark, lake, url=log)
    assert audited.counts == {"log: surplus": 1, "log: altered": 1}
    assert {finding.packet_id for finding in audited.findings} == {f"0x{ids_there[n].hex()}" for n in (3, 5)}
    for module in ("audit", "audit_result"):
        monkeypatch.setattr(f"strata_pipeline.jobs.{module}.LISTED", 1)  # what is not listed is counted
    fewer = audit(spark, lake, url=log)
    assert fewer.counts == audited.counts and fewer.findings == audited.findings[:1]


def test_files_torn_foreign_or_missing_are_found(spark, lake):
    path, _ = file_of(lake)
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    assert "batch: unreadable" in audit(spark, lake).counts
    path.write_bytes(whole)
    (path.parent / "stranger.parquet").write_bytes(whole)
    assert {"batch: count", "packet: doubled"} <= set(audit(spark, lake).counts)
    (path.parent / "stranger.parquet").unlink()
    nameless = Path(os.fsdecode(os.fsencode(path.parent) + b"/\xff.parquet"))
    nameless.write_bytes(whole)
    assert "batch: unreadable" in audit(spark, lake).counts  # Arrow cannot open a name that is not text
    nameless.unlink()
    foreign = lake / "packets" / "day=2024-10-04" / "batch=5-9" / "kind=POST"
    foreign.mkdir(parents=True)
    (foreign / "part.parquet").write_bytes(whole)
    assert "folder: foreign" in audit(spark, lake).counts


def test_a_footer_that_deceives_or_ends_a_process_is_a_finding_with_its_file(spark, lake):
    path, _ = file_of(lake)
    whole = path.read_bytes()
    change(path, lambda footer, _: statistics(footer, "timestamp").update({"5S": bytes(8)}))
    [found] = audit(spark, lake).findings
    assert (found.about, found.reason, found.file) == ("file", "statistics", str(path))
    assert str(found.detail).startswith(f"{path}, row group 0: column timestamp: its bounds")
    path.write_bytes(whole)
    change(path, lambda footer, _: chunk(footer, "size")["3R"].update({"1I": 2}))
    findings = audit(spark, lake).findings
    assert ("unreadable", str(path)) in {(one.reason, one.file) for one in findings}


def test_what_a_plain_reader_would_read_too_much_is_found_without_the_log(spark, lake):
    path, table = file_of(lake)
    other, _ = file_of(lake, -1)
    pq.write_table(pa.concat_tables([table, pq.ParquetFile(other).read().slice(0, 1)]), path)
    reached = Lake.open(lake).reached
    beyond = path.parents[1].with_name(f"batch={reached + 1}-{reached + 9}") / "kind=POST"
    strays = [
        lake / "packets" / "stray.parquet",
        path.parents[2] / "stray.parquet",
        lake / "packets" / "README",
    ]
    for stray in (*strays, beyond / "part.parquet"):
        stray.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(other, stray)
    audited = audit(spark, lake)
    assert {"row: outside": 1, "folder: foreign": 1, "file: stray": 3}.items() <= audited.counts.items()
    [outside] = [finding for finding in audited.findings if finding.reason == "outside"]
    assert (outside.file, outside.row) == (str(path), table.num_rows) and outside.packet_id is not None
    assert {finding.file for finding in audited.findings if finding.about == "file"} == set(map(str, strays))


def test_a_changed_or_missing_manifest_is_an_error(spark, lake):
    first = lake / "_manifests" / "0000000000.json"
    text = first.read_text()
    first.write_text(json.dumps(json.loads(text) | {"packets": 21}))
    with pytest.raises(LakeError, match="hash does not recompute"):
        audit(spark, lake)
    first.unlink()
    with pytest.raises(LakeError, match="manifest 0"):
        audit(spark, lake)
    with pytest.raises(LakeError, match="no lake"):
        audit(spark, lake / "elsewhere")


def test_signatures_count_under_the_keys_of_their_time(spark, log_url, tmp_path):
    old = Identity.from_seed(bytes(31) + b"\x07")
    new = Identity.from_seed(bytes(31) + b"\x08").speaking_for(old.did)
    first, second = f"{old.did}#keys-1", f"{old.did}#keys-2"
    rotation = rotate_content(second, new.public_key, replaces=first, valid_from=NOON + 100)

    def post(who: Identity, at: int) -> packets.Packet:
        return packets.build(who, {"type": "POST", "text": str(at)}, timestamp=at)

    made = [post(old, NOON), packets.build(old, rotation, timestamp=NOON + 100), post(new, NOON + 2000)]
    made.append(post(old, NOON + 5000))  # by the replaced key: no relay would have accepted it
    for packet in made:
        relay_logs.append(log_url, [packet], packet.timestamp)
    archive(spark, log_url, tmp_path)
    audited = audit(spark, tmp_path, url=log_url)
    assert [finding.packet_id for finding in audited.findings] == [made[-1].packet_id]
    assert audited.packets == 4


@pytest.fixture(scope="module")
def federated(spark, new_log, tmp_path_factory) -> tuple[str, Path, list[packets.Packet]]:
    """A log and its lake. A peer brought packets and their keys long after the first relay had received them:
    what was signed with a key before it was replaced arrived here long after that."""
    url, folder = new_log(), tmp_path_factory.mktemp("federated")
    old = Identity.from_seed(bytes(31) + b"\x07")
    new = Identity.from_seed(bytes(31) + b"\x08").speaking_for(old.did)
    first, second = f"{old.did}#keys-1", f"{old.did}#keys-2"
    rotation = rotate_content(second, new.public_key, replaces=first, valid_from=NOON + 100)
    made = [
        packets.build(new, {"type": "POST", "text": "new"}, timestamp=NOON + 2000),
        packets.build(old, rotation, timestamp=NOON + 100),
        packets.build(old, {"type": "POST", "text": "old"}, timestamp=NOON),
    ]
    relay_logs.append(url, relay_logs.make_many(4, at=NOON), NOON)
    archive(spark, url, folder)
    for packet, now in zip(made, (NOON + 9000, NOON + 9000, NOON + 12_000), strict=True):
        relay_logs.append(url, [packet], now, witnessed_at=packet.timestamp + 1)
    relay_logs.append(url, relay_logs.make_many(1, at=NOON + 9000, first=4), NOON + 12_000)
    archive(spark, url, folder, batch_rows=3)
    return url, folder, made


def test_packets_of_peers_count_under_the_keys_of_the_time_at_which_the_first_relay_received_them(
    spark, federated, tmp_path
):
    url, folder, _ = federated
    audited = audit(spark, folder, url=url)
    assert audited.findings == [] and (audited.packets, audited.batches) == (8, 3)
    lake = shutil.copytree(folder, tmp_path / "lake")
    [path] = (lake / "_witnesses").iterdir()
    since = Lake.open(lake).manifests[0].hash
    (lake / "_witnesses" / f"0000000000-{'ab' * 32}.csv").write_bytes(path.read_bytes())
    assert audit(spark, lake).counts == {"witness: surplus": 1}
    assert audit(spark, lake, since=since).holds  # this file is older
    path.write_bytes(path.read_bytes().replace(str(NOON + 2001).encode(), str(NOON + 2000).encode()))
    counts = audit(spark, lake, since=since).counts
    assert counts == {"witness: changed": 1, "packet: unchecked": 1}


def test_an_audit_compares_first_receipts_with_the_log(spark, federated, new_log):
    url, folder, made = federated
    log = new_log(of=url)
    places = [Lake.open(folder).manifests[0].up_to + number for number in (1, 2, 3, 4)]

    def at(place: int, time: int | None) -> str:
        told = "NULL" if time is None else str(time)
        return f"UPDATE packets SET witnessed_at = {told} WHERE sequence = {place}"

    # The relay has learned since that others had two packets still earlier.
    sql(log, at(places[0], NOON + 1990), at(places[3], NOON + 8900))
    assert audit(spark, folder, url=log).findings == []
    sql(log, at(places[0], NOON + 2002), at(places[1], NOON + 100), at(places[2], None))
    audited = audit(spark, folder, url=log)
    assert [(one.about, one.reason, one.sequence) for one in audited.findings] == [
        ("log", "witness", place) for place in places[:3]
    ]
    assert [one.packet_id for one in audited.findings] == [packet.packet_id for packet in made]


def test_keys_of_the_bootstrap_file_count(spark, log_url, tmp_path):
    key = Identity.from_seed(bytes(31) + b"\x09")
    named = key.speaking_for("did:strata:operator")
    relay_logs.append(log_url, [packets.build(named, {"type": "POST"}, timestamp=NOON)], NOON)
    archive(spark, log_url, tmp_path / "lake")
    assert audit(spark, tmp_path / "lake").counts == {"packet: unresolved_key": 1}
    bootstrap = tmp_path / "bootstrap.json"
    bootstrap.write_text(json.dumps({"keys": {named.did: key_multibase(key.public_key)}}))
    assert audit(spark, tmp_path / "lake", bootstrap=bootstrap).holds
    bootstrap.write_text("{")
    with pytest.raises(UsageError, match="bootstrap file"):
        audit(spark, tmp_path / "lake", bootstrap=bootstrap)


def test_a_lake_with_very_many_faults_lists_some_of_each_kind_and_counts_all():
    audited = Audited()
    for reason, times in (("digest", 3), ("count", 1), ("digest", 2)):
        found = [Finding("batch", reason)] * 400
        for _ in range(times):
            audited.found(Counter({f"batch: {reason}": 400}), found)
    assert audited.counts == {"batch: digest": 2000, "batch: count": 400}
    assert Counter(one.reason for one in audited.findings) == {"digest": 1000, "count": 400}


@pytest.mark.parametrize("name", ["author_id", "timestamp", "expires_at"])
def test_a_packet_that_cannot_be_read_is_one_that_was_not_verified(spark, lake, name):
    """Damage in a column that no digest covers: Spark's reader would skip the file silently."""
    path, table = file_of(lake, 2)
    metadata = pq.ParquetFile(path).metadata
    chunk = metadata.row_group(0).column(table.schema.get_field_index(name))
    start = chunk.dictionary_page_offset or chunk.data_page_offset
    content = bytearray(path.read_bytes())
    content[start : start + chunk.total_compressed_size] = bytes(chunk.total_compressed_size)
    path.write_bytes(content)
    opened = Lake.open(lake)
    audited = _whole(opened)
    _verify(spark, opened, opened.days(), None, audited)
    assert audited.counts == {"packet: unchecked": 1}
    assert str(path) in (audited.findings[0].detail or "")
    [found] = audit(spark, lake).findings  # a check of the file comes first, and tells more
    assert (found.reason, found.file) == ("statistics", str(path)) and f"column {name}" in str(found.detail)
