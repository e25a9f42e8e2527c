"""What a relay does beside a log, a file or a server that does not answer: it serves, and it ends in time."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.support.bare_client import open_client
from tests.support.databases import copy_of_migrated
from tests.support.made_packets import make, new_identity
from tests.support.ports import free_port
from tests.support.relay_process import STOP_TIMEOUT, RelayProcess, frozen, http_get, running
from tests.support.waiting import wait_until


def full_pipe() -> tuple[int, int]:
    """A pipe that takes nothing more: whoever writes to it waits until it is read."""
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(writer, b"\n" * 4096)
    os.set_blocking(writer, True)
    return reader, writer


class UnreadRelay(RelayProcess):
    """A relay whose log is a full pipe, until `read_log`."""

    def spawn(self) -> subprocess.Popen[bytes]:
        self.reader, writer = full_pipe()
        assert self.prepared is not None
        copy_of_migrated(self.prepared)
        self.process = subprocess.Popen(
            [sys.executable, "-m", "relayd", "serve", "--port", str(self.port), *self.arguments],
            stdout=subprocess.PIPE,
            stderr=writer,
            env=self._environment(),
            cwd=self.folder,
        )
        os.close(writer)
        return self.process

    def read_log(self) -> None:
        """Read the pipe into `log` from now on."""

        def read() -> None:
            with open(self.reader, "rb") as source, self.log.open("ab", buffering=0) as log:
                for line in source:
                    log.write(line)

        threading.Thread(target=read, daemon=True).start()


@pytest.mark.parametrize("workers", [1, 2])
async def test_a_log_that_nobody_reads_holds_up_nobody(tmp_path: Path, workers: int):
    relay = UnreadRelay(tmp_path, workers=workers)
    with running(relay):
        async with open_client(relay.ws) as client:
            assert (await client.publish(make(new_identity())))["type"] == "OK"
        assert http_get(relay.http + "/healthz")[0] == 200
        assert relay.metric("relayd_log_lines_dropped_total") == 0
        relay.read_log()
        await asyncio.to_thread(wait_until, lambda: relay.logged("serving") == workers, "what waited")
        assert relay.stop() == 0
        await asyncio.to_thread(wait_until, lambda: relay.logged("drained") == workers, "the last words")


@pytest.mark.parametrize("workers", [1, 2])
def test_a_relay_whose_log_nobody_reads_can_be_stopped(tmp_path: Path, workers: int):
    with running(UnreadRelay(tmp_path, workers=workers)) as relay:
        relay.terminate()
        assert relay.wait() == 0


def test_a_ready_line_that_nobody_reads_holds_up_nobody(tmp_path: Path):
    port = free_port()
    relay = RelayProcess(tmp_path)
    assert relay.prepared is not None
    copy_of_migrated(relay.prepared)
    reader, writer = full_pipe()
    with relay.log.open("ab") as log:
        command = [sys.executable, "-m", "relayd", "serve", "--port", str(port)]
        process = subprocess.Popen(command, stdout=writer, stderr=log, env=relay._environment(), cwd=tmp_path)
    os.close(writer)
    try:
        wait_until(lambda: relay.logged("serving") == 1, "it to serve", 60)
        assert http_get(f"http://127.0.0.1:{port}/healthz")[0] == 200
        process.send_signal(signal.SIGTERM)
        assert process.wait(STOP_TIMEOUT) == 0
    finally:
        process.kill()
        process.wait()
        os.close(reader)
    assert relay.complaints() == []


@pytest.mark.parametrize("workers", [1, 2])
async def test_settings_from_a_pipe_hold_until_the_restart(tmp_path: Path, workers: int):
    """`relayd serve --config <(decrypt …)`: by the reload the pipe is empty, or nobody writes to it."""
    author = new_identity()
    pipe = tmp_path / "settings"
    os.mkfifo(pipe)
    relay = RelayProcess(tmp_path, arguments=("--config", str(pipe)), workers=workers)
    text = f'blocked_authors = ["{author.did}"]\n'
    threading.Thread(target=pipe.write_text, args=(text,), daemon=True).start()
    with running(relay):
        os.kill(relay.pid, signal.SIGHUP)
        await asyncio.to_thread(wait_until, lambda: relay.logged("not_reloaded") == 1, "the refusal")
        assert f"{pipe}: not a regular file" in relay.log.read_text()
        async with open_client(relay.ws) as client:
            assert (await client.publish(make(author)))["code"] == "blocked_author"
            assert (await client.publish(make(new_identity())))["type"] == "OK"


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 2])
async def test_a_relay_beside_a_database_that_stands_still_ends_in_time(tmp_path: Path, workers: int):
    packet = make(new_identity())
    with running(RelayProcess(tmp_path, workers=workers)) as relay:
        async with open_client(relay.ws) as client:
            assert (await client.publish(packet))["type"] == "OK"
            with frozen(relay):
                below = relay.children()
                await client.send('["PUBLISH"]')
                relay.terminate()
                assert await asyncio.to_thread(relay.wait) == 0
                assert not psutil.wait_procs(below, timeout=5)[1], "one of its processes is left"
        assert relay.logged("embedded_postgres_killed") == 1
        relay.start()
        assert relay.get(f"/packets/{packet.packet_id}")[0] == 200


@contextlib.contextmanager
def silent_server() -> Iterator[int]:
    """The port of a server that accepts connections and never says anything."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


