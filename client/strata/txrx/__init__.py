"""Tx and Rx: typed messages in one direction, over memory, Unix sockets, TCP, TLS and relays.

    address, rx = await serve("tcp:127.0.0.1:0", Reading)
    tx = await dial(address, Reading)
    await tx.send(Reading(celsius=21.5))      # now it is in the receiver's queue
    print(await rx.recv())

An address is a string. The messages of one `Tx` arrive once and in order, even if connections break. A
message that cannot be delivered is returned to its sender (docs/guides/tx-rx.md).
"""

from __future__ import annotations

from typing import TypeVar

from strata.txrx.addresses import (
    Address,
    LocalAddress,
    RelayAddress,
    TcpAddress,
    TlsAddress,
    UnixAddress,
    parse_address,
)
from strata.txrx.codecs import BytesCodec, MessageCodec, MsgpackCodec, codec_for
from strata.txrx.dialing import NetTx
from strata.txrx.ends import Rx, Tx
from strata.txrx.errors import (
    AddressInUse,
    CodecError,
    DeliveryStatus,
    DeliveryTimeout,
    ErrorKind,
    InvalidAddress,
    OutboxFull,
    OversizedMessage,
    ProtocolViolation,
    SendError,
    TxRxClosed,
    TxRxError,
    TxRxIOError,
)
from strata.txrx.local import dial_local, serve_local_at
from strata.txrx.receiving import ReceiverCounters
from strata.txrx.relayed import RelayEnd, RelayTx, serve_relay
from strata.txrx.returns import ReturnChannel
from strata.txrx.sending import SenderCounters
from strata.txrx.serving import serve_net
from strata.txrx.settings import TxRxSettings
from strata.txrx.status import TxStatus, Watch
from strata.txrx.tls import client_context, server_context

__all__ = [
    "Address",
    "AddressInUse",
    "BytesCodec",
    "CodecError",
    "DeliveryStatus",
    "DeliveryTimeout",
    "ErrorKind",
    "InvalidAddress",
    "LocalAddress",
    "MessageCodec",
    "MsgpackCodec",
    "OutboxFull",
    "OversizedMessage",
    "ProtocolViolation",
    "ReceiverCounters",
    "RelayAddress",
    "RelayEnd",
    "ReturnChannel",
    "Rx",
    "SendError",
    "SenderCounters",
    "TcpAddress",
    "TlsAddress",
    "Tx",
    "TxRxClosed",
    "TxRxError",
    "TxRxIOError",
    "TxRxSettings",
    "TxStatus",
    "UnixAddress",
    "Watch",
    "codec_for",
    "dial",
    "parse_address",
    "serve",
    "serve_local",
]

M = TypeVar("M")


async def dial(
    address: Address | str,
    message_type: type[M] | MessageCodec[M],
    *,
    settings: TxRxSettings | None = None,
    relay: RelayEnd | None = None,
) -> Tx[M]:
    """Return the transmitting end for an address. A network server need not be running yet.

    Raises `InvalidAddress`, `CodecError` for a type that cannot be sent, `TxRxIOError` for certificates, and
    `TxRxClosed` for a local address that is not served. It does not wait, so there is nothing to cancel.
    """
    where = parse_address(address) if isinstance(address, str) else address
    codec = codec_for(message_type)
    chosen = settings or TxRxSettings.from_environment()
    match where:
        case LocalAddress():
            return dial_local(where)
        case RelayAddress():
            return RelayTx(where, codec, chosen, relay or RelayEnd())
        case TcpAddress() | TlsAddress() if where.port == 0:
            raise InvalidAddress(f"{where}: dial the port that `serve` has found")
        case TlsAddress():
            return NetTx(where, codec, chosen, client_context(chosen))
        case _:
            return NetTx(where, codec, chosen, None)


async def serve(
    address: Address | str,
    message_type: type[M] | MessageCodec[M],
    *,
    settings: TxRxSettings | None = None,
    relay: RelayEnd | None = None,
) -> tuple[Address, Rx[M]]:
    """Serve an address. Returns the real address, with the port that was found, and the receiving end.

    Raises `InvalidAddress`, `AddressInUse`, `CodecError` for a type that cannot be received, and
    `TxRxIOError` for sockets and certificates. If it is cancelled, nothing is served.
    """
    where = parse_address(address) if isinstance(address, str) else address
    codec = codec_for(message_type)
    chosen = settings or TxRxSettings.from_environment()
    rx: Rx[M]
    match where:
        case LocalAddress():
            rx = serve_local_at(where, message_type, None)
        case RelayAddress():
            rx = await serve_relay(where, codec, chosen, relay or RelayEnd())
        case TlsAddress():
            rx = await serve_net(where, codec, chosen, server_context(chosen))
        case _:
            rx = await serve_net(where, codec, chosen, None)
    return rx.addr(), rx


def serve_local(
    message_type: type[M] | MessageCodec[M], *, capacity: int | None = None
) -> tuple[Address, Rx[M]]:
    """Serve a new local address. Returns it and the receiving end. Without `capacity` the queue is unbounded.

    Raises `CodecError` for a type that cannot be received, and `ValueError` for a capacity below 1.
    """
    codec_for(message_type)
    if capacity is not None and capacity < 1:
        raise ValueError("capacity has to be at least 1")
    rx = serve_local_at(LocalAddress(0), message_type, capacity)
    return rx.addr(), rx
