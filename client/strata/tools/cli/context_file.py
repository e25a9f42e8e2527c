"""The file that keeps contexts: names for a relay, an identity and pins.

It is `strata/contexts.json` in the user's configuration folder ($XDG_CONFIG_HOME, else ~/.config). It names
key files and never holds a key. Only its owner can read it, since a relay's URL can be confidential.
"""

from __future__ import annotations

import difflib
import errno
import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Self

import msgspec

from strata.protocol.files import replace_file
from strata.protocol.text_files import utf8_of
from strata.tools.cli import output

__all__ = ["ContextFile", "SavedContext", "nearest"]

_is_name = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}").fullmatch


class SavedContext(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """A relay, and the key file and pins to use with it."""

    relay: str
    identity: str | None = None
    pins: str | None = None


class _Contents(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    current: str | None = None
    contexts: dict[str, SavedContext] = {}


_DECODER = msgspec.json.Decoder(_Contents)


def nearest(name: str, known: list[str]) -> str:
    """The end of an error about an unknown name: the nearest known one, or where to see them all."""
    matches = difflib.get_close_matches(name, known, n=1)
    return f"the nearest is {matches[0]}" if matches else "see all of them with: strata context list"


class ContextFile:
    """All contexts, and which one is in use. Changes reach the disk with `save`."""

    def __init__(self, path: Path, contents: _Contents) -> None:
        self._path = path
        self._contents = contents

    @classmethod
    def read(cls) -> Self:
        """The user's contexts; none if there is no file.

        Raises `OSError`, and `ValueError` for a file that holds something else.
        """
        path = _configuration_folder() / "strata" / "contexts.json"
        if not path.is_absolute():
            return cls(path, _Contents())
        try:
            return cls(path, _DECODER.decode(utf8_of(path.read_bytes())))
        except FileNotFoundError:
            return cls(path, _Contents())
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            raise ValueError(f"{path} holds no contexts ({error}); mend or remove it") from None

    @classmethod
    def read_or_exit(cls) -> Self:
        """The user's contexts. Ends the command with an error message if the file is unusable."""
        try:
            return cls.read()
        except (OSError, ValueError) as error:
            output.misuse(error)

    @classmethod
    @contextmanager
    def changed_or_exit(cls) -> Iterator[Self]:
        """The user's contexts, to be changed inside the block and saved at its end.

        Other processes that want to change them wait (except on Windows). Ends the command with an error
        message if the file is unusable.
        """
        path = _configuration_folder() / "strata" / "contexts.json"
        try:
            if not path.is_absolute():
                raise FileNotFoundError(errno.ENOENT, "this user has no home folder; set HOME")
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            with _alone_in(path.parent):
                file = cls.read_or_exit()
                yield file
                file.save()
        except OSError as error:
            output.fail(f"cannot write {path}: {error.strerror}")

    @property
    def path(self) -> Path:
        """The path of the file."""
        return self._path

    @property
    def current(self) -> str | None:
        """The name of the context in use."""
        return self._contents.current

    @property
    def contexts(self) -> dict[str, SavedContext]:
        """All contexts by name."""
        return dict(self._contents.contexts)

    def chosen(self, name: str | None) -> SavedContext | None:
        """The context of this name or, without a name, the one in use, if any.

        Ends the command with exit code 2 for an unknown name.
        """
        name = self.current if name is None else name
        return None if name is None else self.find(name)

    def find(self, name: str) -> SavedContext:
        """The context of this name. Ends the command with exit code 2 if there is none."""
        context = self._contents.contexts.get(name)
        if context is None:
            known = list(self._contents.contexts)
            output.misuse(f"there is no context {output.harmless(name)}; {nearest(name, known)}")
        return context

    def add(self, name: str, context: SavedContext) -> None:
        """Add a context under a new name. Raises `ValueError` for a name that is taken or unusable."""
        if not _is_name(name):
            raise ValueError("a name has up to 64 letters, digits, dots, dashes and underscores")
        if name in self._contents.contexts:
            raise ValueError(f"there is a context {name} already; remove it first")
        try:
            msgspec.json.encode(context)
        except UnicodeEncodeError:
            raise ValueError("a context cannot keep a path that is not UTF-8; rename the file") from None
        self._contents.contexts[name] = context

    def use(self, name: str | None) -> None:
        """Put a known context in use; None puts no context in use."""
        self._contents.current = name

    def remove(self, name: str) -> None:
        """Remove a known context; if it was in use, no context is in use afterwards."""
        del self._contents.contexts[name]
        if self._contents.current == name:
            self._contents.current = None

    def save(self) -> None:
        """Replace the file; see `changed_or_exit`. Raises `OSError`."""
        self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        body = msgspec.json.format(msgspec.json.encode(self._contents), indent=2)
        replace_file(self._path, body + b"\n", mode=0o600)


@contextmanager
def _alone_in(folder: Path) -> Iterator[None]:
    """Wait until no other process is in such a block for this folder. Raises `OSError`."""
    if sys.platform == "win32":  # Windows cannot lock a folder
        yield
        return
    import fcntl

    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _configuration_folder() -> Path:
    """$XDG_CONFIG_HOME, unless it is relative (XDG Base Directory Specification), else ~/.config.

    The result is relative only if the user has no home folder.
    """
    given = Path(os.environ.get("XDG_CONFIG_HOME", ""))
    return given if given.is_absolute() else Path(os.path.expanduser("~/.config"))
