"""The samples for nginx and Caddy, run unchanged: TLS, WebSocket, plain paths, and the clients' addresses."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import shutil
import socket
import ssl
import subprocess
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from relayd.cli.doctor import examine
from relayd.config import Settings
from relayd.tls import DevCertificates, write_dev_certificates
from tests.support.bare_client import BareClient, open_client
from tests.support.made_packets import make, new_identity
from tests.support.ports import free_port
from tests.support.relay_process import ROOT, RelayProcess, running
from tests.support.waiting import wait_until

GATEWAY = "127.0.0.9"
CLIENTS = ("127.0.0.21", "127.0.0.22")
NAME = "relay.example.net"


def _nginx(folder: Path, port: int, relay_port: int, files: DevCertificates, gateway: str) -> list[str]:
    sample = (ROOT / "deploy/nginx/relayd.conf").read_text()
    for ours, theirs in {
        "listen 443 ssl;": f"listen 127.0.0.1:{port} ssl;",
        "    listen [::]:443 ssl;\n": f"    proxy_bind {gateway};\n",
        "/etc/letsencrypt/live/relay.example.net/fullchain.pem": str(files.cert),
        "/etc/letsencrypt/live/relay.example.net/privkey.pem": str(files.key),
        "server 127.0.0.1:7447;": f"server 127.0.0.1:{relay_port};",
    }.items():
        assert ours in sample
        sample = sample.replace(ours, theirs)
    kinds = ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    temporary = "".join(f"{kind}_temp_path {folder};\n" for kind in kinds)
    whole = f"daemon off;\npid {folder}/pid;\nerror_log stderr;\nworker_processes 1;\nevents {{}}\n"
    (folder / "nginx.conf").write_text(f"{whole}http {{\naccess_log off;\n{temporary}{sample}}}\n")
    return ["nginx", "-p", str(folder), "-c", str(folder / "nginx.conf"), "-e", "stderr"]


def _caddy(folder: Path, port: int, relay_port: int, files: DevCertificates, _gateway: str) -> list[str]:
    sample = (ROOT / "deploy/caddy/Caddyfile").read_text()
    site = "{$RELAY_DOMAIN:relay.example.net} {\n"
    proxy = "reverse_proxy {$RELAY_ADDRESS:127.0.0.1:7447}"
    assert site in sample and proxy in sample
    # We cannot get a certificate by ACME, and may not take the well-known ports.
    sample = sample.replace(site, f"{site}\tbind 127.0.0.1\n\ttls {files.cert} {files.key}\n")
    sample = sample.replace(
        "skip_install_trust", "skip_install_trust\n\tadmin off\n\tauto_https disable_redirects"
    )
    (folder / "Caddyfile").write_text(sample)
    return ["caddy", "run", "--config", str(folder / "Caddyfile"), "--adapter", "caddyfile"]


PROXIES = {"nginx": _nginx, "caddy": _caddy}


@contextlib.contextmanager
def _proxied(
    name: str, folder: Path, relay: RelayProcess, gateway: str = "127.0.0.1"
) -> Iterator[tuple[int, Path]]:
    """The proxy in front of a relay: its port, and the authority that its clients must trust."""
    program = shutil.which(name)
    if program is None:
        pytest.skip(f"needs {name} (apt-get install {name})")
    files = write_dev_certificates(folder / "proxy-certs", (NAME,))
    port, relay_port = free_port(), int(relay.http.rpartition(":")[2])
    domain = f"https://{NAME}:{port}"
    environ = os.environ | {
        "HOME": str(folder),
        "RELAY_DOMAIN": domain,
        "RELAY_ADDRESS": f"127.0.0.1:{relay_port}",
    }
    command = PROXIES[name](folder, port, relay_port, files, gateway)
    with (folder / "proxy.log").open("wb") as log:
        proxy = subprocess.Popen([program, *command[1:]], env=environ, stdout=log, stderr=log)
    try:
        wait_until(lambda: _answers(port) or proxy.poll() is not None, f"{name} to listen")
        assert proxy.poll() is None, (folder / "proxy.log").read_text()
        yield port, files.ca
    finally:
        proxy.terminate()
        proxy.wait(30)


def _told_of(relay: RelayProcess, source: str) -> bool:
    return f'"full_address": "{source}"' in relay.log.read_text()


def _answers(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
        return True
    return False


async def _connected(port: int, source: str) -> socket.socket:
    connected = socket.socket()
    connected.bind((source, 0))
    connected.setblocking(False)
    await asyncio.get_running_loop().sock_connect(connected, ("127.0.0.1", port))
    return connected


@contextlib.asynccontextmanager
async def _client(port: int, ca: Path, source: str) -> AsyncIterator[BareClient]:
    trusting = ssl.create_default_context(cafile=str(ca))
    connected = await _connected(port, source)
    async with open_client(f"wss://{NAME}:{port}/strata", ssl=trusting, sock=connected) as client:
        yield client


async def _get(port: int, ca: Path, path: str) -> bytes:
    """The status line of a plain request."""
    trusting = ssl.create_default_context(cafile=str(ca))
    connected = await _connected(port, CLIENTS[0])
    reader, writer = await asyncio.open_connection(sock=connected, ssl=trusting, server_hostname=NAME)
    writer.write(f"GET {path} HTTP/1.1\r\nHost: {NAME}:{port}\r\n\r\n".encode())
    status = await reader.readline()
    writer.close()
    return status


@pytest.mark.parametrize("name", PROXIES)
async def test_a_sample_passes_everything_on_and_says_who_the_clients_are(name: str, tmp_path: Path):
    settings: dict[str, Any] = {"trusted_proxies": [GATEWAY, "127.0.0.1"], "log_addresses": "full"}
    # The relay sees the proxy at an address of the proxy's network, as through a container's gateway.
    with (
        running(RelayProcess(tmp_path, **settings)) as relay,
        _proxied(name, tmp_path, relay, GATEWAY) as (port, ca),
    ):
        packet = make(new_identity(), "x" * 100_000)
        for source in CLIENTS:
            async with _client(port, ca, source) as client:
                assert (await client.publish(packet))["type"] == "OK"
        for source in CLIENTS:
            wait_until(functools.partial(_told_of, relay, source), source)
        assert GATEWAY not in relay.log.read_text()
        assert b" 200 " in await _get(port, ca, "/.well-known/strata-relay.json")
        assert b" 404 " in await _get(port, ca, "/metrics")
        assert b" 200 " in await _get(port, ca, "/")


async def test_a_relay_that_sees_all_clients_at_one_address_says_so(tmp_path: Path):
    settings: dict[str, Any] = {"unlimited_addresses": ["192.0.2.0/24"]}
    with (
        running(RelayProcess(tmp_path, **settings)) as relay,
        _proxied("nginx", tmp_path, relay, GATEWAY) as (port, ca),
    ):
        async with contextlib.AsyncExitStack() as stack:
            for number in range(16):
                await stack.enter_async_context(_client(port, ca, CLIENTS[number % 2]))
            wait_until(lambda: relay.logged("clients_share_an_address") == 1, "the warning")
            assert relay.metric("relayd_address_share") == 1.0
            checks = await examine(Settings(port=int(relay.http.rpartition(":")[2]), data_dir=tmp_path))
            [found] = [check.found for check in checks if check.name == "addresses"]
            assert found == "all 16 sessions come from one address and share its limits"
