"""The standard streams of a program: makes sure that a command has all three."""

from __future__ import annotations

import io
import os
import sys

__all__ = ["BROKEN_PIPE", "forget_stdout", "open_standard_streams"]

BROKEN_PIPE = 141
"""The exit code of a program whose reader has closed the pipe: that of SIGPIPE in a shell."""

_STREAMS = (("stdin", "r"), ("stdout", "w"), ("stderr", "w"))


def open_standard_streams() -> None:
    """Open the null device in place of each standard stream that the program was started without.

    Otherwise the next file or socket would take its number: messages that a library prints would be written
    into that file, and uvloop ends the whole process when it closes a socket with such a number.
    """
    while (descriptor := os.open(os.devnull, os.O_RDWR)) < len(_STREAMS):
        os.set_inheritable(descriptor, True)  # as standard streams are
    os.close(descriptor)
    for name, mode in _STREAMS:
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # stays open until the process ends
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="backslashreplace")  # as stderr does: some locales lack characters


def forget_stdout() -> None:
    """Redirect stdout to the null device once its reader is gone: otherwise the interpreter would report an
    error as it exits."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
