"""The context of a check: connections, identities, packets, and what is known about the relay.

`survey` examines the relay before the first check: it connects, publishes one packet, reads it back, and
fetches the manifest. The findings decide which checks apply, and how far the two clocks are apart.
"""

from __future__ import annotations

import asyncio
import itertools
import secrets
import ssl as ssl_module
import time
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from types import MappingProxyType

import msgspec
from strata.protocol import packets, wire
from strata.protocol.auth import check_address, check_challenge
from strata.protocol.errors import InvalidMessage
from strata.protocol.ids import Identity, Signer
from strata.protocol.packets import Packet
from strata.protocol.wire import EXTENSIONS
from strata.relays.connection.discovery import MANIFEST_PATH
from strata.relays.connection.pins import address_of
from strata.relays.connection.websocket import open_websocket
from websockets.protocol import State
from websockets.typing import Subprotocol

from strata_testkit.conformance import http
from strata_testkit.conformance.forge import auth_message
from strata_testkit.conformance.http import HttpAnswer
from strata_testkit.conformance.peer import Patience, Peer
from strata_testkit.conformance.verdicts import DECISIONS, Failed, Message, Skipped, Throttled
from strata_testkit.conformance.witness import Witness

__all__ = ["LIFETIME_SECONDS", "Context", "Subject", "survey"]

LIFETIME_SECONDS = 900
"""The lifetime of a check's packets, so that the relay keeps nothing of a run."""

_DEFAULT_MAX_LIMIT = 500
_MAX_MESSAGE_BYTES = 8 * 2**20
_CLOSE_TIMEOUT = 2.0


@dataclass(frozen=True, slots=True)
class Subject:
    """The relay under test, as the survey found it.

    `clock_offset` is how far its clock is ahead of ours, in whole seconds, or 0 if they agree to within 2 s.
    """

    url: str
    manifest: dict[str, object] = field(default_factory=dict)
    extensions: frozenset[str] = frozenset()
    relay_id: str | None = None
    sends_challenge: bool = False
    clock_offset: int = 0

    @property
    def max_packet_bytes(self) -> int:
        """The announced size limit, or the default of RFC-0002 §3.5."""
        return self._limit("max_packet_bytes", packets.DEFAULT_MAX_PACKET_BYTES)

    @property
    def max_limit(self) -> int:
        """The announced maximum of `filters.limit`, or 500."""
        return self._limit("max_limit", _DEFAULT_MAX_LIMIT)

    @property
    def max_packet_age_seconds(self) -> int:
        """The announced bound on a packet's age, or the default of RFC-0002 §3.3."""
        policy = self.manifest.get("policy")
        age = policy.get("max_packet_age_seconds") if isinstance(policy, dict) else None
        return age if type(age) is int and age > 0 else packets.DEFAULT_MAX_PACKET_AGE_SECONDS

    def _limit(self, name: str, default: int) -> int:
        limits = self.manifest.get("limits")
        value = limits.get(name) if isinstance(limits, dict) else None
        return value if type(value) is int and value > 0 else default

    def announces(self, extension: str) -> bool:
        """Whether checks of this extension apply."""
        if extension == DECISIONS:
            return not self.extensions.isdisjoint(EXTENSIONS)
        return extension in self.extensions


