"""Conversations of Python's client core with a relay, step by step: another client must say the same.

A step is something that happens (a connection, a frame, a timer, a request of the program) at a moment, and
the core's reaction: the frames it sent, what it settled, when it wants to be woken, and what its streams
hold. The random source always gives one half.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable
from dataclasses import asdict
from typing import Any, cast

from msgspec import Raw
from strata.protocol import packets, wire
from strata.protocol.errors import RequestRefused
from strata.protocol.ids import Identity
from strata.relays.connection.core import AuthenticationSettled, Core
from strata.relays.connection.options import Options
from strata.relays.connection.publishing import PublishSettled
from strata.relays.connection.stream import Stream
from strata.relays.connection.values import Announced, Authenticated, LogReset, Published, Query

__all__ = ["transcripts"]

ME = Identity.from_seed(bytes(range(32)))
RELAY = Identity.from_seed(b"\x07" * 32).did
OTHER = Identity.from_seed(b"\x09" * 32).did
CHALLENGE = "AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh8="
T = 1_760_000_000
OURS = ("packet_ids", "received_range", "history_marker", "gapless", "log_reset")
SMALL: dict[str, Any] = {"queue_events": 8, "page_events": 4, "dedup_packets": 16}


class Talk:
    """One conversation, and its record."""

    def __init__(self, name: str, *, signed_in: bool = True, **options: Any) -> None:
        self.name = name
        self.options = SMALL | options
        self.did = ME.did if signed_in else None
        self.core = Core(
            Options(**self.options), random=lambda: 0.5, signer=ME if signed_in else None, address="ws://r:1/"
        )
        self.streams: list[Stream] = []
        self.steps: list[dict[str, Any]] = []
        self.now = 0.0

    def at(self, now: float) -> Talk:
        """Let what follows happen at this moment."""
        self.now = now
        return self

    def connect(self, *extensions: str, relay_id: str | None = None, expect: str | None = None) -> None:
        self.core.expect(expect) if expect else None
        announced = Announced(frozenset(extensions), None, relay_id)
        self.core.connection_made(announced, self.now, unix_now=T + self.now)
        self._record("connect", extensions=sorted(extensions), relay_id=relay_id, expect=expect)

    def lose(self) -> None:
        self.core.connection_lost()
        self._record("lose")

    def subscribe(self, **query: Any) -> None:
        self.streams.append(self.core.subscribe(Query.of(cast(Any, query)), self.now))
        self._record("subscribe", query=query)

    def unsubscribe(self, number: int = 0) -> None:
        self.core.unsubscribe(self.streams[number])
        self._record("unsubscribe", stream=number)

    def publish(self, text: str, timeout: float = 30.0) -> str:
        packet = packets.build(ME, {"type": "POST", "text": text}, timestamp=T)
        canonical = packet.canonical
        self.core.publish(packet.packet_id, canonical, timeout=timeout, now=self.now)
        self._record("publish", packet_id=packet.packet_id, canonical=canonical.decode(), timeout=timeout)
        return packet.packet_id

    def authenticate(self) -> None:
        undecided = self.core.authenticate(self.now)
        self._record("authenticate", undecided=undecided)

    def take(self, number: int = 0, most: int = 1000) -> None:
        """Let the consumer take what waits."""
        taken: list[Any] = []
        stream = self.streams[number]
        while len(taken) < most and (event := stream.take()) is not None:
            if isinstance(event, LogReset):
                taken.append({"lost": event.lost, "cursor": event.cursor, "since": event.since})
            else:
                taken.append([event.cursor, event.received_at, event.live, event.by_receipt])
            self.core.taken(stream, delivered=not isinstance(event, LogReset), now=self.now)
        self._record("take", stream=number, most=most, taken=taken)

    def timer(self) -> None:
        """Let time pass until the core wants to be woken."""
        wake_at = self.core.get_timer()
        if wake_at != math.inf:
            self.now = max(self.now, wake_at)
        self.core.handle_timer(self.now)
        self._record("timer")

    def receive(self, message: Any) -> None:
        frame = message if isinstance(message, str) else wire.encode(message).decode()
        self.core.receive_message(frame.encode(), self.now)
        self._record("receive", frame=frame)

    # Messages of relays.

    def event(self, cursor: str | None, number: int = 0, received_at: int = T) -> None:
        wire_id = self.streams[number].wire_id or "s0.0"
        packet = Raw(b'{"n":"%s"}' % (cursor or "none").encode())
        self.receive(
            wire.Event(packet=packet, received_at=received_at, subscription_id=wire_id, cursor=cursor)
        )

    def end(self, complete: bool, cursor: str | None, number: int = 0) -> None:
        wire_id = self.streams[number].wire_id or "s0.0"
        self.receive(wire.EndOfHistory(subscription_id=wire_id, complete=complete, cursor=cursor))

    def refuse(self, code: str, request: str | None = None, **members: Any) -> None:
        self.receive(wire.Error(code=code, reason="no", client_msg_id=request, **members))

    def refuse_stream(self, code: str, number: int = 0, **members: Any) -> None:
        wire_id = self.streams[number].wire_id or "s0.0"
        self.receive(wire.Error(code=code, reason="no", subscription_id=wire_id, **members))

    def ok(self, packet_id: str, request: str | None = None, **members: Any) -> None:
        self.receive(wire.Ok(packet_id=packet_id, status="ACCEPTED", client_msg_id=request, **members))

    def challenge(self, server_id: str = RELAY, lifetime: float = 120.0, **members: Any) -> None:
        expires_at = int(T + self.now + lifetime)
        self.receive(
            wire.AuthChallenge(challenge=CHALLENGE, server_id=server_id, expires_at=expires_at, **members)
        )

    def granted(
        self, request: str | None, capabilities: list[str] | None = None, did: str | None = None
    ) -> None:
        self.receive(wire.AuthOk(author_id=did or ME.did, capabilities=capabilities, client_msg_id=request))

    def _record(self, act: str, **members: Any) -> None:
        wake_at = self.core.get_timer()
        step = {
            "do": act,
            "now": self.now,
            **members,
            "sent": [json.loads(frame) for frame in self.core.data_to_send()],
            "settled": [_settled(c) for c in self.core.changes() if not isinstance(c, Stream)],
            "streams": [[s.phase.name.lower(), s.wire_id, _outcome(s.error)] for s in self.streams],
            "wake_at": None if wake_at == math.inf else wake_at,
        }
        self.steps.append({name: value for name, value in step.items() if value not in (None, [])})

    def record(self) -> dict[str, Any]:
        """The conversation as JSON."""
        return {
            "name": self.name,
            "options": self.options,
            "did": self.did,
            "seed": ME.seed.hex(),
            "steps": self.steps,
            "statistics": asdict(self.core.statistics),
        }


def _settled(change: object) -> dict[str, Any]:
    match change:
        case PublishSettled(handle, outcome):
            return {"handle": handle, "outcome": _outcome(outcome)}
        case AuthenticationSettled(outcome):
            return {"authenticated": _outcome(outcome)}
    return {"short": True}


def _outcome(outcome: object) -> Any:
    match outcome:
        case Published():
            return {"packet_id": outcome.packet_id, "received_at": outcome.received_at,
                    "duplicate": outcome.duplicate, "queued": outcome.queued}  # fmt: skip
        case Authenticated():
            granted = outcome.capabilities
            return {
                "author_id": outcome.author_id,
                "capabilities": None if granted is None else sorted(granted),
            }
        case RequestRefused():
            return {"error": "RequestRefused", "code": outcome.code, "detail": outcome.detail}
        case Exception():
            return {"error": type(outcome).__name__}
    return None


def resume(talk: Talk) -> None:
    """History by pages, then gapless; a cut; the rest after the last cursor, with a fresh id."""
    talk.subscribe(authors=[ME.did], cursor="c0")
    talk.connect(*OURS)
    for n in range(1, 5):
        talk.event(f"c{n}")
    talk.end(False, "c4")
    talk.take()
    talk.end(True, "c5")
    talk.event("c6")
    talk.take()
    talk.lose()
    talk.at(3).connect(*OURS)
    talk.event("c7")
    talk.end(True, "c7")
    talk.take()


def overflow(talk: Talk) -> None:
    """A slow consumer: the stream is left, and continued where it stopped."""
    talk.connect(*OURS)
    talk.subscribe()
    talk.end(True, None)
    for n in range(1, 10):
        talk.event(f"c{n}")
    talk.take(most=2)
    talk.take(most=3)
    talk.end(True, "c9")
    talk.take()


def invalid_cursor(talk: Talk) -> None:
    """The relay no longer knows the cursor: once with a time to fall back to, once without."""
    talk.connect(*OURS)
    talk.subscribe(cursor="old", cursor_fallback_since=T - 5)
    talk.refuse_stream("invalid_cursor")
    talk.event("n1")
    talk.subscribe(cursor="old")
    talk.refuse_stream("invalid_cursor", 1)


def log_reset(talk: Talk) -> None:
    """The end of the relay's log is lost: with the last valid place, without it, and repeatedly."""
    talk.connect(*OURS)
    talk.subscribe(cursor="e1")
    talk.refuse_stream("invalid_cursor", detail="log_reset", cursor="e0")
    talk.event("e2", received_at=T + 1)
    talk.take()
    talk.lose()
    talk.connect(*OURS)
    talk.refuse_stream("invalid_cursor", detail="log_reset")
    talk.take()
    talk.subscribe(cursor="f1")
    for n in range(4):
        talk.refuse_stream("invalid_cursor", 1, detail="log_reset", cursor=f"f{n}")
    talk.take(1)


