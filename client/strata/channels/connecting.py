"""`connect` and `connect_pool`: connections to one relay or several, which also open channels."""

from __future__ import annotations

import os
import ssl as ssl_module
from collections.abc import Iterable
from types import TracebackType
from typing import TYPE_CHECKING, Unpack

from strata.channels.closing import close_after
from strata.protocol.ids import Signer
from strata.relays.bootstrap import KnownRelay
from strata.relays.connection.keyring import Anchors
from strata.relays.connection.options import Options
from strata.relays.connection.relay import PacketRelay
from strata.relays.pool.options import PoolOptions
from strata.relays.pool.pool import PacketPool

if TYPE_CHECKING:
    from strata.channels.messaging.relay_node import RelayNode
    from strata.channels.reliable.channel import ReliableChannel
    from strata.channels.reliable.options import ChannelOptions

__all__ = ["ChannelOpener", "Pool", "Relay", "connect", "connect_pool"]

# The first channel loads the modules of channels: a program that only publishes and reads needs none of them.


def connect(
    url: str,
    *,
    identity: Signer | None = None,
    ssl: ssl_module.SSLContext | None = None,
    pins: str | os.PathLike[str] | None = None,
    anchors: Anchors | None = None,
    options: Options | None = None,
) -> Relay:
    """Return a connection to the relay at a ws or wss URL. Open it with `async with` or `await relay.open()`.

        async with strata.connect("ws://127.0.0.1:7447/strata", identity=me) as relay:
            await relay.post({"type": "POST", "text": "hello"})

    `identity` signs what `Relay.post` publishes, and authenticates the client to relays that require it
    (`Options.authenticate`). `pins` names a file that records which relay was met at which address (R-298).
    `anchors` are identities trusted in advance, as `relays.bootstrap` reads them (R-055). `ssl` replaces the
    system's TLS settings for wss. Opening raises what `Relay.open` does.
    """
    return Relay(url, identity=identity, ssl=ssl, pins=pins, anchors=anchors, options=options)


class ChannelOpener:
    """The part that `Relay` and `Pool` share: a messaging node of their identity, made at its first use."""

    _identity: Signer | None
    _node: RelayNode | None = None

    @property
    def node(self) -> RelayNode:
        """The messaging node of the connection's identity, for channels (C-259).

        Raises `ValueError` without an identity, since everything that is sent is signed.
        """
        if self._node is None:
            if self._identity is None:
                raise ValueError("channels need an identity: give connect or connect_pool identity=...")
            self._node = self._new_node(self._identity)
        return self._node

    def _new_node(self, identity: Signer) -> RelayNode:
        raise NotImplementedError

    async def _close_node(self) -> None:
        if self._node is not None:
            from strata.channels.reliable.client import close_channels

            try:
                await close_channels(self._node)
            finally:
                await self._node.close()

    def channel(
        self, channel_id: str, *, topic: str, sender_id: str | None = None, **options: Unpack[ChannelOptions]
    ) -> ReliableChannel:
        """Return a reliable channel over this connection. Open it with `async with`; see `ReliableChannel`.

            async with relay.channel("room", topic="/chat/1/room/proto") as room:
                await room.send(b"hello")

        `options` are `config`, `encryption`, `profile` and the settings of `ReliableChannelConfig`, including
        those of its sections. Raises `ValueError` for options that cannot work.
        """
        from strata.channels.reliable.client import open_channel

        return open_channel(self.node, channel_id, topic, sender_id, **options)


class Relay(ChannelOpener, PacketRelay):
    """One relay, kept connected until `close`, for packets and channels. Made by `connect`."""

    async def close(self) -> None:
        """Close the channels, their node, and then the connection, as `PacketRelay.close` does. Idempotent.

        Open channels get time to send first (`ReliableChannel.close`). Raises what closing a channel raises,
        after everything is closed.
        """
        try:
            await self._close_node()
        finally:
            await super().close()

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await close_after(exc, self.close())

    def _new_node(self, identity: Signer) -> RelayNode:
        from strata.channels.messaging.relay_node import RelayNode

        return RelayNode(self, identity=identity, is_genuine=self._is_genuine)


def connect_pool(
    relays: Iterable[str | KnownRelay],
    *,
    identity: Signer | None = None,
    ssl: ssl_module.SSLContext | None = None,
    pins: str | os.PathLike[str] | None = None,
    anchors: Anchors | None = None,
    options: PoolOptions | None = None,
) -> Pool:
    """Return several relays as one connection. Open it with `async with` or `await pool.open()`.

        async with strata.connect_pool(["ws://a/strata", "ws://b/strata", "ws://c/strata"]) as relays:
            await relays.publish(packet)

    A relay is a URL, or a `KnownRelay` of a bootstrap file: `read_bootstrap(path).relays` is all a client
    needs to start (R-347). Earlier relays are preferred until experience says otherwise. `identity` signs
    what `Pool.post` publishes. Every connection uses `identity`, `ssl`, `pins` and `anchors` as `connect`
    does. Opening raises `ConnectionFailed` if no relay could be reached within `Options.connect_timeout`, and
    `OSError` for an unusable scores file.
    """
    return Pool(relays, identity=identity, ssl=ssl, pins=pins, anchors=anchors, options=options)


class Pool(ChannelOpener, PacketPool):
    """Several relays with the interface of one, for packets and channels. Made by `connect_pool`."""

    async def close(self) -> None:
        """Close the channels, their node, and then the connections, as `PacketPool.close` does. Idempotent.

        Open channels get time to send first (`ReliableChannel.close`). Raises what closing a channel raises,
        after everything is closed.
        """
        try:
            await self._close_node()
        finally:
            await super().close()

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await close_after(exc, self.close())

    def _new_node(self, identity: Signer) -> RelayNode:
        from strata.channels.messaging.relay_node import RelayNode

        return RelayNode(self, identity=identity, wall=self._wall, is_genuine=self._is_genuine)
