"""The fate of the messages of channels."""

from __future__ import annotations

import datetime
import json

import pyarrow.parquet as pq
import pytest
from strata.channels.encryption import GroupKey, GroupKeyEncryption
from strata.channels.messaging.binding import build_repair
from strata.channels.sds import Participant
from strata_pipeline.cli.reliability import reliability_command
from strata_pipeline.datasets import Packets
from strata_pipeline.errors import LakeError, UsageError
from strata_pipeline.jobs.archive import archive
from strata_pipeline.jobs.reliability import reliability
from strata_pipeline.schemas import schema
from strata_pipeline.transforms.acknowledgements import PacketRow, acknowledge, follow
from strata_pipeline.transforms.channel_reading import message_of, read_channels
from strata_pipeline.transforms.reliability import channel_days, find_gaps, find_silences

from tests.support import relay_logs
from tests.support.lake_rows import DAY, NOON, TOPIC, bare, carry, dataset, ephemeral, row, sds

_TODAY = datetime.date(1970, 1, 1) + datetime.timedelta(DAY)


def _tables(packets: Packets):
    read = read_channels(packets)
    read.frame.cache()
    messages = acknowledge(read)
    messages.frame.cache()
    gaps, silences = find_gaps(read), find_silences(read, messages)
    return channel_days(read, messages, gaps, silences), gaps, silences


def _acks(*rows: PacketRow) -> dict[str, tuple[int | None, list[str]]]:
    messages, everybody = follow(rows)
    assert everybody
    return {message.message_id: (message.acknowledged_at, message.others()) for message in messages}


def test_a_history_acknowledges_what_it_names_and_all_that_this_follows():
    found = _acks(
        PacketRow(1, 100, "alice", "a1", []),
        PacketRow(2, 101, "alice", "a2", ["a1"]),  # her own history acknowledges none of hers
        PacketRow(3, 105, "bob", "b1", ["a2"]),
        PacketRow(4, 106, "carol", None, ["b1"]),  # a sync: names b1, so she has a1 and a2 as well
        PacketRow(5, 109, "alice", "a3", ["b1"]),
    )
    assert found == {
        "a1": (105, ["bob", "carol"]),
        "a2": (105, ["bob", "carol"]),
        "b1": (106, ["carol", "alice"]),
        "a3": (None, []),
    }


def test_a_message_named_before_the_log_had_it_is_acknowledged_as_it_comes():
    found = _acks(
        PacketRow(1, 100, "bob", None, ["a2", "nowhere"]),
        PacketRow(2, 103, "alice", "a1", []),
        PacketRow(3, 107, "alice", "a2", ["a1"]),
        PacketRow(4, 109, "alice", "a2", ["a1"]),  # repeated: still the message of 107
    )
    assert found == {"a1": (107, ["bob"]), "a2": (107, ["bob"])}


def test_histories_that_go_in_circles_end():
    found = _acks(PacketRow(1, 100, "alice", "a1", ["a2"]), PacketRow(2, 101, "alice", "a2", ["a1"]),
                  PacketRow(3, 102, "bob", "b1", ["b1", "a1"]))  # fmt: skip
    assert found == {"a1": (102, ["bob"]), "a2": (102, ["bob"]), "b1": (None, [])}


def test_too_many_to_follow_each_still_tells_what_somebody_acknowledged(monkeypatch):
    monkeypatch.setattr("strata_pipeline.transforms.acknowledgements._MAX_VISITS", 0)
    rows = [PacketRow(0, 100, "alice", "a0", [])]
    rows += [PacketRow(n, 100 + n, f"bob{n}", f"b{n}", [f"b{n - 1}" if n > 1 else "a0"]) for n in range(1, 9)]
    messages, everybody = follow(rows)
    assert not everybody
    assert [message.acknowledged_at for message in messages] == [*range(101, 109), None]


