"""The figures of channels and of traffic a second time, in plain Python by their definitions.

The log is a random one of several days, with a clock that is set back and texts that are nearly alike.
Nothing is taken from the pipeline except how a text becomes numbers. STRATA_FIGURES_SEED makes another
log.
"""

from __future__ import annotations

import os
import random
import statistics
from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import pytest
from pyspark.sql import DataFrame, SparkSession
from strata_pipeline.datasets import Packets
from strata_pipeline.schemas import schema
from strata_pipeline.transforms.abuse import judge
from strata_pipeline.transforms.acknowledgements import PacketRow, acknowledge
from strata_pipeline.transforms.bursts import find_bursts
from strata_pipeline.transforms.channel_reading import read_channels
from strata_pipeline.transforms.near_duplicates import (
    find_clusters,
    find_meetings,
    find_near_duplicates,
    normalised,
    read_texts,
    signatures_of,
)
from strata_pipeline.transforms.reliability import channel_days, find_gaps, find_silences
from strata_pipeline.transforms.thresholds import Thresholds
from strata_pipeline.transforms.traffic import count_author_hours, count_hours, seconds_of, whole_seconds

from tests.support import relay_logs
from tests.support.acknowledged import Acknowledged, acknowledged
from tests.support.lake_rows import DAY, TOPIC, carry, ephemeral, row, sds

SEED = int(os.environ.get("STRATA_FIGURES_SEED", "1"))
HOUR = 3_600
LIMITS = Thresholds(burst_hours=2, limit_copies=3, block_copies=6, copies_share=0.5)


class Said(NamedTuple):
    """One packet, with the facts that the maker of the log knows about it."""

    sequence: int
    received_at: int
    author: str
    type: str
    size: int
    kind: str
    text: str | None = None
    channel: str | None = None
    sender: str | None = None
    message: str | None = None
    what: str | None = None
    history: tuple[str, ...] = ()

    @property
    def day(self) -> int:
        return self.sequence >> 32

    @property
    def hour(self) -> int:
        return self.received_at - self.received_at % HOUR


def make_log(chosen: random.Random, count: int) -> tuple[list[Said], list[tuple[Any, ...]]]:
    """Packets as made, and the rows of a lake that has them."""
    said: list[Said] = []
    rows: list[tuple[Any, ...]] = []
    words = [f"word{number}{'x' * (number % 7)}" for number in range(40)]
    prose = [" ".join(chosen.choices(words, k=chosen.randint(8, 30))) for _ in range(6)]
    sent: dict[str, tuple[str, tuple[str, ...], bytes]] = {}
    at = DAY * 86_400 + 20 * HOUR
    for number in range(1, count + 1):
        at += chosen.choice((0, 0, 0, 1, 7, 400, 4_000, -300, -9_000))
        who = min(int(chosen.expovariate(0.7)), 7)
        members: dict[str, Any] = {}
        if chosen.random() < 0.45:
            room, sender = chosen.choice(("room", "hall")), f"p{chosen.randrange(12)}"
            names = tuple(chosen.choices([f"m{n}" for n in range(14)], k=chosen.randint(0, 2)))
            what = chosen.choice(("content", "content", "sync", "ephemeral", "unreadable"))
            message = f"m{chosen.randrange(12)}"
            if what == "content":
                # A repeated id is sent unchanged.
                sender, names, payload = sent.setdefault(
                    f"{room} {message}", (sender, names, sds(sender, message, names, channel=room))
                )
            elif what == "sync":
                message, payload = f"s{number}", sds(sender, f"s{number}", names, channel=room, content=None)
            elif what == "ephemeral":
                room, names, message = "room", (), f"e{number}"
                payload = ephemeral(sender, message)
            else:
                payload = b"\0" * chosen.randint(1, 40)
            packet = carry(payload, who=who, at=at)
            if what != "unreadable":
                members = {"channel": room, "sender": sender, "message": message, "what": what}
                members["history"] = names
            kind = "channel"
        else:
            kind = chosen.choice(("POST", "NOTE", "other"))
            text = chosen.choice(("gm", chosen.choice(prose), chosen.choice(prose)))
            for _ in range(chosen.randrange(4)):
                text = text.replace(chosen.choice(words), chosen.choice(words)).title()
            packet = relay_logs.make(
                number, who=who, type="MINE" if kind == "other" else kind, at=at, text=text
            )
            members["text"] = text
        made = row(packet, number, at)
        rows.append(made)
        said.append(Said(made[0], at, packet.author_id, packet.content_type, made[7], kind, **members))
    # The log is ordered by days, whatever the clock says within one.
    return sorted(said), rows


@pytest.fixture(scope="module")
def log(spark: SparkSession) -> tuple[list[Said], Packets]:
    said, rows = make_log(random.Random(SEED), 500)
    frame = spark.createDataFrame(rows, schema("packets")).repartition(3).cache()
    return said, Packets(frame)


