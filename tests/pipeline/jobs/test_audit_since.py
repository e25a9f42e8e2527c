"""An audit of what the chain gained since an earlier one."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from strata.protocol import packets
from strata.protocol.ids import Identity
from strata.protocol.keys import rotate_content
from strata.protocol.sequences import DAY_SECONDS, first_of_day
from strata_pipeline.cli.app import app
from strata_pipeline.errors import UsageError
from strata_pipeline.jobs import audit as auditing
from strata_pipeline.jobs.archive import archive
from strata_pipeline.jobs.audit import audit
from strata_pipeline.lake.lake import Lake
from strata_pipeline.lake.places import AnyLake
from strata_pipeline.lake.witnesses import ReceivedAt
from strata_pipeline.lake_format import GENESIS, LakeError
from typer.testing import CliRunner

from tests.pipeline.jobs.test_audit import NOON, column, flip_signature
from tests.support import relay_logs
from tests.support.toy_lakes import write_batch


def test_a_tip_is_named_by_hash_or_number_or_refused(tmp_path):
    for first in (1, 3, 5):
        write_batch(tmp_path, [first, first + 1])
    lake = Lake.open(tmp_path)
    hashes = [manifest.hash for manifest in lake.manifests]
    assert [one.number for one in lake.chain.after(hashes[0])] == [1, 2]
    assert [one.number for one in lake.chain.after("1")] == [2]
    assert lake.chain.after(hashes[2]) == [] and lake.chain.after(GENESIS) == lake.manifests
    for unknown in ("3", "9999999999", "ab" * 32):
        with pytest.raises(
            LakeError, match=r"not in the chain, which ends with manifest 2: .*without --since"
        ):
            lake.chain.after(unknown)
    for wrong in ("", "-1", "0xab", "latest", "AB" * 32):
        with pytest.raises(UsageError, match="is not a tip"):
            lake.chain.after(wrong)


def test_an_audit_goes_on_from_the_tip_of_the_one_before(spark, log_url, tmp_path, monkeypatch):
    lake = tmp_path / "lake"
    old = Identity.from_seed(bytes(31) + b"\x07")
    new = Identity.from_seed(bytes(31) + b"\x08").speaking_for(old.did)
    rotation = rotate_content(
        f"{old.did}#keys-2", new.public_key, replaces=f"{old.did}#keys-1", valid_from=NOON
    )
    silent = Identity.from_seed(bytes(31) + b"\x09")
    other = rotate_content(
        f"{silent.did}#keys-2", new.public_key, replaces=f"{silent.did}#keys-1", valid_from=NOON
    )
    told_of_keys = [
        packets.build(who, what, timestamp=NOON) for who, what in ((old, rotation), (silent, other))
    ]
    relay_logs.append(log_url, told_of_keys, NOON)
    relay_logs.append(log_url, relay_logs.make_many(10, at=NOON), NOON)
    archive(spark, log_url, lake)
    first = audit(spark, lake, url=log_url)
    assert first.holds and first.after == 0
    nothing = audit(spark, lake, url=log_url, since=first.tip)
    assert nothing.holds and (nothing.batches, nothing.packets, nothing.tip) == (0, 0, first.tip)

    # One of them is signed by a key that an older packet introduces.
    post = packets.build(new, {"type": "POST", "text": "later"}, timestamp=NOON + 2000)
    relay_logs.append(log_url, [*relay_logs.make_many(5, first=100, at=NOON), post], NOON + 2000)
    archive(spark, log_url, lake)
    asked: list[int] = []

    def received_first(lake: AnyLake) -> ReceivedAt:
        def received(sequences: pa.Array, received_at: pa.Array) -> pa.Array:
            asked.extend(sequences.to_pylist())
            return received_at

        return received

    monkeypatch.setattr(auditing, "_received_first", received_first)
    told = CliRunner().invoke(
        app, ["audit", "--lake", str(lake), "--since", first.tip, "--database-url", log_url, "--json"]
    )
    second = json.loads(told.stdout)
    assert told.exit_code == 0 and second["holds"] and second["after"] == first.reached
    assert (second["batches"], second["packets"], second["compared_up_to"]) == (1, 6, second["reached"])
    assert second["tip"] == Lake.open(lake).tip != first.tip
    assert asked == [first_of_day(NOON // DAY_SECONDS) + 1], "only keys of those who have sent something new"
    monkeypatch.undo()

    # Older batches are not read again: only a whole audit does that. New ones are checked in every way.
    before, after = (sorted(path.rglob("kind=POST/*.parquet")) for path in _batches(lake))
    _rewrite(before[0], flip_signature)
    assert audit(spark, lake, url=log_url, since=first.tip).holds
    _rewrite(after[0], lambda table: column(table, "annotation", lambda notes: [b"{}", *notes[1:]]))
    _rewrite(after[0], flip_signature)
    found = audit(spark, lake, url=log_url, since=first.tip)
    assert set(found.counts) == {"batch: contents", "packet: invalid_signature", "log: altered"}
    assert min(finding.sequence or 0 for finding in found.findings) > first.reached
    refused = CliRunner().invoke(app, ["audit", "--lake", str(lake), "--since", "7"])
    assert refused.exit_code == 1 and "is not in the chain" in refused.stderr


def _batches(lake: Path) -> list[Path]:
    return sorted(lake.glob("packets/day=*/batch=*"), key=lambda path: int(path.name.rpartition("-")[2]))


def _rewrite(path: Path, change) -> None:
    pq.write_table(change(pq.ParquetFile(path).read()), path)
