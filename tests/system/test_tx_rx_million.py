"""A million messages between two processes, through a third that cuts the link every 100 ms."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.support.relay_process import environment

SECONDS = "0.1"


@contextmanager
def program(name: str, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """One of the programs in `tests.support`; it is ended with the block."""
    process = subprocess.Popen(
        [sys.executable, "-m", f"tests.support.{name}", *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environment({}),
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        for stream in (process.stdin, process.stdout):
            assert stream is not None
            stream.close()


def line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    text = process.stdout.readline()
    assert text, f"ended with {process.wait()}"
    return text.strip()


@pytest.mark.timeout(400)
@pytest.mark.req("T-027", "T-032", "T-034", "T-055", "T-062", "T-094")
@pytest.mark.parametrize(("kind", "count"), [("unix", 1_000_000), ("tcp", 250_000)])
def test_a_million_messages_arrive_once_and_in_order_over_a_link_that_keeps_breaking(
    kind: str, count: int, tmp_path: Path
) -> None:
    upstream, front = (
        ("tcp:127.0.0.1:0", "tcp:127.0.0.1:0")
        if kind == "tcp"
        else (f"unix:{tmp_path}/server", f"unix:{tmp_path}/proxy")
    )
    with program("tx_rx_runner", "receive", upstream, str(count)) as receiver:
        with program("tx_rx_proxy", front, line(receiver), SECONDS) as proxy:
            with program("tx_rx_runner", "send", line(proxy), str(count)) as sender:
                sent = json.loads(line(sender))
                assert sender.wait(timeout=20) == 0
            received = json.loads(line(receiver))
            assert proxy.stdin is not None and receiver.stdin is not None
            proxy.stdin.close()
            links = int(line(proxy))
            receiver.stdin.close()
        assert receiver.wait(timeout=20) == 0, "it has refused something"
    print(f"{kind}: {links} links, {sent['retransmits']} sent again, {received['duplicates']} received again")
    assert received["messages_accepted"] == sent["messages_delivered"] == count
    assert links >= sent["connections"] > 3, "the link was cut, and often"
    assert sent["retransmits"] >= received["duplicates"]
    assert received["rejects_sent"] == 0