class Context:
    """One run against one relay, shared by its checks. They never see one another's packets."""

    def __init__(
        self,
        subject: Subject,
        *,
        identity: Identity | None = None,
        relay_id: str | None = None,
        met: Mapping[str, str] = MappingProxyType({}),
        ssl: ssl_module.SSLContext | None = None,
        patience: Patience | None = None,
    ) -> None:
        """With `identity`, the relay must show the DID `relay_id`. None accepts any DID that has no other
        address in `met`."""
        self.subject = subject
        self.relay_id = relay_id
        self._met = met
        self.witness = Witness()
        self.patience = patience or Patience()
        self._session_identity = identity
        self._ssl = ssl
        self._run = secrets.token_hex(4)
        self._numbers = itertools.count(1)

    def now(self) -> int:
        """Unix seconds by the relay's clock, as far as it is known."""
        return int(time.time()) + self.subject.clock_offset

    def identity(self) -> Identity:
        """A new identity."""
        return Identity.generate()

    def type(self, stem: str = "NOTE") -> str:
        """A content type that no other check uses."""
        return f"CONFORMANCE_{stem}_{self._run}_{next(self._numbers)}"

    def packet(
        self,
        signer: Signer,
        text: str = "conformance",
        *,
        type: str = "POST",
        age: int = 0,
        expires_in: int | None = LIFETIME_SECONDS,
        **content: object,
    ) -> Packet:
        """A valid packet, `age` seconds old, that expires by itself; further content members by name."""
        return self.build(signer, {"type": type, "text": text, **content}, age=age, expires_in=expires_in)

    def build(
        self,
        signer: Signer,
        content: Mapping[str, object],
        *,
        age: int = 0,
        expires_in: int | None = LIFETIME_SECONDS,
        provenance_header: Mapping[str, object] | None = None,
        extra: Mapping[str, object] | None = None,
        allow_unattested: bool = False,
    ) -> Packet:
        """A valid packet with this content; the options are those of `strata.protocol.packets.build`."""
        now = self.now()
        return packets.build(
            signer,
            content,
            timestamp=now - age,
            expires_at=None if expires_in is None else now + expires_in,
            nonce=f"{self._run}-{next(self._numbers)}",
            provenance_header=provenance_header,
            extra=extra,
            max_bytes=2**30,
            allow_unattested=allow_unattested,
        )

    def packets(self, signer: Signer, count: int) -> list[Packet]:
        """Valid packets, numbered from 0 in `content.n`."""
        return [self.packet(signer, n=number) for number in range(count)]

    @asynccontextmanager
    async def connect(
        self,
        *,
        anonymous: bool = False,
        expects_limit: str | None = None,
        path: str = "",
        subprotocols: Sequence[Subprotocol] | None = None,
        compression: str | None = None,
        max_queue: int = 16,
    ) -> AsyncIterator[Peer]:
        """A new connection; authenticated if the run has an identity, unless `anonymous`.

        `expects_limit` is the detail of the limit that the check is about. Raises the errors of the WebSocket
        library, and `Skipped` or `Failed` if the identity cannot be authenticated.
        """
        socket = await open_websocket(
            self.subject.url + path,
            ssl=self._ssl,
            open_timeout=self.patience.answer,
            max_size=_MAX_MESSAGE_BYTES,
            subprotocols=subprotocols,
            compression=compression,
            max_queue=max_queue,
            ping_interval=None,
            close_timeout=_CLOSE_TIMEOUT,
        )
        peer = Peer(
            socket,
            self.witness,
            self.patience,
            has_markers=self.subject.announces("history_marker"),
            expects_limit=expects_limit,
        )
        try:
            if self._session_identity is not None and not anonymous:
                await self._authenticate(peer, self._session_identity)
            yield peer
        finally:
            await _hang_up(peer)

    async def _authenticate(self, peer: Peer, identity: Identity) -> None:
        challenge = await peer.challenge()
        # The checks sign whatever a relay sends, with throw-away identities. This one is a user's: text that
        # is no challenge could be a packet in the user's name, or the challenge of another relay.
        try:
            shown = msgspec.convert(challenge, wire.AuthChallenge)
            check_challenge(shown, self.relay_id)
            if self.relay_id is None:
                check_address(shown.server_id, address_of(self.subject.url), self._met)
        except (InvalidMessage, msgspec.ValidationError) as error:
            raise Skipped(f"the given identity answers no such challenge: {error}") from None
        self.relay_id = shown.server_id
        answer = await peer.ask(auth_message(identity, challenge))
        if answer.get("type") != "AUTH_OK":
            raise Skipped(f"the relay does not let the given identity in: {answer.get('code')}")
        peer.is_authenticated = True

    async def get(self, path: str) -> HttpAnswer:
        """GET a path beside the WebSocket endpoint."""
        url = http.http_base(self.subject.url) + path
        return await http.get(url, ssl=self._ssl, timeout=self.patience.answer)


async def survey(
    url: str,
    *,
    identity: Identity | None = None,
    relay_id: str | None = None,
    met: Mapping[str, str] = MappingProxyType({}),
    ssl: ssl_module.SSLContext | None = None,
    patience: Patience | None = None,
) -> Context:
    """Examine the relay and return the context of a run; see `Context` for `relay_id` and `met`.

    Raises the errors of the WebSocket library if there is no relay, and `Skipped` or `Failed` if `identity`
    cannot be authenticated. A relay that answers wrongly otherwise is left to the checks.
    """
    context = Context(Subject(url), identity=identity, relay_id=relay_id, met=met, ssl=ssl, patience=patience)
    answer = await context.get(MANIFEST_PATH)
    manifest = answer.json() if answer.status == 200 else None
    if not isinstance(manifest, dict):
        manifest = {}
    extensions = set(_texts(manifest.get("extensions")))
    relay_id = manifest.get("relay_id")
    challenge: Message = {}
    offset = 0
    async with context.connect() as peer:
        author = context.identity()
        try:
            await peer.store(context.packet(author, age=60))
            history = await peer.subscribe("survey", {"authors": [author.did]})
            received_at = history.events[-1].get("received_at") if history.events else None
            if type(received_at) is int and abs(received_at - time.time()) > 2:
                offset = round(received_at - time.time())
        except (Failed, Skipped, Throttled):
            pass
        challenge = peer.challenges[0] if peer.challenges else {}
    extensions |= set(_texts(challenge.get("extensions")))
    subject = Subject(
        url,
        manifest,
        frozenset(extensions),
        relay_id if isinstance(relay_id, str) else challenge.get("server_id"),
        bool(challenge),
        offset,
    )
    # From here on the relay is held to the DID that it has shown.
    return Context(subject, identity=identity, relay_id=context.relay_id, met=met, ssl=ssl, patience=patience)


def _texts(value: object) -> Iterable[str]:
    return [item for item in value if isinstance(item, str)] if isinstance(value, list) else []


async def _hang_up(peer: Peer) -> None:
    """Close the connection properly if the relay still listens, and drop the socket otherwise."""
    try:
        if peer.socket.state is State.OPEN:
            async with asyncio.timeout(_CLOSE_TIMEOUT):
                await peer.socket.close()
    except TimeoutError:
        pass
    finally:
        # On some versions of Python, a transport that has already closed cannot be aborted.
        if not peer.socket.transport.is_closing():
            peer.socket.transport.abort()
