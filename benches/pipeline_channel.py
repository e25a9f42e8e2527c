"""One hot channel: the memory that a report on reliability holds as the channel grows.

Participants take turns; each message names the two before it, and every tenth packet repeats a message. The
packets are not signed, since the report does not look at signatures.
"""

from __future__ import annotations

import base64
import json
import shutil
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from blake3 import blake3
from strata.channels.messaging.binding import PROFILE
from strata.channels.sds import HistoryEntry, SdsMessage

from benches.job_memory import job_command, run
from benches.measures import Measure, tenfold
from benches.pipeline_lakes import add_rows
from benches.pipeline_packets import Row, author, unsigned

__all__ = ["measure", "messages"]

_TARGET_MB = 2_000
_DAY = 86_400
_FIRST = 100_000
_TOPIC = "/bench/1/room/proto"
_PARTICIPANTS = 20
_AGAIN = 10
"""The last of every ten packets repeats the message before it."""


def measure(rows: int, folder: Path, say: Callable[[str], None]) -> list[Measure]:
    """The figures for channels of 10⁵, 10⁶, … and `rows` packets, all of one day."""
    day = int(time.time()) // _DAY - 1
    measures: list[Measure] = []
    least: float | None = None
    for size in tenfold(_FIRST, rows):
        lake = folder / "channel-lake"
        say(f"channel: making {size:,} packets")
        add_rows(lake, partial(messages, rows=size, at=day * _DAY), size, day)
        ran = run(job_command("reliability", lake, "--output", str(folder / "channel-report")))
        told = json.loads(ran.told.splitlines()[-1])
        if told["messages"] != size - size // _AGAIN or told["gaps"] or told["unreadable"]:
            raise SystemExit(f"the report is not exact: {told}")
        say(
            f"channel: {size:,} packets: {ran.peak_mb:,.0f} MB (JVM {ran.java_mb:,.0f}, Python "
            f"{ran.python_mb:,.0f}), {ran.seconds:,.0f} s"
        )
        least = least or ran.python_mb
        details = ran.details | {"packets/s": size / ran.seconds}
        measures += [
            Measure(
                "channel",
                f"{size:,} packets of one channel, all Python processes, peak",
                ran.python_mb,
                "MB",
                _TARGET_MB,
                at_most=True,
                limit=least,
                limit_name="of the smallest",
            ),
            Measure(
                "channel",
                f"{size:,} packets of one channel, all processes, peak",
                ran.peak_mb,
                "MB",
                details=details,
            ),
        ]
        for done in (lake, folder / "channel-report"):
            shutil.rmtree(done)
    return measures


def messages(numbers: range, *, rows: int, at: int) -> list[Row]:
    """The packets with these numbers in a channel of `rows`, spread over a day."""
    return [_packet(number, at + number * (_DAY - 1) // rows) for number in numbers]


def _packet(number: int, at: int) -> Row:
    message = number - 1 if number % _AGAIN == _AGAIN - 1 else number
    who = message % _PARTICIPANTS
    # One of the two before may be a repetition, which is not a separate message.
    earlier = [
        one - 1 if one % _AGAIN == _AGAIN - 1 else one for one in (message - 2, message - 1) if one >= 0
    ]
    history = tuple(HistoryEntry(_name(one)) for one in dict.fromkeys(earlier))
    sds = SdsMessage(
        f"participant-{who}", _name(message), "room", message + 1, history, None, (), b"a few words"
    )
    content = {"type": _TOPIC, "profile": PROFILE, "payload": base64.b64encode(sds.encode()).decode()}
    return unsigned(author(who).did.encode(), content, at, number)


def _name(message: int) -> str:
    return blake3(b"message %d" % message).hexdigest()
