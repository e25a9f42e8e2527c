"""The standard streams of a program: every command has three, whatever it was started with."""

from __future__ import annotations

import io
import os
import sys

__all__ = ["BROKEN_PIPE", "forget_stdout", "open_standard_streams"]

BROKEN_PIPE = 141
"""The exit code of a program whose reader has gone: that of SIGPIPE in a shell."""

_STREAMS = (("stdin", "r"), ("stdout", "w"), ("stderr", "w"))


def open_standard_streams() -> None:
    """Put an empty stream in the place of each standard stream that the program was started without.

    Otherwise the next file or socket takes its number. What a library has to say to people would be written
    into that, and uvloop ends the whole process when it is to close a socket of such a number.
    """
    while (descriptor := os.open(os.devnull, os.O_RDWR)) < len(_STREAMS):
        os.set_inheritable(descriptor, True)  # as standard streams are
    os.close(descriptor)
    for name, mode in _STREAMS:
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # for good
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="backslashreplace")  # as stderr: not every locale has each character


def forget_stdout() -> None:
    """Write nothing more to stdout: it takes nothing, and the interpreter would complain as it ends."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
