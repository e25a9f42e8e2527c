"""How `strata channel` shows a conversation without a terminal: plain lines, or JSON lines."""

from __future__ import annotations

import base64
import dataclasses
from datetime import UTC, datetime
from typing import Protocol, Self

from strata.channels.reliable.events import (
    ChannelEvent,
    IrretrievableMessage,
    MessageReceived,
    MessagesUndecryptable,
    SenderIdConflict,
)
from strata.tools.cli import output
from strata.tools.cli.outbox import OwnMessage

__all__ = ["ChatView", "JsonLines", "PlainLines", "event_record", "text_of"]


class ChatView(Protocol):
    """The display of a conversation, and an asynchronous context manager."""

    async def __aenter__(self) -> Self: ...

    async def __aexit__(self, *_exception: object) -> None: ...

    def received(self, message: MessageReceived) -> None:
        """A message of another participant."""
        ...

    def own(self, message: OwnMessage) -> None:
        """A message of the user, new or in a new state."""
        ...

    def event(self, event: ChannelEvent, own: OwnMessage | None) -> None:
        """Any other event of the channel; `own` is the user's message that it concerns, if any."""
        ...

    def note(self, text: str) -> None:
        """Something that the user should know."""
        ...

    def online(self, online: bool) -> None:
        """Whether a relay can be reached; called when that changes."""
        ...

    def ended(self) -> None:
        """The input has ended; the program waits for the messages in flight."""
        ...


def text_of(payload: bytes) -> str:
    """A payload on one line; a payload that is not text is shown as its size."""
    try:
        return output.harmless(payload.decode())
    except UnicodeDecodeError:
        return f"({len(payload)} bytes)"


def sender_of(sender_id: str) -> str:
    """The name of a sender on one line; of a long name only the end, which differs from key to key."""
    name = output.harmless(sender_id)
    return name if len(name) <= 24 else f"…{name[-8:]}"


def author_of(message: MessageReceived) -> str:
    """Who sent a message, on one line: the sender's name, and the end of the DID that signed it."""
    did, _, device = message.sender_id.partition("#")
    if message.author is None or message.author == message.sender_id:
        return sender_of(message.sender_id)
    if did == message.author:
        return f"{sender_of(did)}#{sender_of(device)}"
    return f"{sender_of(message.sender_id)} ({sender_of(message.author)})"


def sent_at(message: MessageReceived) -> float:
    """When a message was sent, in Unix seconds; if that is unknown, when it arrived."""
    return (message.timestamp if message.sent_at is None else message.sent_at) / 1000


def trouble_of(event: ChannelEvent) -> str | None:
    """What a user should know about an event beyond the states of messages, if anything."""
    match event:
        case IrretrievableMessage():
            who = sender_of(event.sender_id) if event.sender_id else "somebody"
            return f"a message of {who} could not be had from anybody"
        case SenderIdConflict():
            return event.reason
        case MessagesUndecryptable():
            return "messages come in that this key does not open"
    return None


def event_record(event: ChannelEvent, own: OwnMessage | None = None) -> dict[str, object]:
    """An event for programs. A payload is `text`, or `base64` if it is not UTF-8; hashes are 0x and hex."""
    record: dict[str, object] = {"event": event.name}
    if own is not None and own.line is not None:
        record["line"] = own.line
    for field in dataclasses.fields(event):
        value = getattr(event, field.name)
        if field.name == "payload":
            try:
                record["text"] = value.decode()
            except UnicodeDecodeError:
                record["base64"] = base64.b64encode(value).decode()
        elif isinstance(value, bytes):
            record[field.name] = f"0x{value.hex()}"
        else:
            record[field.name] = value
    if isinstance(event, MessageReceived):
        record |= {"device": event.device, "order": event.order}
    return record


class _Lines:
    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_exception: object) -> None:
        pass

    def note(self, text: str) -> None:
        output.note(text)

    def online(self, online: bool) -> None:
        output.note("a relay is connected again" if online else "no relay can be reached; messages wait")

    def ended(self) -> None:
        pass


class PlainLines(_Lines):
    """A line for each message received and for each new state of a message of the user."""

    def received(self, message: MessageReceived) -> None:
        """Print when and by whom the message was sent, and its text."""
        at = output.utc(sent_at(message))
        output.write_line(f"{at}  {author_of(message)}  {text_of(message.payload)}")

    def own(self, message: OwnMessage) -> None:
        """Print the time, the number of the input line, the state and the message."""
        line = "-" if message.line is None else message.line
        said = f"[{line}] {message.state}  {message.text}"
        output.write_line(f"{datetime.now(UTC):%Y-%m-%d %H:%M:%SZ}  {output.harmless(said)}")

    def event(self, event: ChannelEvent, own: OwnMessage | None) -> None:
        """Report what `trouble_of` finds; the states of messages show everything else."""
        if (trouble := trouble_of(event)) is not None:
            self.note(f"warning: {trouble}")


class JsonLines(_Lines):
    """One object for each event, under its own name."""

    def received(self, message: MessageReceived) -> None:
        """Print `message-received`; `reliable:message:received` says the same and is left out."""
        output.write_record(event_record(message))

    def own(self, message: OwnMessage) -> None:
        """Print nothing: the events report the states."""

    def event(self, event: ChannelEvent, own: OwnMessage | None) -> None:
        """Print the event."""
        output.write_record(event_record(event, own))
