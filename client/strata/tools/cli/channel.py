"""`strata channel`: a chat in a reliable channel that shows the state of each message.

`outbox` follows the user's own messages, `chatview` prints lines or JSON, and `chatscreen` draws the
terminal.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

import typer

from strata.channels.closing import close_after
from strata.channels.connecting import Pool, Relay, connect_pool
from strata.channels.encryption import GroupKey, GroupKeyEncryption, GroupKeyError
from strata.channels.messaging.node import check_content_topic
from strata.channels.messaging.values import ConnectionStatus, ConnectionStatusChange
from strata.channels.persistence import SqlitePersistence
from strata.channels.persistence.interface import (
    CorruptStore,
    PersistenceError,
    StoreInUse,
    WrongStoreVersion,
)
from strata.channels.reliable import (
    CHANNEL_EVENTS,
    CHANNEL_STATUS_EVENTS,
    MessageReceived,
    NotSent,
    ReliableChannel,
    ReliableMessageReceived,
    SegmentDoesNotFit,
)
from strata.channels.reliable.events import ChannelEvent
from strata.channels.sds.messages import check_id
from strata.protocol import ids
from strata.protocol.errors import StrataError
from strata.relays.connection import Options
from strata.relays.pool import PoolOptions
from strata.tools.cli import output
from strata.tools.cli.arguments import payload_of_line
from strata.tools.cli.chatscreen import ChatScreen
from strata.tools.cli.chatview import ChatView, JsonLines, PlainLines
from strata.tools.cli.lines import stdin_lines
from strata.tools.cli.outbox import ChatOutbox
from strata.tools.cli.running import run
from strata.tools.cli.target import Authenticate, Target, load_identity

__all__ = ["ChatRequest", "channel", "channel_key"]

_CONNECT_TIMEOUT = 5.0
_LOOK_FOR_RELAY = 2.0
_MAX_UNSETTLED = 256
"""The most messages of the user in flight; the next one is then sent only when one of them has arrived."""
_ACKNOWLEDGE_GRACE = 3.5
"""How long after the last message received the channel has acknowledged it: half its acknowledgement timeout,
and the way to the relay."""
_LOOK_INTERVAL = 1.0
_LEAVE_TIMEOUT = 10.0
"""How long an interrupted chat waits for the relay to take the messages typed."""
_OTHER_EVENTS = tuple(
    name
    for name in (*CHANNEL_EVENTS, *CHANNEL_STATUS_EVENTS)
    if name not in (MessageReceived.name, ReliableMessageReceived.name)
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatRequest:
    """The options of the command line."""

    name: str
    topic: str
    relays: tuple[str, ...]
    identity: Path
    store: Path | None
    sender: str | None
    keys: tuple[Path, ...]
    timeout: float
    listen: bool
    authenticate: Authenticate
    pins: Path | None
    yes: bool
    as_json: bool
    join: Literal["history", "now"] = "history"


def channel(request: ChatRequest) -> None:
    """Take part in a channel until the input ends. Ends with exit code 2 for options that cannot work."""
    try:
        check_id("NAME", request.name)
        if request.sender is not None:
            check_id("--sender", request.sender)
        check_content_topic(request.topic)
    except ValueError as error:
        output.misuse(error)
    hook = _hook(request)
    try:
        identity = load_identity(request.identity)
    except typer.Exit:
        raise typer.Exit(output.USAGE) from None  # for this command, 1 means that something is undelivered
    targets = [
        Target.choose(
            relay, authenticate=request.authenticate, identity=identity, pins=request.pins, yes=request.yes
        )
        for relay in dict.fromkeys(request.relays)
    ]
    run(_Chat(request, targets, identity, hook).run())


def channel_key(path: Path, *, as_json: bool) -> None:
    """Make a group key and write it to a new file."""
    key = GroupKey.generate()
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        key.save(path)
    except FileExistsError:
        output.fail(f"{path} exists already and is not replaced; choose another file")
    except OSError as error:
        output.fail(f"cannot write {path}: {error.strerror}")
    if as_json:
        output.write_record({"key_id": f"0x{key.key_id.hex()}", "path": str(path)})
    else:
        output.write_line(f"group key 0x{key.key_id.hex()}\nkey file: {path}")
        output.write_line("Share it with the participants in secret: anyone who has it can read and write.")
        output.write_line(f"next: strata channel NAME --topic /chat/1/NAME/proto --key {path}")


def _hook(request: ChatRequest) -> GroupKeyEncryption | None:
    keys = []
    for path in request.keys:
        try:
            keys.append(GroupKey.load(path))
        except FileNotFoundError:
            output.misuse(
                f"there is no group key at {path}; copy the participants' one there, or make one with: "
                f"strata channel-key {path}"
            )
        except GroupKeyError as error:
            output.misuse(f"--key: {error}")
        except OSError as error:
            output.misuse(f"cannot read {path}: {error.strerror}")
    return GroupKeyEncryption(request.name, keys) if keys else None


class _Chat:
    """One run of the command."""

    def __init__(
        self,
        request: ChatRequest,
        targets: list[Target],
        identity: ids.Identity,
        hook: GroupKeyEncryption | None,
    ) -> None:
        self._request = request
        self._targets = targets
        self._identity = identity
        self._hook = hook
        self._outbox = ChatOutbox()
        self._changed = asyncio.Event()
        self._last_received = -math.inf
        self._unreadable = 0
        self._unread = 0
        self._online = True
        self._leave_seconds = min(request.timeout, _LEAVE_TIMEOUT)

    async def run(self) -> int:
        """Connect, talk, and wait until everything has arrived. Returns the exit code."""
        request = self._request
        try:
            async with AsyncExitStack() as stack:
                store = None
                if request.store is not None:
                    store = await stack.enter_async_context(await _open_store(request.store))
                relays, opening = await self._connect(stack)
                room = await stack.enter_async_context(_Opened(self._make(relays, store), self._leave))
                async with self._view(room) as view:
                    self._resume(room, view)
                    await self._talk(room, view, relays, opening)
        except ExceptionGroup as group:
            raise group.exceptions[0] from None
        finally:
            self._sum_up()
        if self._outbox.undelivered:
            return 1
        return output.USAGE if self._unreadable else 0

    # Opening.

    async def _connect(self, stack: AsyncExitStack) -> tuple[Relay | Pool, asyncio.Task[object] | None]:
        """The relays, and the task still connecting, if any: with a store, the user can write offline."""
        offline = self._request.store is not None
        options = Options(
            connect_timeout=math.inf if offline else _CONNECT_TIMEOUT,
            authenticate=self._request.authenticate,
            backoff_cap=5.0,
        )
        relays: Relay | Pool
        if len(self._targets) == 1:
            relays = self._targets[0].connect(options)
        else:
            urls = [target.url for target in self._targets]
            relays = connect_pool(
                urls, identity=self._identity, pins=self._request.pins, options=PoolOptions(relay=options)
            )
        if not offline:
            return await stack.enter_async_context(relays), None
        opening: asyncio.Task[object] = asyncio.create_task(relays.open(), name="strata-open")
        stack.push_async_callback(_give_up, opening, relays)
        await asyncio.wait([opening], timeout=_LOOK_FOR_RELAY)
        if opening.done():
            opening.result()
            return relays, None
        self._online = False
        return relays, opening

    def _make(self, relays: Relay | Pool, store: SqlitePersistence | None) -> Callable[..., ReliableChannel]:
        def make(**options: Any) -> ReliableChannel:
            return relays.channel(
                self._request.name,
                topic=self._request.topic,
                sender_id=self._request.sender,
                encryption=self._hook,
                persistence=store,
                join=self._request.join,
                # If the program dies before it has shown a message, the next start shows it.
                hand_over="at_least_once",
                auto_start=False,
                **options,
            )

        return make

    def _view(self, room: ReliableChannel) -> ChatView:
        if self._request.as_json:
            return JsonLines()
        if not self._hook:
            output.note("not encrypted: relays can read this channel; add --key FILE (strata channel-key)")
        output.note(f"in {output.harmless(room.channel_id)} as {output.harmless(room.sender_id)}")
        if not self._request.listen and ChatScreen.is_possible():
            return ChatScreen()
        return PlainLines()

    def _resume(self, room: ReliableChannel, view: ChatView) -> None:
        for each in room.sync_status().outstanding:
            # The earlier run reported its undelivered messages; this run does not wait for them.
            if not each.undelivered:
                view.own(self._outbox.resume(each.request_id, each.message_id))

    # Talking.

    async def _talk(
        self,
        room: ReliableChannel,
        view: ChatView,
        relays: Relay | Pool,
        opening: asyncio.Task[object] | None,
    ) -> None:
        health = relays.node.health_events
        on_status = health.on(ConnectionStatusChange.name, lambda change: self._tell_status(view, change))
        events = room.events(*_OTHER_EVENTS)
        try:
            async with asyncio.TaskGroup() as tasks:
                work = [self._hear(room, view), self._follow(events, view), self._watch(room, view)]
                background = [tasks.create_task(each, name="strata-chat") for each in work]
                if opening is not None:
                    background.append(tasks.create_task(_until_open(opening)))
                await room.start()
                number = 0
                if not self._online:
                    view.online(False)
                async for line in self._lines(view):
                    number += 1
                    await self._say(room, view, number, line)
                view.ended()
                self._leave_seconds = 0.0  # however this wait ends, there is no second one
                await self._settle()
                for task in background:
                    task.cancel()
        finally:
            health.off(ConnectionStatusChange.name, on_status)

    async def _lines(self, view: ChatView) -> AsyncIterator[bytes]:
        if self._request.listen:
            await asyncio.Event().wait()
        async for line in view.typed() if isinstance(view, ChatScreen) else stdin_lines():
            yield line

    async def _say(self, room: ReliableChannel, view: ChatView, number: int, line: bytes) -> None:
        try:
            payload = payload_of_line(line, as_json=self._request.as_json)
        except ValueError as error:
            self._unreadable += 1
            view.note(f"error: line {number}: {error}")
            return
        if not payload:
            return
        while self._outbox.unsettled >= _MAX_UNSETTLED:
            await self._wait()
        own = self._outbox.begin(room.get_message_id(payload), number, payload.decode(errors="replace"))
        view.own(own)
        await output.flushed()
        try:
            self._outbox.bind(await room.send(payload))
        except StrataError:
            return  # an event reports it

    async def _hear(self, room: ReliableChannel, view: ChatView) -> None:
        async for message in room:
            self._last_received = asyncio.get_running_loop().time()
            view.received(message)
            await output.flushed()

    async def _follow(self, events: AsyncIterator[ChannelEvent], view: ChatView) -> None:
        async for event in events:
            own = self._outbox.find(event)
            before = own.state if own is not None else ""
            if own is not None:
                own.apply(event)
            view.event(event, own)
            if own is not None and own.state != before:
                view.own(own)
                self._changed.set()
            await output.flushed()

    async def _watch(self, room: ReliableChannel, view: ChatView) -> None:
        """Warn about messages that cannot be read; without a key, no event reports them."""
        while True:
            await asyncio.sleep(_LOOK_INTERVAL)
            counts = room.statistics
            # Without a key, an encrypted message does not look like a message at all.
            count = counts.undecryptable if self._hook else counts.sds.undecodable
            if count and not self._unread:
                view.note(
                    "warning: something cannot be decrypted here: is --key the one that the others have?"
                    if self._hook
                    else "warning: something cannot be read here: if it is encrypted, add --key FILE"
                )
            self._unread = count

    def _tell_status(self, view: ChatView, change: ConnectionStatusChange) -> None:
        online = change.status is not ConnectionStatus.DISCONNECTED
        if online != self._online:
            self._online = online
            view.online(online)

    async def _settle(self) -> None:
        """Wait, up to the timeout, until the user's messages are delivered and received ones acknowledged."""
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(self._request.timeout):
                while self._outbox.unsettled:
                    await self._wait()
                await asyncio.sleep(self._last_received + _ACKNOWLEDGE_GRACE - loop.time())
        except TimeoutError:
            pass

    async def _wait(self) -> None:
        self._changed.clear()
        await self._changed.wait()

    async def _leave(self, room: ReliableChannel) -> None:
        """Close the channel, and keep the states of the user's messages up to date until it is closed."""
        for name in _OTHER_EVENTS:
            room.message_events.on(name, self._note_late)
        if self._leave_seconds and room.health.error is None and not room.sync_status().is_synced:
            output.note("sending what was typed; Ctrl-C ends at once")
        try:
            await room.close(timeout=self._leave_seconds)
        except NotSent:
            pass  # `_sum_up` reports it, from the states of the messages

    def _note_late(self, event: ChannelEvent) -> None:
        own = self._outbox.find(event)
        if own is not None:
            own.apply(event)

    def _sum_up(self) -> None:
        left = self._outbox.undelivered
        if not left:
            return
        held = sum(each.on_relay for each in left)
        what = f"{len(left)} of {len(self._outbox)} messages not confirmed by another participant"
        where = "all of them are on a relay" if held == len(left) else f"{held} of them are on a relay"
        kept = (
            "use --store FILE to have them sent again by a later run"
            if self._request.store is None
            else "the same command goes on with them"
        )
        output.note(f"warning: {what}; {where}; {kept}")


