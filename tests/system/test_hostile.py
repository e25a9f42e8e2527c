"""Whatever bytes a peer sends, the relay answers or closes; it never dies and never delays other clients.

A canary publishes on its own connection throughout: each of its packets must be acknowledged.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import struct
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from websockets.exceptions import ConnectionClosed

from tests.support.bare_client import BareClient, open_client, publish_text
from tests.support.made_packets import make, new_identity, seal
from tests.support.relay_process import RelayProcess

EXAMPLES = int(os.environ.get("RELAYD_TEST_FUZZ_EXAMPLES", "40"))
HANDSHAKE = (
    b"GET /strata HTTP/1.1\r\nHost: x\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
    b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\n\r\n"
)
fuzzed = settings(
    max_examples=EXAMPLES,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


class Attacked:
    """A relay, its canary, and a loop to drive both from plain functions."""

    def __init__(self, relay: RelayProcess) -> None:
        self.relay = relay
        self.runner = asyncio.Runner()
        self.identity = new_identity()
        self.canary = self.runner.run(self._connect())
        self.published = 0

    async def _connect(self) -> BareClient:
        self._manager = open_client(self.relay.ws)
        return await self._manager.__aenter__()

    def run(self, attack: Callable[[], Coroutine[Any, Any, None]]) -> None:
        async def both() -> None:
            attacking = asyncio.create_task(attack(), name="attack")
            while True:  # at least once, and as long as the attack lasts
                answer = await self.canary.publish(make(self.identity))
                assert answer["type"] == "OK"
                self.published += 1
                if attacking.done():
                    break
            await attacking

        self.runner.run(asyncio.wait_for(both(), 30))

    def close(self) -> None:
        self.runner.run(self._manager.__aexit__(None, None, None))
        self.runner.close()


@pytest.fixture(scope="module")
def attacked(relay: RelayProcess) -> Iterator[Attacked]:
    made = Attacked(relay)
    yield made
    assert made.published > 0
    made.close()


async def send_bytes(relay: RelayProcess, data: bytes, step: int) -> None:
    """After a handshake, send any bytes in pieces; then wait until the relay has answered or closed."""
    host, port = relay.http.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    with contextlib.suppress(OSError):  # it may have closed by then
        writer.write(HANDSHAKE)
        await reader.readuntil(b"\r\n\r\n")
        for at in range(0, len(data), step):
            writer.write(data[at : at + step])
            await writer.drain()
        writer.write_eof()
        async with asyncio.timeout(10):
            await reader.read()
    writer.transport.abort()


@fuzzed
@given(st.binary(max_size=600), st.integers(1, 300))
def test_arbitrary_bytes(attacked: Attacked, data: bytes, step: int):
    attacked.run(lambda: send_bytes(attacked.relay, data, step))


frames = st.builds(
    lambda first, masked, payload, lie: (
        bytes([first, (0x80 if masked else 0) | (126 if lie is not None else min(len(payload), 125))])
        + (b"" if lie is None else struct.pack("!H", lie))
        + (b"abcd" if masked else b"")
        + payload
    ),
    st.integers(0, 255),
    st.booleans(),
    st.binary(max_size=125),
    st.none() | st.integers(0, 300),
)


@fuzzed
@given(st.lists(frames, max_size=8), st.integers(1, 300))
def test_arbitrary_frames(attacked: Attacked, made: list[bytes], step: int):
    attacked.run(lambda: send_bytes(attacked.relay, b"".join(made), step))


# Only real JSON: other text is answered without the id in it, and `test_arbitrary_bytes` sends that.
values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(codec="utf-8"), max_size=20)
    | st.sampled_from(["asc", "\x00"]),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=12), inner, max_size=4),
    max_leaves=15,
)
filters = st.fixed_dictionaries(
    {},
    optional={
        "authors": st.lists(st.text(st.characters(codec="utf-8"), max_size=20), max_size=5) | values,
        "types": st.lists(st.text(st.characters(codec="utf-8"), max_size=20), max_size=5) | values,
        "since": st.integers() | values,
        "until": st.integers() | values,
        "received_since": st.integers(-(2**53), 2**53),
        "received_until": st.integers(-(2**53), 2**53) | values,
        "limit": st.integers(-1, 1000) | values,
        "cursor": st.text(alphabet="1.AQgw_-", max_size=26) | values,
        "order": st.sampled_from(["asc", "desc"]) | values,
        "packet_ids": st.lists(
            st.just("0x" + "ab" * 32) | st.text(st.characters(codec="utf-8"), max_size=5), max_size=3
        ),
    },
)
messages = st.fixed_dictionaries(
    {"type": st.sampled_from(["SUBSCRIBE", "SUBSCRIBE", "UNSUBSCRIBE", "PUBLISH", "AUTH", "EVENT", "X"])},
    optional={
        "subscription_id": st.sampled_from(["a", "b", "", "é" * 65]) | values,
        "filters": filters | values,
        "gapless": st.booleans() | values,
        "history_marker": st.booleans(),
        "client_msg_id": st.text(max_size=5) | values,
        "packet": values,
    },
).map(lambda message: json.dumps(message))


async def answers_or_closes(relay: RelayProcess, texts: list[str]) -> None:
    async with open_client(relay.ws) as client:
        with contextlib.suppress(ConnectionClosed):
            for text in texts:
                await client.send(text)
            await client.send('{"type":"BARRIER","client_msg_id":"the end of it"}')
            answer = await client.answer("the end of it")
            assert answer["detail"] == "unknown_type"


@fuzzed
@given(st.lists(st.text(max_size=80) | values.map(json.dumps) | messages, max_size=25))
def test_arbitrary_messages(attacked: Attacked, texts: list[str]):
    attacked.run(lambda: answers_or_closes(attacked.relay, texts))


@fuzzed
@given(st.lists(filters, min_size=1, max_size=10))
def test_arbitrary_filters_are_answered_with_a_marker_or_an_error(
    attacked: Attacked, made: list[dict[str, Any]]
):
    async def attack() -> None:
        async with open_client(attacked.relay.ws) as client:
            for filters in made:
                _, end = await client.subscribe("s", filters)
                assert end["type"] in ("END_OF_HISTORY", "ERROR")
                assert end.get("code") in (None, "invalid_schema", "invalid_cursor")

    attacked.run(attack)


packet_members = st.dictionaries(
    st.sampled_from(
        [
            "version",
            "timestamp",
            "content",
            "expires_at",
            "nonce",
            "author_id",
            "attestations",
            "provenance_header",
        ]
    )
    | st.text(max_size=8),
    st.recursive(
        st.none()
        | st.booleans()
        | st.integers(-(2**53) + 1, 2**53 - 1)
        | st.text(st.characters(codec="utf-8")),
        lambda inner: (
            st.lists(inner, max_size=3) | st.dictionaries(st.text(st.characters(codec="utf-8")), inner)
        ),
        max_leaves=8,
    ),
    max_size=5,
)


@fuzzed
@given(st.lists(packet_members, min_size=1, max_size=6))
def test_arbitrary_members_rightly_signed_get_one_answer_each(attacked: Attacked, made: list[dict[str, Any]]):
    identity = attacked.identity
    good = json.loads(make(identity).canonical)
    packets = [seal(identity, {**good, **members}).decode() for members in made]

    async def attack() -> None:
        async with open_client(attacked.relay.ws) as client:
            for packet in packets:
                answer = await client.publish(packet)
                assert answer["type"] in ("OK", "ERROR")
                assert answer.get("code") != "internal_error", packet

    attacked.run(attack)


@pytest.mark.req("R-123", "R-126", "R-321")
@pytest.mark.parametrize(
    "text",
    [
        "[" * 500_000,
        '{"type":"PUBLISH","packet":' + "[" * 100_000 + "]" * 100_000 + "}",
        '{"type":"PUBLISH","packet":' + '{"a":' * 50_000 + "1" + "}" * 50_000 + "}",
        '{"type":"SUBSCRIBE","subscription_id":"s","filters":{"types":[' + '"x",' * 100_000 + '"x"]}}',
        '{"type":"PUBLISH","packet":{"x":' + "9" * 500_000 + "}}",
        '{"type":"PUBLISH","packet":{"x":"' + "\\u0041" * 80_000 + '"}}',
    ],
    ids=["open arrays", "nested arrays", "nested objects", "many values", "long number", "escapes"],
)
def test_bombs(attacked: Attacked, text: str):
    before = attacked.relay.rss()
    attacked.run(lambda: answers_or_closes(attacked.relay, [text] * 5))
    assert attacked.relay.rss() - before < 64 * 2**20


def test_a_publisher_that_leaves_before_its_answers(attacked: Attacked):
    async def attack() -> None:
        for _ in range(20):
            manager = open_client(attacked.relay.ws)
            client = await manager.__aenter__()
            for number in range(20):
                await client.send(publish_text(make(attacked.identity, n=number), "m"))
            client.socket.transport.abort()

    attacked.run(attack)