def test_what_packets_say():
    key = GroupKeyEncryption("room", GroupKey(bytes(32)))
    message = carry(sds("alice", "m1", ["m0"]))
    assert message_of(message.canonical, TOPIC) == ("content", True, "room", "alice", "m1", ["m0"])
    repair = build_repair(relay_logs.author(1), message, now=NOON, nonce="r")
    assert message_of(repair.canonical, TOPIC) == ("content", True, "room", "alice", "m1", ["m0"])
    assert message_of(carry(sds("a", "", [], content=None)).canonical, TOPIC)[::4] == ("sync", None)
    assert message_of(carry(ephemeral("a", "e")).canonical, TOPIC)[0] == "ephemeral"
    for payload in (
        key.encrypt(sds("alice", "m1")),
        b"\xff" * 70_000,
        b"",
        sds("alice", ""),
        sds("x" * 300, "m"),
    ):
        assert message_of(carry(payload).canonical, TOPIC) == (None, True, None, None, None, None)
    for content in ({"payload": "no base64!"}, {"payload": 7}, {}, {"original": {"type": "?"}}):
        assert message_of(bare(content).canonical, TOPIC) == (None, False, None, None, None, None)
    assert message_of(b"{", TOPIC)[1] is False


def test_the_figures_of_a_day(spark):
    key = GroupKeyEncryption("room", GroupKey(bytes(32)))
    first = sds("alice", "a1")
    packets = dataset(
        spark,
        [
            (0, carry(first)),
            (2, carry(first)),  # repeated …
            (3, carry(first, who=2)),  # … and repaired by another
            (4, carry(sds("bob", "b1", ["a1", "lost"]), who=1)),
            (10, carry(sds("alice", "a2", ["b1"]))),
            (24, carry(sds("bob", "s1", ["a2"], content=None), who=1)),
            (25, carry(ephemeral("carol", "e1"), who=2)),
            (26, carry(sds("alice", "a3", ["a2", "lost"]))),
            (27, carry(sds("dave", "d1", channel="<script>"), who=3)),  # another channel of the topic
            (28, carry(b"\0garbage")),
            (29, bare({"payload": "?"})),
            (30, carry(key.encrypt(first), topic="/chat/1/sealed/proto")),
            (31, carry(key.encrypt(first), topic="/chat/1/sealed/proto", who=1)),
            (32, relay_logs.make(1, type="POST")),  # of no channel
        ],
    )
    days, gaps, silences = _tables(packets)
    found = {(r.content_topic, r.channel_id): r.asDict() for r in days.frame.collect()}
    assert set(found) == {(TOPIC, "room"), (TOPIC, "<script>"), (TOPIC, None), ("/chat/1/sealed/proto", None)}
    room = found[TOPIC, "room"]
    assert room.pop("bytes") > 8 * 300
    assert room == {
        "day": _TODAY, "content_topic": TOPIC, "channel_id": "room", "readable": True, "packets": 8,
        "authors": 3, "first_at": NOON, "last_at": NOON + 26, "unreadable": 0, "malformed": 0, "messages": 4,
        "retransmissions": 2, "syncs": 1, "ephemerals": 1, "participants": 3,
        # a1 after 4 s, b1 after 6, a2 after 14, a3 never
        "ack_delay_p50": 6.0, "ack_delay_p95": pytest.approx(13.2), "unacknowledged": 0.25, "gaps": 1,
        "silences": 2,
    }  # fmt: skip
    alone = found[TOPIC, "<script>"]
    assert (alone["messages"], alone["unacknowledged"], alone["ack_delay_p50"], alone["silences"]) == (
        1,
        1.0,
        None,
        0,
    )
    unreadable = found[TOPIC, None]
    assert (unreadable["readable"], unreadable["unreadable"], unreadable["malformed"]) == (False, 2, 1)
    assert {unreadable[name] for name in ("messages", "retransmissions", "syncs", "gaps", "silences")} == {
        None
    }
    sealed = found["/chat/1/sealed/proto", None]
    assert (sealed["readable"], sealed["packets"], sealed["authors"], sealed["malformed"]) == (False, 2, 2, 0)
    assert sealed["bytes"] > 600
    assert [tuple(r) for r in gaps.frame.collect()] == [(_TODAY, TOPIC, "room", "lost", NOON + 4, 2)]
    # Carol was there after the messages of both, and acknowledged none.
    assert {tuple(r)[3:] for r in silences.frame.collect()} == {("alice", "carol", 3), ("bob", "carol", 1)}


