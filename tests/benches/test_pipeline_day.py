"""The pipeline's synthetic day: its packets, the disk that it asks for, and how a job's memory is seen."""

from __future__ import annotations

import random
import shutil
import sys
from collections import Counter
from types import SimpleNamespace

import pytest
from strata.protocol.packets import Packet

from benches import pipeline, pipeline_log
from benches.job_memory import run
from benches.pipeline_day import BYTES_A_ROW, check_space
from benches.pipeline_log import Made

DAY = 20_000 * 86_400


def test_the_packets_of_a_day_are_signed_and_come_all_day_from_a_few_authors_most():
    made = Made(400, True, DAY, 86_399, first=1000, authors=50, varied=True)
    rows = pipeline_log.made_rows(range(400), made=made)
    assert rows[0][0] == DAY and max(row[0] for row in rows) // 86_400 == 20_000
    assert [row[0] for row in rows] == sorted(row[0] for row in rows) and rows[200][0] > DAY + 40_000
    packets = [Packet.parse(row[5]) for row in rows]
    for row, packet in zip(rows, packets, strict=True):
        packet.verify()
        told = (packet.timestamp, packet.digest, packet.author_id.encode(), packet.content_type.encode())
        assert told == row[1:5]
    assert len({packet.digest for packet in packets}) == 400
    [(_, most), *_] = Counter(packet.author_id for packet in packets).most_common()
    assert 400 / 50 * 3 < most < 400
    texts = Counter(pipeline_log._text(random.Random(number)) for number in range(4000))
    assert 1 < max(texts.values()) < 20 and len(texts) > 3850
    # Made by several processes: a chunk is what it is, whoever makes it.
    assert pipeline_log.made_rows(range(100, 110), made=made) == rows[100:110]


def test_a_day_that_the_disk_cannot_hold_is_refused_before_it_begins(tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=2 * 10**9))
    check_space(tmp_path, 1000)
    said = (
        rf"100,000,000 rows takes about 201.2 GB of disk, {BYTES_A_ROW:,} bytes.* has 2.0 GB free: .*--folder"
    )
    with pytest.raises(SystemExit, match=said):
        pipeline.main(["day", "--rows", "100000000", "--folder", str(tmp_path)])
    assert not list(tmp_path.iterdir())


def test_a_command_is_watched_with_its_children():
    child = "import time; held = bytearray(64 * 2**20); time.sleep(1.5)"
    parent = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}]); print('done')"
    ran = run([sys.executable, "-c", parent])
    assert ran.told == "done\n" and ran.seconds > 1
    assert 64 < ran.python_mb == ran.peak_mb < 640 and ran.java_mb == 0
    with pytest.raises(SystemExit, match="failed; see above"):
        run([sys.executable, "-c", "raise SystemExit(3)"])