def cut_before_ok(talk: Talk) -> None:
    """The relay stored the packet, the answer was lost: the same bytes again, and `duplicate` is success."""
    talk.connect(*OURS)
    first = talk.publish("one")
    talk.lose()
    second = talk.publish("two")
    talk.at(2).connect(*OURS)
    talk.ok(first, "p1", duplicate=True, received_at=T)
    talk.ok(first, "p2")
    talk.ok(second)
    talk.ok(second, "p2")
    talk.at(5)
    talk.publish("three", 20.0)
    talk.timer()
    talk.timer()


def rate_limited(talk: Talk) -> None:
    """The relay names a time; every publish waits for it, in order."""
    talk.connect(*OURS)
    ids = [talk.publish(text) for text in ("a", "b", "c")]
    talk.refuse("rate_limited", "p1", retry_after=4)
    talk.refuse("internal_error", "p2", detail="store_unavailable")
    talk.publish("d")
    talk.timer()
    talk.timer()
    talk.ok(ids[0], "p1")
    talk.refuse("blocked_author", "p2")
    talk.refuse("rate_limited", "p3", retry_after=5000)
    talk.subscribe()
    talk.refuse_stream("rate_limited", retry_after=2)
    talk.timer()
    talk.refuse_stream("rate_limited", retry_after=4000)