class _Opened:
    """A channel whose segments are small enough for the relay. Leaving the block closes it."""

    def __init__(
        self, make: Callable[..., ReliableChannel], leave: Callable[[ReliableChannel], Awaitable[None]]
    ) -> None:
        self._make = make
        self._leave = leave

    async def __aenter__(self) -> ReliableChannel:
        self._room = self._make()
        try:
            return await self._room.open()
        except SegmentDoesNotFit as error:
            if not error.largest:
                raise
            self._room = self._make(segment_size_bytes=error.largest)
            return await self._room.open()

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await close_after(exc, self._leave(self._room))


async def _open_store(path: Path) -> SqlitePersistence:
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        return await SqlitePersistence.open(path)
    except StoreInUse:
        output.fail(f"{path} is in use by another program: end that one, or give this one another --store")
    except (CorruptStore, WrongStoreVersion, PersistenceError, OSError) as error:
        output.misuse(f"--store: {error}; name another file")


async def _until_open(opening: asyncio.Task[object]) -> None:
    # The opening continues when the chat ends; closing the relay cancels it.
    await asyncio.shield(opening)


async def _give_up(opening: asyncio.Task[object], relays: Relay | Pool) -> None:
    opening.cancel()
    await asyncio.wait([opening])
    await relays.close()
