"""The messages of RFC-0004 §3, both directions, as typed structs.

client → relay: `Subscribe`, `Unsubscribe`, `Publish`, `Auth`, `Moderate` from operators (decision 61), and
`Reconcile` from relays that replicate (A-171).
relay → client: `Event`, `Ok`, `Error`, `AuthChallenge`, `AuthOk`, and on request `EndOfHistory`, `Moderated`
and `Reconciled` (A-047, decision 61, A-171).

Unknown members are ignored (R-004); `null` means the same as absence (A-004), so every optional member
defaults to None and None is never written. A packet inside a message remains the bytes that arrived
(`msgspec.Raw`): decoding a message neither reads nor checks the packet. A struct is checked when it is
decoded, not when it is built.

`decode_client_message` and `decode_relay_message` take one text frame and return one struct, or raise
`InvalidMessage`, which carries the ids that the answer needs. `decode_moderated` and `decode_reconciled`
decode the answers that only operators and replicating relays receive.
"""

# Core: no I/O, no clock, no randomness (held by tests/test_layout.py).

from __future__ import annotations

import math
from typing import Annotated, Literal, get_args

import msgspec
from msgspec import UNSET, Meta, Raw, UnsetType

from strata.protocol.errors import InvalidMessage

__all__ = [
    "EXTENSIONS",
    "MAX_ID_BYTES",
    "Auth",
    "AuthChallenge",
    "AuthOk",
    "ClientMessage",
    "EndOfHistory",
    "Error",
    "Event",
    "Filters",
    "Moderate",
    "Moderated",
    "Ok",
    "Publish",
    "Reconcile",
    "Reconciled",
    "RelayMessage",
    "Subscribe",
    "Unsubscribe",
    "decode_client_message",
    "decode_moderated",
    "decode_reconciled",
    "decode_relay_message",
    "encode",
    "read_ids",
]

MAX_ID_BYTES = 128
"""The longest `client_msg_id` or `subscription_id`, in bytes of UTF-8 (R-136, R-141)."""

EXTENSIONS = (
    "packet_ids",
    "received_range",
    "history_marker",
    "gapless",
    "http_packets",
    "log_reset",
    "not_via",
    "reconcile",
)
"""The additions that a relay of this project announces (R-139, decision A-050)."""

_Number = int | float
_Seconds = Annotated[int, Meta(ge=-(2**53) + 1, le=2**53 - 1)]


class _Message(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag_field="type", gc=False):
    pass


