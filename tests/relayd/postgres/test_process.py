"""The process of the embedded server: whatever prevents its start is reported to its caller."""

from __future__ import annotations

import errno
import os
import subprocess
from pathlib import Path
from typing import NoReturn

import pytest

from relayd.postgres.process import ServerProcess


@pytest.mark.parametrize("what", ["no file", "no process", "no log"])
async def test_what_keeps_a_server_from_starting_is_told_and_holds_nobody_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
):
    """The event loop waits for a thread's report: a relay whose server has died would hang permanently."""

    def refused(*arguments: object, **named: object) -> NoReturn:
        raise OSError(errno.EMFILE, "Too many open files") if what == "no file" else ValueError("no process")

    log = tmp_path / "postgres.log"
    if what == "no log":
        log.mkdir()
    else:
        monkeypatch.setattr(*((os, "pipe") if what == "no file" else (subprocess, "Popen")), refused)
    files = len(os.listdir("/proc/self/fd"))
    server = ServerProcess()
    with pytest.raises((OSError, ValueError)):
        server.start(["/bin/true"], log, ())
    assert not server.is_alive() and len(os.listdir("/proc/self/fd")) == files
