"""Plain HTTP on the same port (relay.md §16, design §4)."""

from __future__ import annotations

import json
import re
import socket
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from tests.support.bare_client import BareClient, open_client
from tests.support.made_packets import make, new_identity
from tests.support.relay_process import RelayProcess, http_get, running


@pytest.mark.req("R-300", "R-301")
async def test_a_packet_by_id_is_its_stored_bytes(relay: RelayProcess, client: BareClient):
    packet = make(new_identity(), weights=[1.0, 1e21], nul="\u0000")
    ok = await client.publish(packet)
    status, headers, body = relay.get(f"/packets/{packet.packet_id}")
    assert status == 200
    assert headers["content-type"] == "application/json"
    assert packet.canonical in body
    assert json.loads(body)["received_at"] == ok["received_at"]


@pytest.mark.req("R-020", "R-301")
@pytest.mark.parametrize(
    ("path", "status"),
    [
        ("/packets/0x" + "00" * 32, 404),
        ("/packets/0x" + "AB" * 32, 400),
        ("/packets/" + "ab" * 32, 400),
        ("/packets/0x1e20" + "ab" * 32, 400),
        ("/packets/", 400),
        ("/packets/%27;--", 400),
        ("/nowhere", 404),
        ("/", 200),
        ("/assets/", 404),
        ("/strata", 426),
        ("/healthz", 200),
        ("/readyz", 200),
        ("/metrics", 200),
    ],
)
def test_statuses(relay: RelayProcess, path, status):
    assert relay.get(path)[0] == status


def answered(relay: RelayProcess, request: bytes, *, piece: int = 1000) -> tuple[int, bytes]:
    """Status and body of the answer to these bytes, sent in pieces."""
    with socket.create_connection(("127.0.0.1", urlsplit(relay.http).port), timeout=20) as link:
        link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for first in range(0, len(request), piece):
            link.sendall(request[first : first + piece])
        answer = b"".join(iter(lambda: link.recv(65536), b""))
    head, _, body = answer.partition(b"\r\n\r\n")
    return int(head.split()[1]), body


@pytest.mark.parametrize(
    ("target", "status", "same_as"),
    [
        ("http://relay.example/readyz", 200, "/readyz"),
        ("HTTPS://relay.example:7447/readyz?x=/", 200, "/readyz"),
        ("http://relay.example/packets/0x" + "00" * 32, 404, "/packets/0x" + "00" * 32),
        ("http://relay.example", 200, "/"),
        ("http://relay.example?x", 200, "/"),
        ("http://relay.example/strata", 426, "/strata"),
        ("http:///readyz", 404, "/nowhere"),
        ("ftp://relay.example/readyz", 404, "/nowhere"),
    ],
)
def test_a_target_may_name_its_host(relay: RelayProcess, target: str, status: int, same_as: str):
    """RFC 9112 section 3.2.2."""
    got = answered(relay, f"GET {target} HTTP/1.1\r\nHost: relay.example\r\n\r\n".encode())
    assert got == (status, relay.get(same_as)[2])


@pytest.mark.parametrize("piece", [1, 3, 1000])
@pytest.mark.parametrize("lines", [1, 2, 5])
def test_empty_lines_before_a_request_are_ignored(relay: RelayProcess, lines: int, piece: int):
    """RFC 9112 section 2.2."""
    request = b"\r\n" * lines + b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n"
    assert answered(relay, request, piece=piece) == (200, relay.get("/healthz")[2])


@pytest.mark.parametrize(("start", "status"), [(b"\r", 405), (b" \r\n", 400)])
def test_what_is_no_empty_line_before_a_request_is_refused(relay: RelayProcess, start: bytes, status: int):
    assert answered(relay, start + b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n")[0] == status


@pytest.mark.req("R-139")
def test_the_manifest_announces_the_additions_and_the_limits(relay: RelayProcess):
    status, headers, body = relay.get("/.well-known/strata-relay.json")
    manifest = json.loads(body)
    assert (status, headers["content-type"]) == (200, "application/json")
    assert manifest["relay_id"] == relay.ready["relay_id"]
    assert manifest["ws_endpoint"] == relay.ws
    assert manifest["extensions"] == [
        "packet_ids",
        "received_range",
        "history_marker",
        "gapless",
        "http_packets",
        "log_reset",
        "not_via",
        "reconcile",
    ]
    assert manifest["limits"]["max_packet_bytes"] == 262_144
    assert manifest["limits"]["max_limit"] == 500


async def test_the_page_and_the_websocket_may_share_a_path_and_the_page_may_be_left_out(tmp_path: Path):
    with running(RelayProcess(tmp_path / "shared", path="/")) as shared:
        status, headers, body = shared.get("/")
        assert (status, headers["content-type"]) == (200, "text/html; charset=utf-8")
        assert "default-src 'none'" in headers["content-security-policy"]
        assert http_get(f"{shared.http}/", "HEAD") == (200, headers, b"")
        for asset in re.findall(r'"(assets/[^"]+)"', body.decode()):
            assert shared.get(f"/{asset}")[1]["cache-control"].endswith("immutable")
        async with open_client(shared.ws) as client:
            assert (await client.publish(make(new_identity())))["type"] == "OK"
    with running(RelayProcess(tmp_path / "without", console=False)) as without:
        assert without.get("/")[0] == 404


@pytest.mark.req("R-313")
@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE"])
def test_other_methods_do_nothing(relay: RelayProcess, method):
    try:
        status, _, _ = http_get(f"{relay.http}/packets/0x{'00' * 32}", method)
    except OSError:
        return  # refusing by closing is an answer too
    assert status in (400, 405)


def test_head_tells_a_probe_what_get_would(relay: RelayProcess):
    for path in (
        "/healthz",
        "/readyz",
        "/metrics",
        "/.well-known/strata-relay.json",
        "/packets/0x" + "00" * 32,
    ):
        status, headers, _ = relay.get(path)
        told, heads, body = http_get(f"{relay.http}{path}", "HEAD")
        assert (told, body) == (status, b"")
        assert heads["content-type"] == headers["content-type"]
