"""`strata channel` on a terminal: messages scroll up, states change in place, and below one types.

What is settled is printed for good. From the first own message that is still on its way everything stays in
a region that is drawn anew with each change, so that the order is kept and its state can move.
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

from strata.channels.reliable.events import ChannelEvent, IrretrievableMessage, MessageReceived
from strata.tools.cli import output
from strata.tools.cli.chatview import sender_of, text_of
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
            return self._text.copy()  # it is cut to one line while it can change
        mark, style = _MARKS[self.own.stage]
        return Text.assemble(self._text, "  ", (f"{mark} {output.harmless(self.own.state)}", style))


class ChatScreen:
    """The terminal, from `async with` on; leaving it puts everything back as it was."""

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
        """Own messages that were printed for good while still on their way, and the state they had then."""
        self._editor = LineEditor()
        self._typed: asyncio.Queue[bytes | None] = asyncio.Queue()
        self._online = True
        self._is_typing = True
        self._saved: Any = None

    @staticmethod
    def is_possible() -> bool:
        """Whether this is a terminal that can be drawn on, at both ends."""
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
        # Ctrl-C still interrupts; keys come one by one, and what is typed is drawn here.
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
        """Each line as it is finished, until Ctrl-D."""
        while (line := await self._typed.get()) is not None:
            yield line

    # What a view is told.

    def received(self, message: MessageReceived) -> None:
        """A line with the sender in a colour of its own."""
        colour = _COLOURS[zlib.crc32(message.sender_id.encode()) % len(_COLOURS)]
        said = (sender_of(message.sender_id), f"bold {colour}")
        self._add(_Entry(self._line(said, text_of(message.payload), message.timestamp / 1000)))

    def own(self, message: OwnMessage) -> None:
        """A new line, or a new state in the one there is."""
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
        """Only what was lost: the rest is in the states."""
        if isinstance(event, IrretrievableMessage):
            who = sender_of(event.sender_id) if event.sender_id else "somebody"
            self.note(f"a message of {who} could not be had from anybody")

    def note(self, text: str) -> None:
        """A line of the program's own."""
        self._add(_Entry(Text(output.harmless(text), "yellow")))

    def online(self, online: bool) -> None:
        """Shown in the prompt."""
        self._online = online
        self._draw()

    def ended(self) -> None:
        """Instead of the prompt it says what is waited for."""
        self._is_typing = False
        self._draw()

    # Drawing.

    def _line(self, who: tuple[str, str], text: str, at: float | None = None) -> Text:
        when = datetime.now() if at is None else datetime.fromtimestamp(at)
        return Text.assemble((f"{when:%H:%M} ", "dim"), who, " ", text)

    def _add(self, entry: _Entry) -> None:
        self._entries.append(entry)
        self._settle()

    def _settle(self) -> None:
        """Print for good what can change no more, and what there is no room for."""
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
        if not data:  # the terminal has gone
            asyncio.get_running_loop().remove_reader(sys.stdin.fileno())
            self._typed.put_nowait(None)
            return
        for line in self._editor.feed(data):
            self._typed.put_nowait(None if line is None else line.encode())
        self._draw()
