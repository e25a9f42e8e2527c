"""Functions from the documents that make channels and send envelopes through them (C-001 …)."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Mapping
from dataclasses import replace
from typing import Unpack

from strata.channels.messaging.node import MessagingNode
from strata.channels.messaging.values import NodeMessageError
from strata.channels.parameters import named_too
from strata.channels.reliable.channel import ReliableChannel
from strata.channels.reliable.config import ReliableChannelConfig, configure
from strata.channels.reliable.errors import (
    EmptyPayload,
    InvalidConfiguration,
    InvalidEnvelope,
    MessageTooLarge,
    NotSent,
    UnknownChannel,
)
from strata.channels.reliable.events import ReliableEnvelope
from strata.channels.reliable.hub import Hub
from strata.channels.reliable.options import ChannelOptions, ConfigOptions
from strata.protocol.errors import StrataError

__all__ = [
    "ReliableClient",
    "closeChannel",
    "close_channel",
    "close_channels",
    "createReliableChannel",
    "create_reliable_channel",
    "make_channel",
    "open_channel",
    "send",
]


_named_as_documented = named_too(waku_node="node", channel_config="config")
"""Accepts the documents' parameter names: `waku_node`, and `channelConfig` of 2026 with `senderId`."""


@_named_as_documented
def make_channel(
    node: MessagingNode | ReliableChannelConfig | None = None,
    channel_id: str | None = None,
    content_topic: str | None = None,
    sender_id: str | None = None,
    config: ReliableChannelConfig | None = None,
    *,
    options: Mapping[str, object] | None = None,
    **settings: Unpack[ConfigOptions],
) -> ReliableChannel:
    """Make a channel without opening it; `create_reliable_channel` documents the arguments."""
    try:
        if isinstance(node, ReliableChannelConfig):  # the two arguments of 2026: config, sender id
            if config is not None or content_topic is not None or sender_id is not None:
                raise ValueError("with a configuration as the first argument only a sender id may follow")
            node, channel_id, sender_id, config = None, None, channel_id, node
        node = node or (config.node if config is not None else None)
        if node is None:
            raise ValueError("a channel needs a node")
        return _make(node, channel_id, content_topic, sender_id, config, options, settings)
    except StrataError:
        raise
    except (ValueError, TypeError) as error:
        raise InvalidConfiguration(str(error)) from error


def _make(
    node: MessagingNode,
    channel_id: str | None,
    content_topic: str | None,
    sender_id: str | None,
    config: ReliableChannelConfig | None,
    options: Mapping[str, object] | None,
    settings: ConfigOptions,
) -> ReliableChannel:
    profile = settings.pop("profile", None)
    encoder, decoder = settings.pop("encoder", None), settings.pop("decoder", None)
    rng = settings.pop("rng", None)
    encryption = settings.pop("encryption", None)  # None takes that of `config`
    defaults = node.defaults if isinstance(node.defaults, ReliableChannelConfig) else None
    chosen = configure(
        config,
        defaults=defaults,
        profile=profile,
        options=options,
        settings=settings,
        encryption=encryption,
    )
    return ReliableChannel(
        node,
        channel_id if channel_id is not None else chosen.channel_id or "",
        content_topic if content_topic is not None else chosen.content_topic,
        sender_id,
        chosen,
        encoder=encoder,
        decoder=decoder,
        rng=rng,
    )


def open_channel(
    node: MessagingNode,
    channel_id: str,
    topic: str,
    sender_id: str | None,
    **options: Unpack[ChannelOptions],
) -> ReliableChannel:
    """Make a channel from the keywords of `relay.channel`, not open yet. Raises as `make_channel` does."""
    config = options.pop("config", None)
    settings: ConfigOptions = options
    return make_channel(node, channel_id, topic, sender_id, config, **settings)


@_named_as_documented
async def create_reliable_channel(
    node: MessagingNode | ReliableChannelConfig | None = None,
    channel_id: str | None = None,
    content_topic: str | None = None,
    sender_id: str | None = None,
    config: ReliableChannelConfig | None = None,
    *,
    options: Mapping[str, object] | None = None,
    **settings: Unpack[ConfigOptions],
) -> ReliableChannel:
    """Open a channel (`createReliableChannel`; C-001 … C-004).

    All participants call the channel `channel_id`, and its messages travel on `content_topic`. `sender_id`
    names this participant and is unique among the participants; None makes a sender id and keeps it in the
    store (C-006). The settings come from the keywords, then from `config`, then from the node. `options` is a
    mapping of settings under any of their names, including older ones. `profile` is a preset.
    `create_reliable_channel(config, sender_id)` works too, with everything else in `config`. The names in the
    documents are also accepted as keywords: `waku_node`, `channelId`, `channelConfig`, ….

    Raises `InvalidConfiguration` for unusable settings, and the errors of `ReliableChannel.open`.
    """
    channel = make_channel(node, channel_id, content_topic, sender_id, config, options=options, **settings)
    return await channel.open()


