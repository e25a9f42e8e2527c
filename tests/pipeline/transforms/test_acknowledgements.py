"""The same answers from thousands of rows in any order, and a channel of many messages in little memory."""

from __future__ import annotations

import os
import random
import tracemalloc

import pyarrow as pa
import pytest
from strata_pipeline.transforms.acknowledgements import PacketRow, follow, follow_rows

from tests.support.acknowledged import acknowledged

MESSAGES = int(os.environ.get("STRATA_HOT_CHANNEL", "20000"))


def batches(rows: list[PacketRow], size: int) -> list[pa.RecordBatch]:
    """Rows as Spark passes them to a task, with numbers as ids."""
    table = pa.table(
        {
            "content_topic": ["/chat/1/room/proto"] * len(rows),
            "channel_id": ["room"] * len(rows),
            "sequence": pa.array([row.sequence for row in rows], pa.int64()),
            "received_at": pa.array([row.received_at for row in rows], pa.int64()),
            "sender_id": [row.sender_id for row in rows],
            "content": pa.array(
                [hash(row.content_id) if row.content_id else None for row in rows], pa.int64()
            ),
            "history": pa.array([[hash(name) for name in row.history] for row in rows], pa.list_(pa.int64())),
        }
    )
    found: list[pa.RecordBatch] = table.to_batches(size)
    return found


def test_rows_in_any_order_are_followed_in_the_order_of_the_log():
    chance = random.Random(7)
    rows = [
        PacketRow(
            n,
            1_000 + n,
            f"did:{chance.randrange(70)}",
            None if n % 11 == 0 else f"m{n if n % 13 else n // 2}",
            [f"m{chance.randrange(max(1, n - 30), n + 4)}" for _ in range(chance.randrange(3))],
        )
        for n in range(1, 600)
    ]
    messages, everybody = follow(rows)
    expected = [(message.acknowledged_at, message.others()) for message in messages]
    assert everybody and sum(at is not None for at, _ in expected) > 250
    chance.shuffle(rows)
    found = [row for batch in follow_rows(iter(batches(rows, 37))) for row in batch.to_pylist()]
    assert [(row["acknowledged_at"], row["acknowledged_by"]) for row in found] == expected
    assert [row["first_sequence"] for row in found] == sorted(row["first_sequence"] for row in found)
    assert list(follow_rows(iter([]))) == [] and follow([]) == ([], True)


def test_a_hot_channel_costs_some_bytes_a_message():
    """With STRATA_HOT_CHANNEL=10000000 in the environment, for ten million messages."""

    def some():
        for first in range(0, MESSAGES, 5_000):
            numbers = range(first, min(first + 5_000, MESSAGES))
            named = [[max(0, n - 1), max(0, n - 7)] for n in numbers]
            yield pa.RecordBatch.from_pydict(
                {
                    "sequence": pa.array(numbers, pa.int64()),
                    "received_at": pa.array(numbers, pa.int64()),
                    "sender_id": [f"did:key:{n % 500}" for n in numbers],
                    "content": pa.array(numbers, pa.int64()),
                    "history": pa.array(named, pa.list_(pa.int64())),
                }
            )

    tracemalloc.start()
    try:
        found = sum(batch.num_rows for batch in follow_rows(some()))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert found == MESSAGES
    assert peak < 2**31 / 10_000_000 * MESSAGES + 16 * 2**20


@pytest.mark.parametrize("seed", range(40))
def test_acknowledgements_are_those_that_asking_after_every_packet_finds(seed):
    chosen = random.Random(seed)
    names = [f"m{number}" for number in range(chosen.randint(1, 12))]
    senders = [f"p{number}" for number in range(chosen.randint(1, 5))]
    at, rows = 10_000, []
    for sequence in range(chosen.randint(1, 40)):
        at += chosen.choice((0, 1, 5, -20))  # the relay's clock may be set back
        content = chosen.choice([None, *names])
        history = chosen.choices(names, k=chosen.randint(0, 3))
        rows.append(PacketRow(sequence, at, chosen.choice(senders), content, history))
    messages, everybody = follow(rows)
    assert everybody
    assert {each.message_id: (each.acknowledged_at, set(each.others())) for each in messages} == {
        name: (told.at, told.by) for name, told in acknowledged(rows).items()
    }
