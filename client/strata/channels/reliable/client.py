"""Making channels, and sending through the one an envelope names: the documents' functions (C-001 …)."""

from __future__ import annotations

import random
import secrets
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from strata.channels.encryption import Encryption
from strata.channels.messaging.node import MessagingNode
from strata.channels.messaging.values import NodeMessageError
from strata.channels.reliable.channel import ReliableChannel
from strata.channels.reliable.codec import Decoder, Encoder
from strata.channels.reliable.config import ReliableChannelConfig, configure
from strata.channels.reliable.errors import (
    EmptyPayload,
    InvalidConfiguration,
    InvalidEnvelope,
    MessageTooLarge,
    UnknownChannel,
)
from strata.channels.reliable.events import ReliableEnvelope
from strata.channels.reliable.hub import Hub
from strata.protocol.errors import StrataError

__all__ = [
    "ReliableClient",
    "closeChannel",
    "close_channel",
    "createReliableChannel",
    "create_reliable_channel",
    "make_channel",
    "open_channel",
    "send",
]

_KEYWORDS = ("config", "encryption", "encoder", "decoder", "profile", "rng")


def make_channel(
    node: MessagingNode | ReliableChannelConfig | None = None,
    channel_id: str | None = None,
    content_topic: str | None = None,
    sender_id: str | None = None,
    config: ReliableChannelConfig | None = None,
    *,
    encryption: Encryption | None = None,
    encoder: Encoder | None = None,
    decoder: Decoder | None = None,
    options: Mapping[str, Any] | None = None,
    profile: str | None = None,
    rng: random.Random | None = None,
) -> ReliableChannel:
    """A channel that is not open yet; `create_reliable_channel` tells the arguments and opens it."""
    try:
        return _make(
            *(node, channel_id, content_topic, sender_id, config),
            encryption=encryption,
            encoder=encoder,
            decoder=decoder,
            options=options,
            profile=profile,
            rng=rng,
        )
    except StrataError:
        raise
    except (ValueError, TypeError) as error:
        raise InvalidConfiguration(str(error)) from error


def _make(
    node: MessagingNode | ReliableChannelConfig | None,
    channel_id: str | None,
    content_topic: str | None,
    sender_id: str | None,
    config: ReliableChannelConfig | None,
    *,
    encryption: Encryption | None,
    encoder: Encoder | None,
    decoder: Decoder | None,
    options: Mapping[str, Any] | None,
    profile: str | None,
    rng: random.Random | None,
) -> ReliableChannel:
    if isinstance(node, ReliableChannelConfig):  # the two arguments of 2026: config, sender id
        if config is not None or content_topic is not None or sender_id is not None:
            raise ValueError("with a configuration as the first argument there is only the sender id besides")
        node, channel_id, sender_id, config = None, None, channel_id, node
    if node is None and config is not None:
        node = config.node
    if node is None:
        raise ValueError("a channel needs a node")
    defaults = node.defaults if isinstance(node.defaults, ReliableChannelConfig) else None
    settings = configure(config, defaults=defaults, options=options, profile=profile, encryption=encryption)
    return ReliableChannel(
        node,
        channel_id if channel_id is not None else settings.channel_id or "",
        content_topic if content_topic is not None else settings.content_topic,
        sender_id,
        settings,
        encoder=encoder,
        decoder=decoder,
        rng=rng,
    )


def open_channel(
    node: MessagingNode,
    channel_id: str,
    topic: str,
    sender_id: str | None,
    options: dict[str, Any],
) -> ReliableChannel:
    """A channel from the keywords of `relay.channel`: those of `make_channel`, and settings by name."""
    own = {name: options.pop(name) for name in _KEYWORDS if name in options}
    return make_channel(node, channel_id, topic, sender_id, options=options, **own)