async def close_channel(channel: ReliableChannel, *, purge: bool = False) -> None:
    """`channel.close` as a function (C-019)."""
    await channel.close(purge=purge)


async def close_channels(node: MessagingNode) -> None:
    """Close all channels that are open on a node, concurrently, as `ReliableChannel.close` does.

    Once all are closed, raises the error of one of them; the `NotSent` of several are merged into one.
    Cancelling ends their wait for messages but not the closing.
    """
    hub = Hub.existing(node)
    members = () if hub is None else tuple(hub.members.values())
    closing = [asyncio.create_task(each.close_with_node()) for each in members]
    interrupted: asyncio.CancelledError | None = None
    while not all(each.done() for each in closing):
        try:
            await asyncio.wait(closing)
        except asyncio.CancelledError as cancelling:
            interrupted = cancelling
            for each in closing:
                # In the next turn: a task that is cancelled before its first step would close nothing.
                asyncio.get_running_loop().call_soon(each.cancel)
    ends = [asyncio.CancelledError() if each.cancelled() else each.exception() for each in closing]
    if interrupted is not None:
        raise interrupted
    errors = [each for each in ends if each is not None]
    unsent = [each for each in errors if isinstance(each, NotSent)]
    for error in errors:
        if not isinstance(error, NotSent):
            raise error
    if unsent:
        refused = {key: reason for each in unsent for key, reason in each.refused.items()}
        raise NotSent(tuple(request for each in unsent for request in each.requests), refused)


@named_too(message_payload="payload", message="payload")
async def send(channel: ReliableChannel, payload: bytes, *, request_id: str | None = None) -> str:
    """`channel.send` as a function. `message` and `message_payload` are other names of `payload`."""
    return await channel.send(payload, request_id=request_id)


createReliableChannel = create_reliable_channel
closeChannel = close_channel
"""The names in the documents."""


class ReliableClient:
    """Sends envelopes through the channels that are open on a node (C-013)."""

    def __init__(self, node: MessagingNode) -> None:
        self._node = node

    @property
    def channels(self) -> tuple[ReliableChannel, ...]:
        """The open channels."""
        hub = Hub.existing(self._node)
        if hub is None:
            return ()
        channels = (member.channel for member in hub.members.values())
        return tuple(each for each in channels if isinstance(each, ReliableChannel))

    @named_too()
    async def send(self, envelope: ReliableEnvelope, *, request_id: str | None = None) -> str:
        """Send an envelope; returns its request id. `request_id` is as in `ReliableChannel.send`.

        An envelope with a channel id goes through the channel of that name, as an ephemeral message if its
        inner envelope says so (C-177). An envelope with an empty channel id is an ephemeral message outside
        all channels: it is sent once, whole, under no channel's hook, and received only by the node's
        `message_received` (C-176, C-184).

        Raises `UnknownChannel`, `InvalidEnvelope` if the topic is not the channel's or if a request id is
        chosen for an ephemeral message, and the errors of `ReliableChannel.send` and `send_ephemeral`;
        outside channels `EmptyPayload`, `MessageTooLarge` and `NodeError`.
        """
        inner = envelope.message_envelope
        if request_id is not None and (inner.ephemeral or not envelope.channel_id):
            raise InvalidEnvelope("an ephemeral message has no request id of the program's own: none is kept")
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
        if inner.ephemeral:
            return await channel.send_ephemeral(inner.payload)
        return await channel.send(inner.payload, request_id=request_id)

    async def _send_outside(self, envelope: ReliableEnvelope) -> str:
        inner = envelope.message_envelope
        if not inner.payload:
            raise EmptyPayload
        most = self._node.largest_payload(inner.content_topic)
        if most is not None and len(inner.payload) > most:
            raise MessageTooLarge(len(inner.payload), most)
        request_id = secrets.token_hex(16)
        hub = Hub.existing(self._node)
        if hub is not None:
            reason = hub.admit_ephemeral()
            if reason is not None:  # C-181; there is no channel to report it to
                dropped = NodeMessageError(request_id, None, "dropped for the rate limit", reason, False)
                await self._node.message_events.emit(dropped)
                return request_id
        return await self._node.send(replace(inner, ephemeral=True), request_id=request_id)
