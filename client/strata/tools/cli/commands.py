"""The work of `strata keygen`, `publish`, `subscribe` and `get`."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path

from strata.channels.connecting import Relay
from strata.protocol.errors import Closed, ConnectionFailed, StrataError
from strata.protocol.ids import Identity
from strata.protocol.times import moment
from strata.relays.connection import LogReset, Options, Published, Subscription
from strata.relays.connection.values import RESUME_MARGIN_SECONDS
from strata.tools.cli import output
from strata.tools.cli.arguments import content_of, content_of_line
from strata.tools.cli.lines import size_of_stdin, stdin_lines
from strata.tools.cli.position import PositionFile, PositionKeeper
from strata.tools.cli.running import run
from strata.tools.cli.target import Target, save_identity

__all__ = ["get", "keygen", "options_within", "publish", "subscribe"]

_OPTIONS = Options(connect_timeout=5.0)
"""For commands without a timeout of their own; see `options_within`."""

Line = tuple[int, Mapping[str, object] | ValueError]
"""The number of an input line, and its content or the error in it."""
Running = asyncio.Queue[tuple[int, asyncio.Task[Published | StrataError]] | None]
"""Publishes in progress with their line numbers, in the order of the input; None ends the queue."""
_ALONE = 0
"""Stands for a line number if the packet comes from the command line."""


def options_within(timeout: float) -> Options:
    """How to connect for a command that gives up after `timeout` seconds."""
    return dataclasses.replace(_OPTIONS, connect_timeout=min(_OPTIONS.connect_timeout, timeout))


def keygen(path: Path, *, as_json: bool) -> None:
    """Make an identity and write it to a new file."""
    identity = Identity.generate()
    save_identity(identity, path)
    if as_json:
        output.write_record({"did": identity.did, "path": str(path)})
    else:
        output.write_line(identity.did)
        output.write_key_file(path)


def publish(
    target: Target,
    *,
    type: str,
    text: str | None,
    content: str | None,
    timeout: float,
    as_json: bool,
) -> None:
    """Publish one packet, or one for each line of stdin."""
    contents: AsyncIterator[Line] | None = None  # stdin
    if text is not None:
        contents = _one({"type": type, "text": text})
    elif content is not None:
        try:
            contents = _one(content_of(content, type))
        except ValueError as error:
            output.misuse(f"--content: {error}")
    run(_publish(target, contents, type=type, timeout=timeout, as_json=as_json))


def subscribe(
    target: Target,
    *,
    authors: tuple[str, ...],
    types: tuple[str, ...],
    since: str | None,
    until: str | None,
    limit: int | None,
    live: bool,
    state: Path | None,
    as_json: bool,
) -> None:
    """Print the packets of a subscription."""
    now = time.time()
    for author in authors:
        output.require_did(author, "--author: ")
    try:
        since_at = None if since is None else moment(since, now)
        until_at = None if until is None else moment(until, now)
    except ValueError as error:
        output.misuse(error)
    if live and until is not None:
        output.misuse("--until is for stored packets: add --no-live")
    run(
        _subscribe(
            target,
            PositionFile(state) if state else None,
            lambda relay, cursor, fallback, on_log_reset: relay.subscribe(
                on_log_reset=on_log_reset,
                authors=authors,
                types=types,
                live=live,
                # With a state file, some of what comes may not be printed.
                limit=None if live or state else limit,
                cursor=cursor,
                cursor_fallback_since=fallback,
                since=since_at,
                until=until_at,
            ),
            limit=limit,
            as_json=as_json,
        )
    )


def get(target: Target, packet_id: str, *, timeout: float, as_json: bool) -> None:
    """Print one packet."""
    output.require_packet_id(packet_id)
    run(_get(target, packet_id, timeout=timeout, as_json=as_json))


async def _one(content: Mapping[str, object]) -> AsyncIterator[Line]:
    yield _ALONE, content


def _where(number: int) -> str:
    return "" if number == _ALONE else f"line {number}: "


async def _from_stdin(type: str, progress: output.ProgressBar) -> AsyncIterator[Line]:
    """The number and content of each line, or the error in it; empty lines are skipped."""
    number = 0
    async for line in stdin_lines():
        number += 1
        progress.advance(len(line) + 1)
        try:
            text = line.decode().rstrip("\r")
            if text:
                yield number, content_of_line(text, type)
        except UnicodeDecodeError:
            yield number, ValueError("the line is not UTF-8")
        except ValueError as error:
            yield number, error


async def _publish(
    target: Target,
    contents: AsyncIterator[Line] | None,
    *,
    type: str,
    timeout: float,
    as_json: bool,
) -> int:
    """Publish many packets at a time, and print the results in the order of the input."""
    progress = output.ProgressBar("publishing", None if contents else size_of_stdin())
    if contents is None:
        contents = _from_stdin(type, progress)
    unreadable = 0
    running: Running = asyncio.Queue(_OPTIONS.max_in_flight)  # with this many in progress, reading waits
    try:
        with progress:
            async with (
                target.connect(options_within(timeout)) as relay,
                asyncio.TaskGroup() as tasks,
            ):
                reporter = tasks.create_task(_report(running, as_json=as_json), name="strata-report")
                async for number, content in contents:
                    if isinstance(content, ValueError):
                        output.note(f"error: {_where(number)}{content}")
                        unreadable += 1
                    else:
                        attempt = tasks.create_task(_attempt(relay, content, timeout), name="strata-publish")
                        await running.put((number, attempt))
                await running.put(None)
            failed = unreadable + reporter.result()
    except ExceptionGroup as group:
        raise group.exceptions[0] from None
    return 1 if failed else 0


async def _attempt(relay: Relay, content: Mapping[str, object], timeout: float) -> Published | StrataError:
    try:
        return await relay.post(content, timeout=timeout)
    except StrataError as error:
        return error


async def _report(running: Running, *, as_json: bool) -> int:
    """Print each result in turn and return how many failed. Raises an error that ends the whole command."""
    failed = 0
    while (item := await running.get()) is not None:
        number, attempt = item
        result = await attempt
        if isinstance(result, ConnectionFailed | Closed):
            raise result
        if isinstance(result, StrataError):
            output.note(f"error: {_where(number)}{result}")
            failed += 1
        elif as_json:
            output.write_record(
                {
                    "packet_id": result.packet_id,
                    "received_at": result.received_at,
                    "duplicate": result.duplicate,
                    "queued": result.queued,
                    "downgraded_to": result.downgraded_to,
                }
            )
        else:
            output.write_line(result.packet_id)
        await output.flushed()
    return failed


async def _subscribe(
    target: Target,
    position_file: PositionFile | None,
    begin: Callable[[Relay, str | None, int | None, Callable[[LogReset], None]], Subscription],
    *,
    limit: int | None,
    as_json: bool,
) -> int:
    position = position_file.load() if position_file else None
    if position is not None and position.relay != target.url:
        raise ValueError(f"the state file belongs to {position.relay}; use another one for {target.url}")
    cursor = position.cursor if position else None
    fallback = position.received_at - RESUME_MARGIN_SECONDS if position else None
    printed = 0

    def log_was_reset(reset: LogReset) -> None:
        output.note(
            "warning: the relay's log has lost its end (an older backup was put back?); packets that it had "
            "acknowledged may be missing"
        )
        if as_json:
            output.write_record({"log_reset": dataclasses.asdict(reset)})

    async with (
        target.connect(_OPTIONS) as relay,
        begin(relay, cursor, fallback, log_was_reset) as deliveries,
    ):
        with PositionKeeper(target.url, position_file, position) as keeper:
            async for delivery in deliveries:
                is_new = not keeper.has_printed(delivery)
                if is_new:
                    output.write_delivery(delivery, as_json=as_json)
                    await output.flushed()
                keeper.printed(delivery)
                printed += is_new
                if printed == limit:
                    break
        statistics = relay.statistics
        failed = statistics.events_invalid + statistics.events_tampered + statistics.events_expired
        if dropped := failed + statistics.events_unasked:
            output.note(
                f"warning: {dropped} packets failed verification or were not asked for, and were dropped"
            )
    return 0


async def _get(target: Target, packet_id: str, *, timeout: float, as_json: bool) -> int:
    ends_at = time.monotonic() + timeout
    async with target.connect(options_within(timeout)) as relay:
        delivery = await relay.get(packet_id, timeout=ends_at - time.monotonic())
    if delivery is None:
        output.note(f"error: the relay does not have {packet_id}")
        return 1
    output.write_delivery(delivery, as_json=as_json)
    return 0