async def create_reliable_channel(
    node: MessagingNode | ReliableChannelConfig | None = None,
    channel_id: str | None = None,
    content_topic: str | None = None,
    sender_id: str | None = None,
    config: ReliableChannelConfig | None = None,
    *,
    encryption: Encryption | None = None,
    encoder: Encoder | None = None,
    decoder: Decoder | None = None,
    options: Mapping[str, Any] | None = None,
    profile: str | None = None,
    rng: random.Random | None = None,
) -> ReliableChannel:
    """Open a channel (`createReliableChannel`; C-001 … C-004).

    `channel_id` is what all participants call it, `content_topic` where it travels, `sender_id` this
    participant, unique among them: None makes one and keeps it in the store (C-006). What is not said here
    is taken from `config`, then from the node. `options` are flat settings under any of their names, and
    override `config`; `profile` is a preset. `create_reliable_channel(config, sender_id)` works too, with
    everything else in `config`. `rng` makes ids and delays; None takes the system's.

    Raises `InvalidConfiguration` for what cannot work, and what `ReliableChannel.open` raises.
    """
    channel = make_channel(
        *(node, channel_id, content_topic, sender_id, config),
        encryption=encryption,
        encoder=encoder,
        decoder=decoder,
        options=options,
        profile=profile,
        rng=rng,
    )
    return await channel.open()


async def close_channel(channel: ReliableChannel, *, purge: bool = False) -> None:
    """`channel.close` as a function (C-019)."""
    await channel.close(purge=purge)


async def send(channel: ReliableChannel, payload: bytes) -> str:
    """`channel.send` as a function."""
    return await channel.send(payload)


createReliableChannel = create_reliable_channel
closeChannel = close_channel
"""Their names in the documents."""


class ReliableClient:
    """Sends envelopes through the channels that are open on a node (C-013)."""

    def __init__(self, node: MessagingNode) -> None:
        self._node = node

    @property
    def channels(self) -> tuple[ReliableChannel, ...]:
        """The open channels."""
        hub = Hub.existing(self._node)
        return () if hub is None else tuple(lane.channel for lane in hub.lanes.values())

    async def send(self, envelope: ReliableEnvelope) -> str:
        """Send an envelope; returns its request id.

        With a channel id it goes through the channel of that name, as an ephemeral message of it if its inner
        envelope says so (C-177). With an empty one it is ephemeral and of no channel: sent once, whole, under
        no channel's hook, and received by the node's `message_received` alone (C-176, C-184).

        Raises `UnknownChannel`, `InvalidEnvelope` if the topic is another than the channel's, and what
        `ReliableChannel.send` and `send_ephemeral` raise; `EmptyPayload`, `MessageTooLarge` and `NodeError`
        outside channels.
        """
        inner = envelope.message_envelope
        if not envelope.channel_id:
            return await self._send_outside(envelope)
        named = [each for each in self.channels if each.channel_id == envelope.channel_id]
        if len(named) != 1:
            raise UnknownChannel(envelope.channel_id)
        (channel,) = named
        if inner.content_topic and inner.content_topic != channel.content_topic:
            raise InvalidEnvelope(
                f"the channel {channel.channel_id!r} is on {channel.content_topic}, not {inner.content_topic}"
            )
        return await (channel.send_ephemeral if inner.ephemeral else channel.send)(inner.payload)

    async def _send_outside(self, envelope: ReliableEnvelope) -> str:
        inner = envelope.message_envelope
        if not inner.payload:
            raise EmptyPayload
        most = self._node.largest_payload(inner.content_topic)
        if most is not None and len(inner.payload) > most:
            raise MessageTooLarge(len(inner.payload), most)
        request_id = secrets.token_hex(16)
        hub = Hub.existing(self._node)
        if hub is not None and hub.limiter is not None:
            reason = hub.limiter.admit_ephemeral(hub.now_ms())
            if reason is not None:  # C-181; there is no channel to tell
                dropped = NodeMessageError(request_id, None, "dropped for the rate limit", reason, False)
                await self._node.message_events.emit(dropped)
                return request_id
        return await self._node.send(replace(inner, ephemeral=True), request_id=request_id)
