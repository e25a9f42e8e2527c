"""`strata channel` on a terminal: messages scroll up, states change in place, and the user types below.

Settled messages are printed permanently. From the user's first unsettled message on, all lines stay in a
region that is redrawn with each change, which keeps the order and lets states change.
"""

from __future__ import annotations

import asyncio
import os
import sys
import zlib
from collections import deque
from collections.abc import AsyncIterator
from datetime import datetime
from typing import Any, Self

from rich.cells import cell_len
from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from strata.channels.reliable.events import ChannelEvent, MessageReceived
from strata.tools.cli import output
from strata.tools.cli.chatview import author_of, sent_at, text_of, trouble_of
from strata.tools.cli.lineeditor import LineEditor
from strata.tools.cli.outbox import OwnMessage, Stage

__all__ = ["ChatScreen"]

_COLOURS = ("cyan", "magenta", "yellow", "blue", "bright_cyan", "bright_magenta", "bright_blue")
_MARKS = {
    Stage.WAITING: ("·", "dim"),
    Stage.SENDING: ("…", "yellow"),
    Stage.SENDING_AGAIN: ("↻", "yellow"),
    Stage.SENT: ("✓", "default"),
    Stage.PERHAPS: ("✓", "default"),
    Stage.ACKNOWLEDGED: ("✓", "green"),
    Stage.DELIVERED: ("✓✓", "green"),
    Stage.FAILED: ("✗", "red"),
}
_MAX_LIVE = 12


class _Entry:
    """A line of the conversation."""

    def __init__(self, text: Text, own: OwnMessage | None = None) -> None:
        self._text = text
        self.own = own

    @property
    def is_settled(self) -> bool:
        return self.own is None or self.own.is_settled

    def render(self) -> Text:
        if self.own is None:
            return self._text.copy()  # `_draw` cuts it to one line
        mark, style = _MARKS[self.own.stage]
        return Text.assemble(self._text, "  ", (f"{mark} {output.harmless(self.own.state)}", style))


class ChatScreen:
    """The terminal. `async with` takes it over, and leaving the block restores it."""

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or Console()
        self._live = Live(
            console=self._console,
            auto_refresh=False,
            transient=True,
            redirect_stderr=False,
            redirect_stdout=False,
        )
        self._entries: deque[_Entry] = deque()
        self._shown: dict[OwnMessage, str] = {}
        """The user's messages that were printed permanently while unsettled, and their state at that time."""
        self._editor = LineEditor()
        self._typed: asyncio.Queue[bytes | None] = asyncio.Queue()
        self._online = True
        self._is_typing = True
        self._saved: Any = None

    @staticmethod
    def is_possible() -> bool:
        """Whether stdin and stdout are a terminal that can be drawn on."""
        try:
            import termios  # noqa: F401
        except ImportError:
            return False
        both = sys.stdin.isatty() and sys.stdout.isatty()
        return both and os.environ.get("TERM", "dumb") not in ("dumb", "unknown")

    async def __aenter__(self) -> Self:
        import termios
        import tty

        descriptor = sys.stdin.fileno()
        self._saved = termios.tcgetattr(descriptor)
        # Ctrl-C still interrupts; keys arrive one by one, and this class draws them.
        tty.setcbreak(descriptor, termios.TCSADRAIN)
        asyncio.get_running_loop().add_reader(descriptor, self._read)
        self._live.start()
        self._draw()
        return self

    async def __aexit__(self, *_exception: object) -> None:
        import termios

        asyncio.get_running_loop().remove_reader(sys.stdin.fileno())
        try:
            self._live.stop()
            for entry in self._entries:
                self._console.print(entry.render())
            self._entries.clear()
        finally:
            termios.tcsetattr(sys.stdin.fileno(), termios.TCSADRAIN, self._saved)

    async def typed(self) -> AsyncIterator[bytes]:
        """Each finished line, until Ctrl-D."""
        while (line := await self._typed.get()) is not None:
            yield line

    # The methods of a view.

    def received(self, message: MessageReceived) -> None:
        """Add a line; each sender has a colour."""
        colour = _COLOURS[zlib.crc32(message.sender_id.encode()) % len(_COLOURS)]
        said = (author_of(message), f"bold {colour}")
        self._add(_Entry(self._line(said, text_of(message.payload), sent_at(message))))

    def own(self, message: OwnMessage) -> None:
        """Add a line for a message, or change the state in its line."""
        before = self._shown.get(message)
        if before is not None:
            if message.is_settled:
                del self._shown[message]
                self._add(_Entry(Text(f"      {message.text[:40]}", "dim"), message))
        elif any(entry.own is message for entry in self._entries):
            self._settle()
        else:
            self._add(_Entry(self._line(("me", "bold green"), output.harmless(message.text)), message))

    def event(self, event: ChannelEvent, own: OwnMessage | None) -> None:
        """Report what `trouble_of` finds; the states of messages show everything else."""
        if (trouble := trouble_of(event)) is not None:
            self.note(trouble)

    def note(self, text: str) -> None:
        """Add a line from the program."""
        self._add(_Entry(Text(output.harmless(text), "yellow")))

    def online(self, online: bool) -> None:
        """Show the connection in the prompt."""
        self._online = online
        self._draw()

    def ended(self) -> None:
        """Replace the prompt with a line that says what the program is waiting for."""
        self._is_typing = False
        self._draw()

    # Drawing.

    def _line(self, who: tuple[str, str], text: str, at: float | None = None) -> Text:
        try:
            when = f"{datetime.now() if at is None else datetime.fromtimestamp(at):%H:%M}"
        except (ValueError, OverflowError, OSError):  # a time from a peer may be outside the calendar
            when = "--:--"
        return Text.assemble((f"{when} ", "dim"), who, " ", text)

    def _add(self, entry: _Entry) -> None:
        self._entries.append(entry)
        self._settle()

    def _settle(self) -> None:
        """Print settled lines permanently, and the oldest unsettled ones when there is no room."""
        room = max(1, min(_MAX_LIVE, self._console.height - 4))
        while self._entries and (self._entries[0].is_settled or len(self._entries) > room):
            entry = self._entries.popleft()
            if entry.own is not None and not entry.is_settled:
                self._shown[entry.own] = entry.own.state
            self._console.print(entry.render())
        self._draw()

    def _draw(self) -> None:
        lines = [entry.render() for entry in self._entries]
        for line in lines:
            line.truncate(max(1, self._console.width - 1), overflow="ellipsis")
        self._live.update(Group(*lines, self._prompt()), refresh=True)

    def _prompt(self) -> Text:
        if not self._is_typing:
            return Text("waiting until everything has arrived; Ctrl-C ends at once", "dim")
        sign = ("› ", "bold") if self._online else ("no relay, messages wait › ", "yellow")
        before, under = self._editor.text[: self._editor.at], self._editor.text[self._editor.at :]
        while cell_len(before) > max(8, self._console.width - cell_len(sign[0]) - 4):
            before = before[1:]
        prompt = Text.assemble(sign, before, (under[:1] or " ", "reverse"), under[1:])
        prompt.truncate(max(1, self._console.width - 1))
        return prompt

    def _read(self) -> None:
        data = os.read(sys.stdin.fileno(), 65_536)
        if not data:  # the terminal has gone away
            asyncio.get_running_loop().remove_reader(sys.stdin.fileno())
            self._typed.put_nowait(None)
            return
        for line in self._editor.feed(data):
            self._typed.put_nowait(None if line is None else line.encode())
        self._draw()