def when_needed(talk: Talk) -> None:
    """The relay demands authentication: AUTH, then the requests again; after a cut, AUTH comes first."""
    talk.connect(*OURS)
    talk.challenge(extensions=["gapless"])
    one = talk.publish("x")
    talk.subscribe()
    talk.refuse("unauthenticated", "p1")
    talk.refuse_stream("unauthenticated")
    talk.granted("a1", ["publish", "subscribe"])
    talk.ok(one, "p1")
    talk.lose()
    talk.at(1)
    talk.publish("y")
    talk.connect(*OURS)
    talk.challenge()
    talk.granted(None, ["subscribe"])


def wrong_relay(talk: Talk) -> None:
    """Not the pinned relay: nothing is signed."""
    talk.connect(*OURS, expect=OTHER)
    talk.challenge()
    talk.authenticate()
    talk.challenge(OTHER)
    talk.authenticate()
    talk.granted("a1")
    talk.lose()
    talk.connect(*OURS, relay_id=RELAY)
    talk.challenge(OTHER)


def silent_auth(talk: Talk) -> None:
    """No challenge, no answer, a refusal, a late answer."""
    talk.connect()
    talk.authenticate()
    talk.timer()
    talk.challenge(lifetime=30)
    talk.authenticate()
    talk.timer()
    talk.granted("a1")
    talk.timer()
    talk.challenge()
    talk.timer()
    talk.refuse("unauthenticated", detail="challenge_expired")
    talk.challenge()
    talk.timer()
    talk.refuse("invalid_signature", "a3")
    talk.authenticate()


def always(talk: Talk) -> None:
    """Nothing is sent before AUTH_OK, and nothing at all after a refusal."""
    talk.publish("x")
    talk.subscribe()
    talk.connect(*OURS)
    talk.challenge()
    talk.granted("a9")
    talk.granted("a1", did=OTHER)
    talk.granted("a1", None)
    talk.lose()
    talk.at(2).connect(*OURS)
    talk.challenge()
    talk.refuse("unauthenticated", "a2", detail="not_a_member")


def plain_relay(talk: Talk) -> None:
    """A relay that announces nothing: pages end with silence, and live events have no cursor."""
    talk.connect()
    talk.subscribe(types=["POST"])
    talk.event("c1")
    talk.timer()
    talk.timer()
    talk.event(None)
    talk.take()
    talk.event("c2")
    talk.take()
    talk.timer()
    talk.subscribe(live=False, order="desc", limit=3)
    for n in range(3):
        talk.event(f"d{n}", 1)
    talk.take(1)
    talk.receive('{"type":"NOPE"}')
    talk.receive("not json")
    talk.refuse("internal_error", "zz")