def collected(frame: DataFrame, *columns: str) -> set[tuple[Any, ...]]:
    return {tuple(found) for found in frame.select(*columns).collect()}


# The fate of messages.


def channels_of(said: Sequence[Said]) -> dict[str, list[Said]]:
    found: dict[str, list[Said]] = defaultdict(list)
    for one in said:
        if one.channel is not None:
            found[one.channel].append(one)
    return found


def acknowledgements(channel: Sequence[Said]) -> dict[str, Acknowledged]:
    return acknowledged(
        [
            PacketRow(
                one.sequence, one.received_at, str(one.sender),
                one.message if one.what == "content" else None, one.history,
            )
            for one in channel
        ]
    )  # fmt: skip


def percentile(values: Sequence[int], share: float) -> float | None:
    return float(np.percentile(values, share)) if values else None


def days_of_channel(said: Sequence[Said], name: str) -> dict[int, dict[str, Any]]:
    """The figures of `channel_days` by day."""
    channel = channels_of(said)[name]
    messages = acknowledgements(channel)
    carried = {one.message for one in channel if one.what in ("content", "ephemeral")}
    first_named: dict[str, Said] = {}
    for one in channel:
        for each in one.history:
            first_named.setdefault(each, one)
    missing = {each: one for each, one in first_named.items() if each not in carried}
    found: dict[int, dict[str, Any]] = {}
    for day in {one.day for one in channel}:
        there = [one for one in channel if one.day == day]
        new = {each: told for each, told in messages.items() if told.first.sequence >> 32 == day}
        contents = [one for one in there if one.what == "content"]
        delays = [told.at - told.first.received_at for told in new.values() if told.at is not None]
        found[day] = {
            "packets": len(there),
            "bytes": sum(one.size for one in there),
            "authors": len({one.author for one in there}),
            "participants": len({one.sender for one in there}),
            "first_at": min(one.received_at for one in there),
            "last_at": max(one.received_at for one in there),
            "messages": len(new),
            "retransmissions": len(contents) - len(new),
            "syncs": sum(one.what == "sync" for one in there),
            "ephemerals": sum(one.what == "ephemeral" for one in there),
            "ack_delay_p50": percentile(delays, 50),
            "ack_delay_p95": percentile(delays, 95),
            "unacknowledged": 1 - len(delays) / len(new) if new else None,
            "gaps": sum(one.day == day for one in missing.values()),
            "silences": len(silences_of(there, new)),
        }
    return found


def silences_of(there: Sequence[Said], new: dict[str, Acknowledged]) -> set[tuple[str, str, int]]:
    """(sender, participant who was there afterwards and acknowledged none of it, number of messages)."""
    last = {str(one.sender): one.sequence for one in there}
    found = set()
    for sender in {told.first.sender_id for told in new.values()}:
        mine = [told for told in new.values() if told.first.sender_id == sender]
        heard = set().union(*(told.by for told in mine))
        begun = min(told.first.sequence for told in mine)
        found |= {
            (sender, who, len(mine))
            for who, sequence in last.items()
            if who != sender and sequence > begun and who not in heard
        }
    return found


def test_what_became_of_messages(log):
    said, whole = log
    read = read_channels(whole)
    read.frame.cache()
    messages = acknowledge(read)
    messages.frame.cache()
    gaps, silences = find_gaps(read), find_silences(read, messages)
    rows = channel_days(read, messages, gaps, silences).frame.collect()
    days = {(told.channel_id, told.day.toordinal() - 719_163): told.asDict() for told in rows}
    expected = {
        (name, day): told for name in ("room", "hall") for day, told in days_of_channel(said, name).items()
    }
    assert {key for key in days if key[0]} == set(expected) and len(expected) >= 6
    for key, told in expected.items():
        assert {name: days[key][name] for name in told} == pytest.approx(told), key
        assert (days[key]["content_topic"], days[key]["unreadable"]) == (TOPIC, 0)
    lost = Counter(one.day for one in said if one.kind == "channel" and one.channel is None)
    assert {day: told["unreadable"] for (name, day), told in days.items() if name is None} == lost


# Traffic.


def near_duplicates(said: Sequence[Said]) -> dict[int, int]:
    """Each text that is nearly an earlier one: eight buckets of four values, and the first text of each."""
    firsts: dict[tuple[Any, ...], tuple[int, list[int]]] = {}
    found: dict[int, int] = {}
    for one in said:
        if one.text is None or len(data := normalised(one.text)) < 32:
            continue
        values = signatures_of([data])[0].tolist()
        buckets = [(part, *values[4 * part : 4 * part + 4]) for part in range(8)]
        met = [firsts.setdefault(bucket, (one.sequence, values)) for bucket in buckets]
        alike = [
            sequence
            for sequence, others in met
            if sequence < one.sequence and sum(a == b for a, b in zip(values, others, strict=True)) >= 24
        ]
        if alike:
            found[one.sequence] = min(alike)
    return found


