"""Editing one line, key by key. No I/O: bytes from a terminal in, finished lines out."""

from __future__ import annotations

import codecs
import unicodedata
from collections.abc import Iterator

__all__ = ["END", "LineEditor"]

END = None
"""The value that `feed` yields for Ctrl-D on an empty line."""

_SEQUENCES = {
    "[D": "left",
    "OD": "left",
    "[C": "right",
    "OC": "right",
    "[H": "home",
    "OH": "home",
    "[1~": "home",
    "[F": "end",
    "OF": "end",
    "[4~": "end",
    "[3~": "delete",
}
_CONTROLS = {
    "\x01": "home",
    "\x05": "end",
    "\x02": "left",
    "\x06": "right",
    "\x08": "backspace",
    "\x7f": "backspace",
    "\x15": "kill",
    "\x17": "word",
}


class LineEditor:
    """The line being typed, and the position of the cursor in it."""

    def __init__(self) -> None:
        self.text = ""
        self.at = 0
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._escape: str | None = None

    def feed(self, data: bytes) -> Iterator[str | None]:
        """Take typed bytes, and yield each finished line and `END`."""
        for char in self._decoder.decode(data):
            if self._escape is not None:
                self._in_escape(char)
            elif char == "\x1b":
                self._escape = ""
            elif char in "\r\n":
                line, self.text, self.at = self.text, "", 0
                yield line
            elif char == "\x04":
                if not self.text:
                    yield END
                self._do("delete")
            elif char in _CONTROLS:
                self._do(_CONTROLS[char])
            elif unicodedata.category(char) != "Cc":
                self.text = self.text[: self.at] + char + self.text[self.at :]
                self.at += 1

    def _in_escape(self, char: str) -> None:
        assert self._escape is not None
        self._escape += char
        # A sequence is ESC [ parameters letter, or ESC O letter; anything else is a single key with Alt.
        if self._escape in ("[", "O") or (self._escape[0] == "[" and not "@" <= char <= "~"):
            return
        action, self._escape = _SEQUENCES.get(self._escape), None
        if action is not None:
            self._do(action)

    def _do(self, action: str) -> None:
        before, after = self.text[: self.at], self.text[self.at :]
        match action:
            case "left":
                self.at = max(0, self.at - 1)
                return
            case "right":
                self.at = min(len(self.text), self.at + 1)
                return
            case "home":
                self.at = 0
                return
            case "end":
                self.at = len(self.text)
                return
            case "backspace":
                before = before[:-1]
            case "delete":
                after = after[1:]
            case "kill":
                before = ""
            case "word":
                before = before.rstrip()[: before.rstrip().rfind(" ") + 1]
        self.text, self.at = before + after, len(before)