def test_days_are_those_of_the_log_whatever_clocks_say(spark):
    message = sds("alice", "a1")
    year = 365 * 86_400
    received = [
        (NOON, carry(message, at=1)),  # an author's clock at 1970
        (NOON + year, carry(message, at=2**53 - 1)),  # the relay's clock jumps by a year; repeated then
        (NOON + year, carry(sds("bob", "b1", ["a1"]), who=1)),
    ]
    rows = [row(packet, place, at) for place, (at, packet) in enumerate(received, 1)]
    days, _, _ = _tables(Packets(spark.createDataFrame(rows, schema("packets"))))
    found = [
        (r.day, r.messages, r.retransmissions, r.ack_delay_p50) for r in days.frame.orderBy("day").collect()
    ]
    assert found == [(_TODAY, 1, 0, float(year)), (_TODAY + datetime.timedelta(365), 1, 1, None)]


def test_silences_are_not_listed_where_pairs_are_too_many(spark):
    crowd = [(n, carry(sds(f"p{n}", f"m{n}"))) for n in range(65)]
    days, _, silences = _tables(dataset(spark, crowd))
    found = days.frame.collect()
    assert [(r.participants, r.messages, r.silences) for r in found] == [(65, 65, None)]
    assert silences.frame.count() == 0


def _conversation(at: int) -> list:
    """Two participants of the client's own code; every third message of Alice is lost to Bob."""
    alice, bob = (
        Participant("room", name, now_ms=at * 1000, random=lambda: 0.5) for name in ("alice", "bob")
    )
    made = []
    for number in range(6):
        message = alice.wrap(b"a%d" % number, at * 1000 + number, number)
        alice.dispatched(message.message_id, at * 1000 + number)
        if number == 2:
            continue  # published nowhere
        made.append(carry(message.encode(), at=at))
        bob.receive(message.encode(), at * 1000 + number)
    answer = bob.wrap(b"b", at * 1000 + 9, 9)
    return [*made, carry(answer.encode(), who=1, at=at)]


def test_the_job_from_log_to_report(spark, log_url, tmp_path, capsys, queries):
    lake = tmp_path / "lake"
    made = _conversation(NOON)
    relay_logs.append(log_url, [*made[:-1], *relay_logs.make_many(3, at=NOON)], NOON)
    relay_logs.append(log_url, made[-1:], NOON + 86_400)  # Bob answers a day later
    archive(spark, log_url, lake)
    steps: list[str] = []
    queries.clear()
    figures = reliability(spark, lake, output=tmp_path / "out", progress=steps.append)
    assert queries == ["collect"] * 5, "the totals, and one for each list"
    totals = figures.totals
    assert (totals["channels"], totals["messages"], totals["retransmissions"]) == (1, 6, 0)
    assert (totals["gaps"], totals["silences"]) == (1, len(figures.silences))
    assert [(r["messages"], r["packets"]) for r in figures.channel_days] == [(1, 1), (5, 5)]
    # Bob's answer follows the first two of Alice's five; the others wait for the lost one.
    assert figures.channel_days[1]["unacknowledged"] == pytest.approx(0.6)
    assert figures.channel_days[1]["ack_delay_p50"] == 86_400
    assert steps
    assert pq.read_table(tmp_path / "out" / "channel_days").num_rows == 2
    page = (tmp_path / "out" / "reliability.html").read_text()
    assert figures.note.tip in page and "2026" in page and TOPIC in page
    # The last day alone: the messages that Bob's follows are looked up in the days before.
    reliability_command(str(lake), days=1, json=True)
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["event"] for line in lines] == ["channel_day", "done"]
    assert (lines[1]["messages"], lines[1]["gaps"], lines[1]["tip"]) == (1, 0, figures.note.tip)
    with pytest.raises(UsageError, match="lies in the lake"):
        reliability(spark, lake, output=lake / "reports")


def test_there_must_be_packets(spark, tmp_path):
    with pytest.raises(LakeError, match="there is no lake"):
        reliability(spark, tmp_path)
    (tmp_path / "_manifests").mkdir()
    with pytest.raises(UsageError, match="begin with strata-pipeline archive"):
        reliability(spark, tmp_path)
