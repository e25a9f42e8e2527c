"""What both ends have: a relay, a reliable channel on it, and the messages that they exchange there."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import ssl as ssl_module
from collections.abc import AsyncIterator
from dataclasses import dataclass
from struct import Struct
from typing import TYPE_CHECKING, Any

from strata.channels.connecting import Relay, connect
from strata.protocol.errors import StrataError
from strata.protocol.ids import Identity, Signer
from strata.relays.arguments import authors_of
from strata.relays.connection import Options
from strata.txrx.addresses import RelayAddress

if TYPE_CHECKING:
    from strata.channels.encryption import Encryption
    from strata.channels.reliable import ReliableChannel

__all__ = [
    "ANSWER",
    "BYE",
    "DATA",
    "EVERYBODY",
    "FULL_SECONDS",
    "HELLO",
    "LAST_WORDS_SECONDS",
    "PLACE",
    "WELCOME",
    "RelayEnd",
    "RelayLine",
    "encode_words",
    "has_not_gone_out",
    "is_full",
    "read_words",
]

_log = logging.getLogger(__name__)

HELLO, WELCOME, DATA, ANSWER, BYE = range(5)
"""The kinds of messages."""
EVERYBODY = 0
"""The session of a Welcome that is for every sender."""
PLACE = Struct(">QQ")
"""The stream and the number of a piece."""
FULL_SECONDS = 0.1
"""The wait before a message for which the channel had no room is sent again."""
LAST_WORDS_SECONDS = 5.0
_MAGIC = b"STRX"
_HEAD = Struct(">4sBQQ")


@dataclass(frozen=True, slots=True, kw_only=True)
class RelayEnd:
    """How an end connects to a relay, and to which authors it listens there."""

    identity: Signer | None = None
    """Signs the packets of this end; by default a new identity."""
    encryption: Encryption | None = None
    """Both ends need the same encryption; if it needs a channel id, that is the topic. Without encryption,
    the relay and every reader of the topic can read the messages."""
    members: tuple[str, ...] = ()
    """The authors to listen to; if empty, every author on the topic. All ends should have members: without
    them, a sender believes any author that answers in the receiver's place."""
    ssl: ssl_module.SSLContext | None = None
    options: Options | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "members", authors_of("members", self.members))


class RelayLine:
    """A relay and a reliable channel on it, opened together and closed together."""

    def __init__(self, address: RelayAddress, end: RelayEnd) -> None:
        self._address = address
        self._end = end
        self._stack = contextlib.AsyncExitStack()
        self._relay: Relay | None = None
        self.channel: ReliableChannel

    @property
    def connections(self) -> int:
        """How often the relay was connected to: what was said in between may not have been heard."""
        return 0 if self._relay is None else self._relay.statistics.connections

    async def open(self) -> None:
        """Open both. Raises `StrataError`. If it is cancelled, nothing stays open."""
        end = self._end
        relay = self._relay = connect(
            self._address.url,
            identity=end.identity or Identity.generate(),
            ssl=end.ssl,
            options=end.options,
        )
        options: dict[str, Any] = {"query_on_connect": False, "members": end.members}
        if end.encryption is not None:
            options["encryption"] = end.encryption
        try:
            await self._stack.enter_async_context(relay)
            channel = relay.channel(self._address.topic, topic=self._address.topic, **options)
            self.channel = await self._stack.enter_async_context(channel)
        except BaseException:
            await self.close()
            raise

    async def heard(self) -> AsyncIterator[bytes]:
        """The payloads of the members' messages.

        The channel also fetches messages of others to which its participants refer, and participants repeat
        those that cannot be fetched: a repeated one has no author, since nothing proves who wrote it.
        """
        members = self._end.members
        async for message in self.channel:
            if not members or message.author in members:
                yield message.payload

    async def close(self) -> None:
        """Close both; takes a few seconds at most."""
        try:
            async with asyncio.timeout(LAST_WORDS_SECONDS):
                await self._stack.aclose()
        except (StrataError, TimeoutError) as error:
            _log.info("closing %s: %s", self._address, error)


def encode_words(kind: int, session: int, receiver: int, rest: bytes = b"") -> bytes:
    return _HEAD.pack(_MAGIC, kind, session, receiver) + rest


def read_words(payload: bytes) -> tuple[int, int, int, bytes] | None:
    """The kind, session, receiver and rest of a message; None for other messages on the topic."""
    if len(payload) < _HEAD.size or not payload.startswith(_MAGIC):
        return None
    _, kind, session, receiver = _HEAD.unpack_from(payload)
    return kind, session, receiver, payload[_HEAD.size :]


def is_full(error: StrataError) -> bool:
    """Whether a channel has no room for a message now, but will later."""
    # Imported here, since a program without channels over relays needs none of their modules.
    from strata.channels.rate_limit.values import SendQueueFull
    from strata.channels.sds.participant import OutgoingFull

    return isinstance(error, OutgoingFull | SendQueueFull)


def has_not_gone_out(error: StrataError) -> bool:
    """Whether a channel whose `send` raised this has sent nothing of the message, and never will."""
    from strata.channels.persistence import PersistenceClosed, PersistenceError
    from strata.channels.reliable.errors import ChannelNotOpen, NotStarted

    if isinstance(error, PersistenceError):
        # Nothing goes out before it is stored. But a closing channel may still store what it had accepted.
        return not isinstance(error, PersistenceClosed)
    return is_full(error) or isinstance(error, ChannelNotOpen | NotStarted)