@pytest.mark.parametrize("workers", [1, 2])
def test_a_start_that_waits_for_a_database_can_be_stopped(tmp_path: Path, workers: int):
    with silent_server() as port:
        url = f"postgresql://u@127.0.0.1:{port}/d?sslmode=disable"
        relay = RelayProcess(tmp_path, database_url=url, workers=workers)
        process = relay.spawn()
        with contextlib.ExitStack() as stack:
            stack.callback(relay.kill)
            wait_until(lambda: connections_to(process.pid, port) > 0, "it to connect", 60)
            process.send_signal(signal.SIGTERM)
            assert process.wait(5) == 0, "it gives up by itself after 10 s"
    assert relay.complaints() == []


def connections_to(pid: int, port: int) -> int:
    return sum(bool(each.raddr) and each.raddr[1] == port for each in psutil.Process(pid).net_connections())


def test_a_start_that_waits_for_a_name_can_be_stopped(tmp_path: Path):
    (tmp_path / "sitecustomize.py").write_text(
        "import pathlib, socket, time\n"
        "real = socket.getaddrinfo\n"
        "def hangs(host, *arguments, **options):\n"
        "    if host == 'hangs.test':\n"
        "        pathlib.Path('asked').touch()\n"
        "        time.sleep(600)\n"
        "    return real(host, *arguments, **options)\n"
        "socket.getaddrinfo = hangs\n"
    )
    relay = RelayProcess(tmp_path, host="hangs.test", python_path=str(tmp_path))
    relay.spawn()
    with contextlib.ExitStack() as stack:
        stack.callback(relay.kill)
        wait_until((tmp_path / "asked").exists, "the question", 60)
        relay.terminate()
        assert relay.wait() == 0


def test_a_relay_beside_a_peer_that_stands_still_ends_in_time(tmp_path: Path):
    with silent_server() as port:
        peers = tmp_path / "peers.toml"
        peers.write_text(
            f'[[peer]]\nurl = "ws://127.0.0.1:{port}/strata"\nrelay_id = "{new_identity().did}"\n'
        )
        with running(RelayProcess(tmp_path, peers_file=peers)) as relay:
            wait_until(lambda: connections_to(relay.pid, port) > 0, "it to connect")
            assert relay.stop() == 0


def test_a_relay_that_is_held_up_by_a_thread_ends_in_time(tmp_path: Path):
    """Whatever the thread waits for, such as a file system that is gone: here, for nothing."""
    (tmp_path / "sitecustomize.py").write_text(
        "import relayd.store.guard as guard, time\n"
        "def hangs(self, claim):\n"
        "    time.sleep(600)\n"
        "guard.Guard.write = hangs\n"
        "import relayd.process.signals as signals\n"
        "signals.stop_seconds = lambda settings: 3.0\n"
    )
    with running(RelayProcess(tmp_path, python_path=str(tmp_path))) as relay:
        relay.terminate()
        assert relay.wait() == 1
        assert "stopping_at_once" in relay.log.read_text()
        relay.ready = {}


@pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("unshare"), reason="needs a namespace of processes")
@pytest.mark.parametrize("name", ["relayd", "strata_pipeline", "strata"])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_the_first_process_of_a_container_while_it_loads(name: str, number: signal.Signals):
    """The kernel drops a signal for which such a process has no handler."""
    code = f"""
import sys, time
class Slow:
    def find_spec(self, module, path=None, target=None):
        if module in ("relayd.cli", "strata.tools.cli", "strata_pipeline.cli"):
            print("loading", flush=True)
            while True:
                time.sleep(0.1)
sys.meta_path.insert(0, Slow())
from {name}.__main__ import main
main()
"""
    command = ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child", sys.executable, "-c", code]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None and process.stdout.readline() == b"loading\n"
            [first] = psutil.Process(process.pid).children()
            first.send_signal(number)
            assert process.wait(30) == 128 + number
        finally:
            process.kill()
