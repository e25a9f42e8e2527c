"""The measuring client with frames cut at every place: its counts must match those of a full decode."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, cast

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from strata.protocol.wire import EndOfHistory, Event, Ok, RelayMessage, encode

from benches.measures import Measure, percentile
from benches.peer import BenchError, Peer, messages
from relayd.frames import text_frame

ACCEPTED = b"HTTP/1.1 101 Switching Protocols\r\n\r\n"
PING = b"\x89\x00"

EVENT = Event(packet=msgspec.Raw(b'{"a":"%b"}' % (b"x" * 200)), received_at=1, subscription_id="s")
LARGE = Event(packet=msgspec.Raw(b'{"a":"%b"}' % (b"x" * 70_000)), received_at=1)
SMALL = Event(packet=msgspec.Raw(b"{}"), received_at=1)
OK = Ok(packet_id="0x00", status="ACCEPTED")
MARKER = EndOfHistory(subscription_id="s", complete=True)


class Transport:
    """Records what the peer writes."""

    def __init__(self) -> None:
        self.written: list[bytes] = []
        self.aborted = False

    def write(self, data: bytes) -> None:
        self.written.append(data)

    def abort(self) -> None:
        self.aborted = True


def feed(peer: Peer, pieces: Sequence[bytes]) -> None:
    for piece in pieces:
        buffer = peer.get_buffer(-1)
        buffer[: len(piece)] = piece
        peer.buffer_updated(len(piece))


def fed(data: bytes, sizes: Sequence[int]) -> tuple[Peer, Transport]:
    """A witness that has read `data` in pieces of these sizes, repeatedly."""

    async def run() -> tuple[Peer, Transport]:
        peer, transport = Peer("/", "host", witness=True), Transport()
        peer.connection_made(cast(Any, transport))
        pieces, at, turn = [], 0, 0
        while at < len(data):
            pieces.append(data[at : at + sizes[turn % len(sizes)]])
            at += len(pieces[-1])
            turn += 1
        feed(peer, pieces)
        return peer, transport

    return asyncio.run(run())


@given(
    sent=st.lists(st.sampled_from([EVENT, SMALL, LARGE, OK, MARKER]), max_size=8),
    sizes=st.lists(st.integers(1, 2_000), min_size=1, max_size=5).filter(lambda sizes: max(sizes) > 50),
)
def test_counts_and_keeps_whatever_the_cuts(sent: list[RelayMessage], sizes: list[int]) -> None:
    data = ACCEPTED + b"".join(text_frame(encode(message)) for message in sent)
    peer, _ = fed(data, sizes)
    assert peer.events == sum(isinstance(message, Event) for message in sent)
    assert peer.oks == sum(isinstance(message, Ok) for message in sent)
    assert peer.markers == sum(isinstance(message, EndOfHistory) for message in sent)
    assert messages(peer) == sent


@pytest.mark.parametrize("size", range(1, 30))
def test_pings_are_answered_wherever_they_stand(size: int) -> None:
    data = ACCEPTED + PING + text_frame(encode(EVENT)) + PING + text_frame(encode(OK)) + PING
    peer, transport = fed(data, [size])
    assert (peer.events, peer.oks) == (1, 1)
    assert transport.written[1:] == [b"\x8a\x80\0\0\0\0"] * 3


async def test_an_error_fails_whoever_waits() -> None:
    peer, transport = Peer("/", "host"), Transport()
    peer.connection_made(cast(Any, transport))
    feed(peer, [ACCEPTED])
    done = peer.expect(1)
    with pytest.raises(BenchError, match="unexpected message"):
        feed(peer, [text_frame(b'{"type":"ERROR","code":"invalid_schema","reason":"no"}')])
    with pytest.raises(BenchError, match="unexpected message"):
        await done
    assert transport.aborted


async def test_more_than_was_due_fails() -> None:
    peer = Peer("/", "host")
    peer.connection_made(cast(Any, Transport()))
    done = peer.expect(1)
    feed(peer, [ACCEPTED + text_frame(encode(EVENT)) * 2])
    with pytest.raises(BenchError, match="2 messages where 1 were due"):
        await done


async def test_a_lost_connection_fails_whoever_waits() -> None:
    peer = Peer("/", "host")
    peer.connection_made(cast(Any, Transport()))
    feed(peer, [ACCEPTED])
    done = peer.expect(1)
    peer.connection_lost(None)
    with pytest.raises(BenchError, match="closed a connection"):
        await done


async def test_a_refused_handshake_is_reported() -> None:
    peer = Peer("/", "host")
    peer.connection_made(cast(Any, Transport()))
    feed(peer, [b"HTTP/1.1 503 Service Unavailable\r\n\r\n"])
    with pytest.raises(BenchError, match="503"):
        await peer.opened


def test_targets_are_met_from_their_side() -> None:
    assert Measure("b", "n", 5, "/s", target=5).met is True
    assert Measure("b", "n", 4, "/s", target=5).met is False
    assert Measure("b", "n", 4, "ms", target=5, at_most=True).met is True
    assert Measure("b", "n", 4, "ms").met is None


def test_percentiles_of_an_ascending_list() -> None:
    ordered = [float(number) for number in range(100)]
    assert (percentile(ordered, 0.5), percentile(ordered, 0.99), percentile(ordered, 1.0)) == (50, 99, 99)
