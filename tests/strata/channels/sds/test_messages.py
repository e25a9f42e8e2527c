"""The wire form of SDS, against the vectors of the document and of the JavaScript package."""

from __future__ import annotations

import base64
import json
import zlib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from strata.channels.sds import HistoryEntry, Kind, SdsMessage
from strata.channels.sds.messages import message_id

ROOT = Path(__file__).parents[4]
VECTORS = json.loads((ROOT / "docs/requirements/vectors/sds_js.json").read_text())
SEGMENT = bytes.fromhex(
    "0a208b21b2b925bbac93c5c8e100229d278e1042c002b56d23934ee712f4427be8c41801220b68656c6c6f2072656c6179"
)
W3_ID = "5e44db411d8182597dfe499092c836ecb77603aead6fc6ed34ec4f2d082d085b"
W3_HEAD = "0a05616c6963651240" + W3_ID.encode().hex() + "1a06726f6f6d2d31"
W3_TAIL = "a20131" + SEGMENT.hex()
W3 = (
    W3_HEAD + "508080b3c19c335a640a40" + "30" * 64 + "1220" + bytes(range(32)).hex() + W3_TAIL
)  # fields 1, 2, 3; 10, 11; 20


@pytest.mark.req("C-098")
def test_the_id_is_made_from_sender_time_and_content() -> None:
    assert message_id("alice", 1_760_000_000_000_000_000, SEGMENT) == W3_ID


@pytest.mark.req("C-096", "C-097")
def test_a_content_message_has_the_bytes_of_the_document() -> None:
    entry = HistoryEntry("0" * 64, bytes(range(32)))
    message = SdsMessage("alice", W3_ID, "room-1", 1_760_000_000_000, (entry,), content=SEGMENT)
    assert message.encode().hex() == W3
    assert SdsMessage.decode(bytes.fromhex(W3)) == message
    assert message.kind is Kind.CONTENT


@pytest.mark.req("C-178", "C-096")
def test_an_ephemeral_message_has_the_bytes_of_the_document() -> None:
    message = SdsMessage("alice", W3_ID, "room-1", content=SEGMENT)
    assert message.encode().hex() == W3_HEAD + W3_TAIL
    assert message.kind is Kind.EPHEMERAL


def entries(values: list[dict[str, Any]]) -> tuple[HistoryEntry, ...]:
    return tuple(
        HistoryEntry(
            value["message_id"],
            None if value["retrieval_hint"] is None else base64.b64decode(value["retrieval_hint"]),
            value["sender_id"],
        )
        for value in values
    )


@pytest.mark.req("C-096")
@pytest.mark.parametrize("vector", VECTORS["messages"], ids=lambda vector: vector["name"])
def test_messages_of_the_javascript_package_are_read_and_written_alike(vector: dict[str, Any]) -> None:
    data = zlib.decompress(base64.b64decode(vector["bytes_zlib"]))
    message = SdsMessage.decode(data)
    if not vector["decoded"]:
        assert message is None
        return
    assert message is not None
    fields = vector["fields"]
    assert message.kind is not None
    assert message.kind.value == fields["kind"]
    assert (message.sender_id, message.message_id) == (fields["sender_id"], fields["message_id"])
    assert message.channel_id == fields["channel_id"]
    assert message.lamport_timestamp == (fields["lamport_timestamp"] and int(fields["lamport_timestamp"]))
    assert message.causal_history == entries(fields["causal_history"])
    assert message.repair_request == entries(fields["repair_request"])
    if fields["kind"] != "sync":
        assert base64.b64encode(message.content or b"").decode() == fields["content"]
    if vector["name"] != "unknown-fields-skipped":
        assert message.encode() == data


@pytest.mark.req("C-302")
def test_a_message_that_names_too_many_is_no_message() -> None:
    message = SdsMessage("a", "m", "c", 1, tuple(HistoryEntry(str(n)) for n in range(11)), content=b"x")
    assert SdsMessage.decode(message.encode(), max_entries=10) is None
    assert SdsMessage.decode(message.encode(), max_entries=11) == message


@pytest.mark.req("C-074", "C-302")
@given(st.binary(max_size=300))
def test_any_bytes_are_a_message_or_none(data: bytes) -> None:
    message = SdsMessage.decode(data)
    if message is not None:
        assert SdsMessage.decode(message.encode()) == message


def test_a_time_that_is_no_unsigned_64_bit_integer_is_refused() -> None:
    for time in (-1, 2**64):
        with pytest.raises(ValueError, match="64-bit"):
            SdsMessage("a", "m", "c", time).encode()


ids = st.text(max_size=40)
history_entries = st.builds(HistoryEntry, ids, st.none() | st.binary(max_size=40), st.none() | ids)
messages = st.builds(
    SdsMessage,
    ids,
    ids,
    ids,
    st.none() | st.integers(0, 2**64 - 1),
    st.lists(history_entries, max_size=4).map(tuple),
    st.none() | st.binary(max_size=64),
    st.lists(history_entries, max_size=4).map(tuple),
    st.none() | st.binary(max_size=64),
)


@given(messages)
def test_every_message_survives_the_wire(message: SdsMessage) -> None:
    assert SdsMessage.decode(message.encode()) == message