def fetch(talk: Talk) -> None:
    """Reads that end: by their limit, by the end of history, by silence where an end was promised."""
    talk.connect(*OURS)
    talk.subscribe(live=False, limit=6)
    for n in range(4):
        talk.event(f"c{n}")
    talk.end(False, "c3")
    talk.take()
    talk.event("c4")
    talk.event("c5")
    talk.take()
    talk.subscribe(live=False, received_since=5, packet_ids=["0x" + "ab" * 32])
    talk.end(True, None, 1)
    talk.subscribe(live=False)
    talk.timer()


def by_receipt(talk: Talk) -> None:
    """What was received since a time: from a relay that can filter by it, and from one that cannot."""
    talk.connect(*OURS)
    talk.subscribe(received_since=T)
    talk.event("c1", received_at=T - 5000)
    talk.end(True, "c1")
    talk.take()
    talk.lose()
    talk.connect()
    talk.event("c2")
    talk.take()
    talk.subscribe(received_since=T, since=T - 5)
    talk.subscribe(received_since=5)


SCRIPTS: list[tuple[Callable[[Talk], None], dict[str, Any]]] = [
    (resume, {}),
    (overflow, {}),
    (invalid_cursor, {}),
    (log_reset, {}),
    (cut_before_ok, {}),
    (rate_limited, {}),
    (when_needed, {}),
    (wrong_relay, {}),
    (silent_auth, {}),
    (always, {"authenticate": "always"}),
    (plain_relay, {"signed_in": False}),
    (fetch, {}),
    (by_receipt, {}),
]


def wander(seed: int) -> Talk:
    """Anything in any order, as with a bad network and a bad relay."""
    draw = random.Random(seed)
    talk = Talk(f"wander {seed}", authenticate=draw.choice(("never", "when_needed", "when_needed", "always")))
    connected = False
    sent: list[str] = []
    talk.subscribe()
    for step in range(60):
        talk.now += draw.choice((0, 0, 0.25, 1))
        act = draw.randrange(14)
        number = draw.randrange(len(talk.streams))
        if not connected:
            if act < 7:
                talk.connect(*OURS[: draw.choice((0, 4, 5, 5))])
                connected = True
            elif act < 9:
                talk.timer()
            elif act < 11:
                sent.append(talk.publish(f"{seed} {step}", draw.choice((5.0, 30.0))))
            else:
                talk.take(number)
        elif act < 4:
            talk.event(f"c{step}", number, T + step)
            if not talk.core.announced or not talk.core.announced.extensions:
                talk.take(number)
        elif act == 4:
            talk.end(draw.random() < 0.7, f"c{step}", number)
        elif act == 5:
            talk.take(number, draw.choice((1, 3, 1000)))
        elif act == 6:
            talk.timer()
        elif act == 7:
            talk.challenge(draw.choice((RELAY, RELAY, RELAY, OTHER)), draw.choice((120, 20)))
        elif act == 8:
            talk.granted(
                draw.choice((None, "a1", "a2", "a3")),
                draw.choice((None, ["publish"], ["publish", "subscribe"])),
            )
        elif act == 9 and sent:
            talk.ok(draw.choice(sent), draw.choice((None, *(f"p{n + 1}" for n in range(len(sent))))))
        elif act == 10:
            code = draw.choice(("rate_limited", "internal_error", "unauthenticated", "invalid_schema", "odd"))
            after = draw.choice((None, 1, 3)) if code == "rate_limited" else None
            request = draw.choice((None, "p1", "p2", "p3", "a1", "a2"))
            talk.refuse(code, request, retry_after=after, detail=draw.choice((None, "challenge_expired")))
        elif act == 11:
            code = draw.choice(
                ("rate_limited", "internal_error", "unauthenticated", "invalid_cursor", "invalid_cursor")
            )
            detail = draw.choice((None, "log_reset")) if code == "invalid_cursor" else None
            cursor = draw.choice((None, f"g{step}")) if detail else None
            talk.refuse_stream(code, number, detail=detail, cursor=cursor)
        elif act == 12:
            talk.lose()
            connected = False
        elif len(talk.streams) < 4:
            talk.subscribe(**draw.choice(({}, {"cursor": "x"}, {"live": False, "limit": 5}, {"since": 7})))
        else:
            sent.append(talk.publish(f"{seed} {step}", draw.choice((5.0, 30.0))))
    return talk


def transcripts() -> list[dict[str, Any]]:
    """All conversations."""
    talks = []
    for script, options in SCRIPTS:
        talk = Talk(script.__name__, **options)
        script(talk)
        talks.append(talk)
    talks += [wander(seed) for seed in range(16)]
    return [talk.record() for talk in talks]