class Filters(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """Which packets a subscription wants (RFC-0004 §3.1).

    The values in one member are alternatives, and the members combine with AND. A member that is absent, null
    or empty restricts nothing (A-051). All times are Unix seconds and inclusive; `since` applies to history
    and to live packets, `until` only to history (A-042). `not_via` is for relays that replicate (additive,
    decision 64): it leaves out the packets that the upstream got from these relays, because the downstream
    reads those relays itself.
    """

    authors: list[str] | None = None
    types: list[str] | None = None
    since: _Seconds | None = None
    until: _Seconds | None = None
    limit: Annotated[int, Meta(ge=0, le=2**53 - 1)] | None = None
    cursor: str | None = None
    order: Literal["asc", "desc"] | None = None
    packet_ids: list[str] | None = None
    received_since: _Seconds | None = None
    received_until: _Seconds | None = None
    not_via: list[str] | None = None


class Subscribe(_Message, frozen=True, kw_only=True, tag="SUBSCRIBE"):
    """Request stored packets and then live ones (RFC-0004 §3.1).

    `gapless` requests one stream without a cap, at the reader's pace (A-067); `limit` and `order` must then
    be absent. `history_marker` requests one `EndOfHistory` (A-047).
    """

    subscription_id: str
    filters: Filters | None = None
    replication_profile: str | None = None
    history_marker: bool | None = None
    gapless: bool | None = None
    client_msg_id: str | None = None


class Unsubscribe(_Message, frozen=True, kw_only=True, tag="UNSUBSCRIBE"):
    """End a subscription (RFC-0004 §3.6)."""

    subscription_id: str
    client_msg_id: str | None = None


class Publish(_Message, frozen=True, kw_only=True, tag="PUBLISH"):
    """Publish a packet (RFC-0004 §3.2). The relay answers with exactly one `Ok` or `Error`."""

    packet: Raw
    client_msg_id: str | None = None


class Auth(_Message, frozen=True, kw_only=True, tag="AUTH"):
    """Prove an identity by signing the relay's challenge (RFC-0004 §3.7, decision A-070)."""

    author_id: str
    challenge: str
    signature: str
    capabilities: list[str] | None = None
    client_msg_id: str | None = None


class Moderate(_Message, frozen=True, kw_only=True, tag="MODERATE"):
    """Make a ruling, or query rulings and sessions (additive, decision 61). This takes the capability
    `operate`. The relay answers with one `Moderated` or `Error`.

    `ban` and `unban` need `kind`, `subject` and `reason`. `list` and `log` return pages of up to `limit`
    entries that follow `after`, which is the `next` of the previous page. So does `sessions`, which lists the
    open sessions of every process of the relay, at most 200 per page; with the `kind` `author` or `network`,
    only the sessions of `subject`. `close` needs a session's id as `subject`, and `reason`.
    """

    action: Literal["ban", "unban", "list", "log", "sessions", "close"]
    kind: Literal["author", "packet", "media", "type", "network"] | None = None
    subject: str | None = None
    reason: str | None = None
    expires_at: _Seconds | None = None
    limit: Annotated[int, Meta(ge=1, le=1000)] | None = None
    after: str | None = None
    client_msg_id: str | None = None


class Reconcile(_Message, frozen=True, kw_only=True, tag="RECONCILE"):
    """Send a message of negentropy, version 1, in hex (additive, A-171): a relay that replicates compares
    which packets each side has. The other relay answers with one `Reconciled` or `Error`.

    A message with `until` begins a comparison and ends the previous one. It covers the packets of these types
    and authors (empty: all) whose `timestamp` is from `since` (default 0) to `until`, and whose `expires_at`
    is not before `unexpired_at`. Further messages of the comparison have only `message`.
    """

    message: Annotated[str, Meta(min_length=2)]
    since: Annotated[int, Meta(ge=0, le=2**53 - 1)] | None = None
    until: Annotated[int, Meta(ge=0, le=2**53 - 1)] | None = None
    unexpired_at: Annotated[int, Meta(ge=0, le=2**53 - 1)] | None = None
    types: list[str] | None = None
    authors: list[str] | None = None
    client_msg_id: str | None = None


class Event(_Message, frozen=True, kw_only=True, tag="EVENT"):
    """One packet for one subscription (RFC-0004 §3.3).

    `subscription_id` is absent only from a relay's unsolicited default feed (A-054).
    """

    packet: Raw
    received_at: int
    subscription_id: str | None = None
    cursor: str | None = None
    relay_annotations: dict[str, object] | None = None


class Ok(_Message, frozen=True, kw_only=True, tag="OK"):
    """The packet is durably stored (RFC-0004 §3.4, A-058)."""

    packet_id: str
    status: str
    client_msg_id: str | None = None
    duplicate: bool | None = None
    duplicate_of: str | None = None
    received_at: int | None = None
    relay_annotations: dict[str, object] | None = None


class Error(_Message, frozen=True, kw_only=True, tag="ERROR"):
    """A request was refused (RFC-0004 §3.5, §6); `errors.retry_advice` says what to do next.

    `cursor` comes with `invalid_cursor` and the detail `log_reset` (additive, decision 38): the relay's log
    has lost its end since the requested cursor was issued, and `cursor` is the last place that is still good.
    It is absent if the relay cannot know that place.

    A relay of this project sends the four numbers of a limit as integers (R-314). RFC-0004 §6.1 does not
    require that of others, so a client must also read fractions (A-068). With `too_many_subscriptions` and
    `too_many_filter_bytes`, which are details of `rate_limited`, waiting does not help: there is room only
    after a subscription of this session ends.
    """

    code: str
    reason: str
    client_msg_id: str | None = None
    subscription_id: str | None = None
    detail: str | None = None
    retry_after: _Number | None = None
    limit: _Number | None = None
    remaining: _Number | None = None
    window_seconds: _Number | None = None
    max_bytes: int | None = None
    cursor: str | None = None

    @property
    def wait_seconds(self) -> int | None:
        """`retry_after` in whole seconds, rounded up."""
        return None if self.retry_after is None else math.ceil(self.retry_after)


class AuthChallenge(_Message, frozen=True, kw_only=True, tag="AUTH_CHALLENGE"):
    """The challenge that the relay wants signed (RFC-0004 §3.7)."""

    challenge: str
    server_id: str
    expires_at: int
    extensions: list[str] | None = None


class AuthOk(_Message, frozen=True, kw_only=True, tag="AUTH_OK"):
    """The session is authenticated as `author_id`, with exactly these capabilities (RFC-0004 §3.7).

    A relay that enforces no capabilities may omit them (R-285).
    """

    author_id: str
    capabilities: list[str] | None = None
    client_msg_id: str | None = None
    extensions: list[str] | None = None


class EndOfHistory(_Message, frozen=True, kw_only=True, tag="END_OF_HISTORY"):
    """All history has been sent (additive, A-047), or, if `complete` is false, as much as `limit` allows.

    `cursor` is always present: the cursor of the last historical packet sent, else the cursor requested. With
    neither, it is the end of the log if the order is ascending and `complete` is true, otherwise null.
    """

    subscription_id: str
    complete: bool
    cursor: str | UnsetType | None = UNSET
    client_msg_id: str | None = None


class Moderated(_Message, frozen=True, kw_only=True, tag="MODERATED"):
    """The answer to `Moderate`: whether a ruling changed anything, or a page of entries.

    An entry of `list` has kind, subject, reason, actor, expires_at and created_at. An entry of `log` has
    number, at, actor, via, act, kind, subject, reason, before and after. An entry of `sessions` has id,
    opened_at, address, identity, subscriptions, publishes, events, held_bytes and own, which is true for the
    session that asks.

    With `sessions`, `total` counts all open sessions and `silent` the processes that did not answer: their
    sessions are neither listed nor counted.
    """

    action: str
    client_msg_id: str | None = None
    changed: bool | None = None
    entries: list[dict[str, object]] | None = None
    next: str | None = None
    total: int | None = None
    silent: int | None = None


class Reconciled(_Message, frozen=True, kw_only=True, tag="RECONCILED"):
    """The answer to `Reconcile`: the next message of negentropy, in hex. It contains nothing about ranges in
    which both sides have the same packets.
    """

    message: str
    client_msg_id: str | None = None


ClientMessage = Subscribe | Unsubscribe | Publish | Auth | Moderate | Reconcile
RelayMessage = Event | Ok | Error | AuthChallenge | AuthOk | EndOfHistory

_CLIENT_DECODER: msgspec.json.Decoder[ClientMessage] = msgspec.json.Decoder(ClientMessage)
# Members of any type have their floats read by Python: msgspec takes a hundred times as long for `1.5e300`.
_MODERATED_DECODER: msgspec.json.Decoder[Moderated | Error] = msgspec.json.Decoder(
    Moderated | Error, float_hook=float
)
_RECONCILED_DECODER: msgspec.json.Decoder[Reconciled | Error] = msgspec.json.Decoder(Reconciled | Error)
_RELAY_DECODER: msgspec.json.Decoder[RelayMessage] = msgspec.json.Decoder(RelayMessage, float_hook=float)
_ENCODER = msgspec.json.Encoder()
_CLIENT_TYPES = frozenset(kind.__struct_config__.tag for kind in get_args(ClientMessage))
_RELAY_TYPES = frozenset(kind.__struct_config__.tag for kind in get_args(RelayMessage))


class _Ids(msgspec.Struct, gc=False):
    """The members that an error reply needs, from a message that failed to decode.

    They are kept raw: a value that is not a short string could take a second to decode.
    """

    type: Raw = Raw(b"null")
    client_msg_id: Raw = Raw(b"null")
    subscription_id: Raw = Raw(b"null")


_IDS_DECODER = msgspec.json.Decoder(_Ids)
_ID_DECODER = msgspec.json.Decoder(str)
_OPENING_BRACE = ord("{")
_LONGEST_ID_TEXT = 6 * MAX_ID_BYTES + 2  # each byte of an id takes at most one escape of six bytes


def encode(message: ClientMessage | RelayMessage | Moderated | Reconciled) -> bytes:
    """Encode a message as the UTF-8 text of one frame."""
    return _ENCODER.encode(message)


def decode_client_message(data: bytes | bytearray | memoryview) -> ClientMessage:
    """Decode one text frame that a client sent.

    Raises `InvalidMessage`: `detail` is `malformed_json` if the frame is not a JSON object, `unknown_type` if
    the type is missing or unknown, None if the message has the wrong shape.
    """
    try:
        message = _CLIENT_DECODER.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise _explain(data, error, _CLIENT_TYPES) from None
    _check_id(message.client_msg_id, "client_msg_id", message)
    if isinstance(message, Publish):
        if memoryview(message.packet)[0] != _OPENING_BRACE:
            raise InvalidMessage("PUBLISH: packet is not an object", client_msg_id=message.client_msg_id)
    elif isinstance(message, Subscribe | Unsubscribe):
        _check_id(message.subscription_id, "subscription_id", message)
        if not message.subscription_id:
            raise InvalidMessage(
                "subscription_id must not be empty",
                client_msg_id=message.client_msg_id,
                subscription_id=message.subscription_id,
            )
    return message


def decode_relay_message(data: bytes | bytearray | memoryview | str) -> RelayMessage:
    """Decode one text frame that a relay sent. Raises `InvalidMessage` as `decode_client_message` does."""
    try:
        return _RELAY_DECODER.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise _explain(data, error, _RELAY_TYPES) from None


def decode_moderated(data: bytes | bytearray | memoryview | str) -> Moderated | Error | None:
    """The answer to a `Moderate` in a relay's text frame; None for any other message. Never raises.

    Only a client that sent a `Moderate` needs it: `decode_relay_message` does not know `Moderated`.
    """
    try:
        return _MODERATED_DECODER.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None


def decode_reconciled(data: bytes | bytearray | memoryview | str) -> Reconciled | Error | None:
    """The answer to a `Reconcile` in a relay's text frame; None for any other message. Never raises.

    Only a relay that sent a `Reconcile` needs it: `decode_relay_message` does not know `Reconciled`.
    """
    try:
        return _RECONCILED_DECODER.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None


def read_ids(data: bytes | bytearray | memoryview) -> tuple[str | None, str | None]:
    """The `client_msg_id` and `subscription_id` of a message, as far as they can be read. Never raises."""
    try:
        ids = _IDS_DECODER.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None, None
    return _readable_id(ids.client_msg_id), _readable_id(ids.subscription_id)


def _check_id(value: str | None, name: str, message: ClientMessage) -> None:
    if value is not None and not _is_short(value):
        error = InvalidMessage(f"{name} is longer than {MAX_ID_BYTES} bytes")
        if name != "client_msg_id":
            error.client_msg_id = message.client_msg_id
        elif isinstance(message, Subscribe | Unsubscribe) and _is_short(message.subscription_id):
            error.subscription_id = message.subscription_id
        raise error


def _is_short(text: str) -> bool:
    # A character takes at most four bytes, so a short text need not be encoded to be measured.
    return len(text) <= MAX_ID_BYTES // 4 or len(text.encode()) <= MAX_ID_BYTES


def _explain(
    data: bytes | bytearray | memoryview | str, error: Exception, known: frozenset[str]
) -> InvalidMessage:
    """Turn a failed decode into a refusal that the peer can use, with the ids that could still be read."""
    try:
        ids = _IDS_DECODER.decode(data)
        type_, client_msg_id, subscription_id = map(
            _readable_id, (ids.type, ids.client_msg_id, ids.subscription_id)
        )
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return InvalidMessage("the frame is not one JSON object in UTF-8", detail="malformed_json")
    if type_ not in known:
        return InvalidMessage(
            "the message type is missing or not known here",
            detail="unknown_type",
            client_msg_id=client_msg_id,
        )
    return InvalidMessage(
        f"{type_}: {_sentence(error)}", client_msg_id=client_msg_id, subscription_id=subscription_id
    )


def _sentence(error: Exception) -> str:
    """What msgspec reports about a member: its place and the expected type, never its value."""
    if not isinstance(error, msgspec.ValidationError):
        return "malformed"
    sentence = str(error)
    if sentence.startswith("Invalid "):  # the only kind that quotes the value, at any length
        return f"Value not allowed - at {sentence.rpartition(' - at ')[2]}"
    return sentence


def _readable_id(raw: Raw) -> str | None:
    if memoryview(raw).nbytes > _LONGEST_ID_TEXT:
        return None
    try:
        value = _ID_DECODER.decode(raw)
    except msgspec.ValidationError:  # not a string
        return None
    return value if _is_short(value) else None
