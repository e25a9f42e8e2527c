"""Admission with a fake log behind it: exactly one answer each, in order, and duplicates before refusals."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from strata import packets
from strata.errors import ErrorCode, InvalidPacket
from strata.ids import Identity

from relayd.admission.checks import Policy
from relayd.admission.pipeline import Admission, Lane, PublishRequest
from relayd.store.types import NewPacket, StoreUnavailable

NOW = 1_760_000_000
ALICE = Identity(bytes(range(32)))


def made(number: int, *, timestamp: int = NOW, padding: int = 0, author: Identity = ALICE) -> bytes:
    content = {"type": "POST", "text": "x" * padding, "number": number}
    return packets.build(author, content, timestamp=timestamp).canonical


def tampered(raw: bytes) -> bytes:
    """The same packet with another signature: the id still recomputes."""
    at = raw.index(b'"signature":"0x') + len(b'"signature":"0x')
    return raw[:at] + (b"1" if raw[at : at + 1] != b"1" else b"2") + raw[at + 1 :]


class FakeLog:
    """A writer that commits when told to, and the duplicate index over what it committed."""

    def __init__(self) -> None:
        self.queue: list[tuple[NewPacket, PublishRequest]] = []
        self.received: list[bytes] = []
        self.stored: dict[bytes, tuple[int, int]] = {}
        self.lookups: list[list[bytes]] = []
        self.down = False

    def enqueue(self, packet: NewPacket, request: PublishRequest) -> None:
        self.queue.append((packet, request))
        self.received.append(packet.body)

    async def find(self, ids: Sequence[bytes]) -> dict[bytes, tuple[int, int]]:
        self.lookups.append(list(ids))
        if self.down:
            raise StoreUnavailable("down")
        return {key: self.stored[key] for key in ids if key in self.stored}


class Peer:
    """A connection that keeps its answers: (client_msg_id, "ok" | "duplicate" | code)."""

    def __init__(self) -> None:
        self.lane = Lane(self)
        self.answers: list[tuple[str | None, str]] = []

    def publish_accepted(
        self, request: PublishRequest, received_at: int, *, duplicate: bool, duplicate_of: bytes | None = None
    ) -> None:
        self.answers.append((request.client_msg_id, "duplicate" if duplicate else "ok"))

    def publish_refused(self, request: PublishRequest, error: InvalidPacket) -> None:
        self.answers.append((request.client_msg_id, error.code))


class Rig:
    def __init__(self) -> None:
        self.log = FakeLog()
        self.flushes = 0
        self.changed = asyncio.Event()
        self.errors: list[dict[str, object]] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, context: self.errors.append(context))
        self.admission = Admission(
            enqueue=self.log.enqueue,
            find=self.log.find,
            policy=Policy(),
            clock=lambda: NOW,
            max_packet_bytes=262_144,
            max_json_depth=64,
            verify_threads=2,
            on_verified=lambda _: None,
            on_flush=self.flushed,
        )

    def flushed(self) -> None:
        self.flushes += 1
        self.changed.set()

    def publish(self, peer: Peer, raw: bytes, name: str) -> None:
        self.admission.submit(PublishRequest(raw, name, peer.lane, 0.0))

    def commit(self) -> None:
        """Commit everything queued, as the relay does."""
        queue, self.log.queue = self.log.queue, []
        for packet, request in queue:
            duplicate = packet.packet_id in self.log.stored
            self.log.stored.setdefault(packet.packet_id, (len(self.log.stored) + 1, NOW))
            self.admission.committed(request, NOW, duplicate=duplicate)

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(10):
            while not condition():
                self.commit()
                if condition():
                    break
                self.changed.clear()
                await self.changed.wait()
        assert not self.errors, self.errors


@pytest.fixture
async def rig():
    rig = Rig()
    yield rig
    await rig.admission.close()


@pytest.mark.req("R-133", "R-192")
async def test_a_session_s_packets_enter_the_log_in_the_order_sent(rig):
    peer = Peer()
    # Large ones are parsed on threads and small ones on the loop: the order must survive the difference.
    raws = [made(number, padding=40_000 if number % 3 == 0 else 0) for number in range(60)]
    for number, raw in enumerate(raws):
        rig.publish(peer, raw, str(number))
    await rig.until(lambda: len(peer.answers) == 60)
    assert rig.log.received == raws
    assert [name for name, _ in peer.answers] == [str(number) for number in range(60)]


@pytest.mark.req("R-192")
async def test_a_batch_of_one_session_is_answered_in_full(rig):
    # Two verdicts of one lane in one batch of the pool: the first takes both out of the lane.
    peers = [Peer() for _ in range(4)]
    for number in range(200):
        rig.publish(peers[number % 4], made(number), str(number))
    await rig.until(lambda: sum(len(peer.answers) for peer in peers) == 200)
    assert rig.admission.pending == 0
    assert rig.admission.pending_bytes == 0


@pytest.mark.req("R-110", "R-111")
async def test_two_sessions_publish_one_packet_at_once_and_both_get_ok(rig):
    one, two = Peer(), Peer()
    raw = made(1)
    rig.publish(one, raw, "a")
    rig.publish(two, raw, "b")
    await rig.until(lambda: len(one.answers) + len(two.answers) == 2)
    assert sorted([*one.answers, *two.answers], key=lambda a: a[1]) in (
        [("b", "duplicate"), ("a", "ok")],
        [("a", "duplicate"), ("b", "ok")],
    )
    assert len(rig.log.stored) == 1


@pytest.mark.req("R-184")
@pytest.mark.parametrize("fault", ["blocked", "stale", "signature"])
async def test_a_duplicate_is_ok_whatever_a_later_check_would_say(rig, fault):
    peer = Peer()
    stale = fault == "stale"
    raw = made(1, timestamp=NOW - 99_999 if stale else NOW)
    digest = packets.Packet.parse(raw).digest
    rig.log.stored[digest] = (1, NOW - 50)  # known to the index, not to the memory of this process
    if fault == "blocked":
        rig.admission.policy = Policy(blocked_authors=frozenset([ALICE.did]))
    if fault == "signature":
        raw = tampered(raw)
    rig.publish(peer, raw, "m")
    await rig.until(lambda: len(peer.answers) == 1)
    assert peer.answers == [("m", "duplicate")]


@pytest.mark.req("R-112", "R-184")
async def test_a_known_id_over_another_body_is_refused(rig):
    peer = Peer()
    raw = made(1)
    rig.publish(peer, raw, "first")
    await rig.until(lambda: len(peer.answers) == 1)
    rig.publish(peer, raw.replace(b'"number":1', b'"number":2'), "second")
    await rig.until(lambda: len(peer.answers) == 2)
    assert peer.answers == [("first", "ok"), ("second", ErrorCode.INVALID_SIGNATURE)]


@pytest.mark.req("R-030", "R-182")
async def test_a_bad_signature_reaches_neither_log_nor_memory(rig):
    peer = Peer()
    raw = made(1)
    rig.publish(peer, tampered(raw), "bad")
    await rig.until(lambda: len(peer.answers) == 1)
    assert peer.answers == [("bad", ErrorCode.INVALID_SIGNATURE)]
    assert not rig.log.stored
    rig.publish(peer, raw, "good")
    await rig.until(lambda: len(peer.answers) == 2)
    assert peer.answers[1] == ("good", "ok")


@pytest.mark.req("R-200")
async def test_a_refusal_needs_no_database(rig):
    rig.log.down = True
    peer = Peer()
    rig.publish(peer, made(1, timestamp=NOW - 99_999), "m")
    await rig.until(lambda: len(peer.answers) == 1)
    assert peer.answers == [("m", ErrorCode.TIMESTAMP_TOO_OLD)]


@pytest.mark.req("R-192", "R-199", "R-200")
async def test_a_fault_of_ours_is_one_internal_error(rig, monkeypatch):
    def broken(*_: object) -> bool:
        raise RuntimeError("secret detail")

    monkeypatch.setattr("relayd.admission.pipeline.verify_signature", broken)
    peer, other = Peer(), Peer()
    rig.publish(peer, made(1), "m")
    rig.publish(other, b"{}", "n")
    await rig.until(lambda: len(peer.answers) + len(other.answers) == 2)
    assert peer.answers == [("m", ErrorCode.INTERNAL_ERROR)]
    assert other.answers == [("n", ErrorCode.INVALID_SCHEMA)]


async def test_a_repeat_needs_no_signature_check_and_no_lookup(rig, monkeypatch):
    peer = Peer()
    rig.publish(peer, made(1), "first")
    await rig.until(lambda: len(peer.answers) == 1)
    monkeypatch.setattr("relayd.admission.pipeline.verify_signature", None)
    rig.publish(peer, made(1), "again")
    assert peer.answers == [("first", "ok"), ("again", "duplicate")]
    assert not rig.log.lookups


KINDS = ("good", "repeat", "large", "tampered", "wrong_id", "stale", "blocked", "garbage")
BOB = Identity(bytes(32))


def _raw(kind: str, number: int) -> bytes:
    match kind:
        case "repeat":
            return made(0)
        case "large":
            return made(number, padding=20_000)
        case "tampered":
            return tampered(made(number))
        case "wrong_id":
            return made(number).replace(b'"type":"POST"', b'"type":"PAST"')
        case "stale":
            return made(number, timestamp=NOW - 99_999)
        case "blocked":
            return made(number, author=BOB)
        case "garbage":
            return b'{"packet_id":7}'
    return made(number)


@pytest.mark.req("R-133", "R-192")
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.tuples(st.integers(0, 2), st.sampled_from(KINDS)), max_size=25))
def test_any_mixture_from_any_sessions_gets_one_answer_each_in_order_of_acceptance(script):
    async def main() -> None:
        rig = Rig()
        rig.admission.policy = Policy(blocked_authors=frozenset([BOB.did]))
        peers = [Peer() for _ in range(3)]
        for number, (peer, kind) in enumerate(script):
            rig.publish(peers[peer], _raw(kind, number), str(number))
        await rig.until(lambda: sum(len(peer.answers) for peer in peers) == len(script))
        for index, peer in enumerate(peers):
            sent = [str(number) for number, (owner, _) in enumerate(script) if owner == index]
            assert sorted(name or "" for name, _ in peer.answers) == sorted(sent)
            stored = [int(name or "") for name, what in peer.answers if what == "ok"]
            assert stored == sorted(stored)
        kinds = {str(number): kind for number, (_, kind) in enumerate(script)}
        answers = {name or "": what for peer in peers for name, what in peer.answers}
        expected = {
            "tampered": ErrorCode.INVALID_SIGNATURE,
            "wrong_id": ErrorCode.INVALID_SIGNATURE,
            "stale": ErrorCode.TIMESTAMP_TOO_OLD,
            "blocked": ErrorCode.BLOCKED_AUTHOR,
            "garbage": ErrorCode.INVALID_SCHEMA,
        }
        for name, kind in kinds.items():
            assert answers[name] == expected.get(kind, answers[name])
            assert kind in expected or answers[name] in ("ok", "duplicate")
        assert (rig.admission.pending, rig.admission.pending_bytes) == (0, 0)
        await rig.admission.close()

    asyncio.run(main())