def fullest(packets_of_hour: Sequence[Said]) -> int:
    return max(Counter(one.received_at for one in packets_of_hour).values())


def test_traffic(spark, log):
    said, whole = log
    texts = read_texts(whole)
    texts.frame.cache()
    again = find_near_duplicates(texts, find_meetings(texts))
    again.frame.cache()
    copies = near_duplicates(said)
    assert collected(again.frame, "sequence", "first_sequence") == set(copies.items()) and len(copies) > 30
    by_place = {one.sequence: one for one in said}
    clusters = {
        (first, len(there), len({by_place[each].author for each in there}))
        for first in set(copies.values())
        if (there := [each for each, its in copies.items() if its == first])
    }
    clustered = find_clusters(texts, again).frame.join(
        texts.frame.select("sequence", "author_id", "sample").withColumnRenamed(
            "author_id", "first_author_id"
        ),
        on=["first_author_id", "sample"],
    )
    assert {(r.copies, r.authors) for r in clustered.collect()} == {told[1:] for told in clusters}

    seconds = whole_seconds(seconds_of(whole))
    by_type: dict[tuple[str, str, int], list[Said]] = defaultdict(list)
    by_author: dict[tuple[str, int], list[Said]] = defaultdict(list)
    for one in said:
        by_type[one.author, one.type, one.hour].append(one)
        by_author[one.author, one.hour].append(one)
    hours = count_hours(seconds, again).frame
    columns = ("author_id", "content_type", "hour_at", "packets", "size", "peak_packets", "near_duplicates")
    assert collected(hours, *columns) == {
        (
            *key,
            len(there),
            sum(one.size for one in there),
            fullest(there),
            sum(one.sequence in copies for one in there),
        )
        for key, there in by_type.items()
    }
    author_hours = count_author_hours(seconds, texts, again)
    compared = {one.sequence for one in said if one.text is not None and len(normalised(one.text)) >= 32}
    expected = {
        (*key, len(there), fullest(there), sum(one.sequence in compared for one in there),
         sum(one.sequence in copies for one in there))
        for key, there in by_author.items()
    }  # fmt: skip
    named = ("author_id", "hour_at", "packets", "peak_packets", "texts", "near_duplicates")
    assert collected(author_hours.frame, *named) == expected

    bursts = find_bursts(author_hours, floor=1, ceiling=4)
    habits = bursts_of(expected, floor=1, ceiling=4)
    judged = ("author_id", "hour_at", "packets", "peak_packets", "threshold")
    assert collected(bursts.frame, *judged) == habits and habits
    for now in (max(one.received_at for one in said), min(one.received_at for one in said) + 30 * HOUR):
        found = judge(author_hours, bursts, LIMITS, now).frame
        verdicts = verdicts_of(expected, habits, now)
        assert collected(found, "author_id", "verdict", "expires_at") == verdicts and verdicts


def bursts_of(hours: set[tuple[Any, ...]], floor: int, ceiling: int) -> set[tuple[Any, ...]]:
    peaks: dict[str, list[int]] = defaultdict(list)
    for author, _, _, peak, _, _ in hours:
        peaks[author].append(peak)
    found = set()
    for author, hour, count, peak, _, _ in hours:
        habit = statistics.median(peaks[author])
        stray = statistics.median(abs(each - habit) for each in peaks[author])
        above = habit + 6 * max(1.4826 * stray, habit / 4)
        threshold = float(floor) if len(peaks[author]) < 6 else min(max(above, floor), ceiling)
        if peak > threshold:
            found.add((author, hour, count, peak, float(threshold)))
    return found


def verdicts_of(
    hours: set[tuple[Any, ...]], bursts: set[tuple[Any, ...]], now: int
) -> set[tuple[str, str, int]]:
    """The hardest verdict that holds (blocks before copies before bursts), each from the last hour of it."""
    causes: dict[str, dict[int, int]] = defaultdict(dict)
    for author in {each[0] for each in bursts}:
        mine = [hour for who, hour, *_ in bursts if who == author]
        if len(mine) >= LIMITS.burst_hours:
            causes[author][1] = max(mine)
    for author, hour, _, _, texts, copies in hours:
        if copies >= LIMITS.limit_copies and copies >= LIMITS.copies_share * texts:
            weight = 3 if copies >= LIMITS.block_copies else 2
            causes[author][weight] = max(hour, causes[author].get(weight, hour))
    found = set()
    for author, by_weight in causes.items():
        ends = {weight: min(hour + HOUR, now) + LIMITS.hours * HOUR for weight, hour in by_weight.items()}
        holding = {weight: end for weight, end in ends.items() if end > now}
        if holding:
            hardest = max(holding)
            found.add((author, "block" if hardest == 3 else "limit", holding[hardest]))
    return found
