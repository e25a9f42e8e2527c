"""The TypeScript client in a real Chromium, under a strict content security policy.

They need Chromium besides node and `make web`; RELAYD_REQUIRE_CHROMIUM=1 turns its absence into a failure.
"""

from __future__ import annotations

import json
import os
import queue
import shutil
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import pytest
import strata

from tests.support.node_package import WEB, alone, require_node, run_node
from tests.support.ports import free_port
from tests.support.relay_process import RelayProcess, running

pytestmark = pytest.mark.timeout(400)

REQUIRED = "RELAYD_REQUIRE_CHROMIUM"
FOREIGN = "page.test"
"""A name that the browser resolves to this machine, but does not treat as a secure origin."""
POLICY = (
    "default-src 'none'; script-src 'self'; connect-src 'self' ws:; frame-src 'self'; "
    "require-trusted-types-for 'script'"
)


class Site:
    """Serves the page, and receives its reports."""

    def __init__(self, script: bytes) -> None:
        said: queue.Queue[dict[str, Any]] = queue.Queue()
        page = b'<!doctype html><meta charset="utf-8"><body><script type="module" src="/page.js"></script>'

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                found = {"/": ("text/html", page), "/page.js": ("text/javascript", script)}.get(
                    self.path.partition("?")[0]
                )
                self.send_response(404 if found is None else 200)
                kind, body = found or ("text/plain", b"")
                self.send_header("Content-Type", kind)
                self.send_header("Content-Security-Policy", POLICY)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def do_POST(self) -> None:
                said.put(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
                self.send_response(204)
                self.end_headers()

            def log_message(self, *_: object) -> None:
                pass

        self._said = said
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def address(self, act: str, host: str = "localhost", **options: object) -> str:
        """The address of the page that does this."""
        return f"http://{host}:{self._server.server_port}/#{urlencode({'act': act, **options})}"

    def hear(self, count: int = 1) -> list[dict[str, Any]]:
        """The next `count` reports of pages."""
        return [self._said.get(timeout=60) for _ in range(count)]

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture(scope="module")
def chromium() -> str:
    found = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if found is None and os.environ.get(REQUIRED, "0") not in ("", "0"):
        pytest.fail(f"{REQUIRED} is set, and there is no Chromium on the PATH")
    if found is None:
        pytest.skip(f"there is no Chromium on the PATH ({REQUIRED}=1 makes this a failure)")
    require_node()
    return found


@pytest.fixture(scope="module")
def site(chromium: str) -> Iterator[Site]:
    with alone():
        run_node("build.mjs", "page", cwd=WEB)
        script = (WEB / "build/page/page.js").read_bytes()
    serving = Site(script)
    yield serving
    serving.close()


@contextmanager
def browsing(chromium: str, profile: Path, address: str) -> Iterator[None]:
    """Chromium with this page open; it is killed at the end of the block."""
    command = [
        chromium,
        "--headless=new",
        "--no-sandbox",
        "--disable-gpu",
        "--no-first-run",
        "--disable-sync",
    ]
    command += ["--disable-background-networking", "--disable-component-update", f"--user-data-dir={profile}"]
    command += ["--disable-background-timer-throttling", "--disable-renderer-backgrounding"]
    command += [f"--host-resolver-rules=MAP {FOREIGN} 127.0.0.1", address]
    process = subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
    )
    try:
        yield
    finally:
        os.killpg(process.pid, 9)
        process.wait(30)


def test_a_page_has_pythons_verdicts_secure_or_not(chromium: str, site: Site, tmp_path: Path) -> None:
    kept = set()
    for _ in range(2):
        with browsing(chromium, tmp_path, site.address("verdicts")):
            (said,) = site.hear()
        kept.add(said.pop("kept"))
        assert said == {"wrong": [], "checked": 43, "source": "webcrypto", "isSecure": True, "isSame": True}
    (did,) = kept
    assert did.startswith("did:strata:z"), (
        "the browser keeps the key, over its own kill, and gives it to nobody"
    )
    with browsing(chromium, tmp_path / "other", site.address("verdicts", FOREIGN)):
        (said,) = site.hear()
    assert said == {"wrong": [], "checked": 43, "source": "javascript", "isSecure": False} | {
        "kept": "IdentityError",
        "isSame": True,
    }


async def test_a_page_talks_to_a_relay_and_its_outbox_survives_the_kill_of_the_browser(
    chromium: str, site: Site, tmp_path: Path
) -> None:
    relay = RelayProcess(tmp_path / "relay", port=free_port())
    url = f"ws://127.0.0.1:{relay.port}/strata"
    profile = tmp_path / "profile"
    with browsing(chromium, profile, site.address("add", url=url, count=5)):
        durable = [said["durable"] for said in site.hear(5)]
    with running(relay):
        with browsing(chromium, profile, site.address("drainTwice", url=url)):
            said = site.hear(2)
        assert sum(each["acknowledged"] for each in said) == 5, "one document sends"
        assert sum(each["duplicate"] for each in said) == 0
        async with strata.connect(url) as reader:
            assert [delivery.packet.packet_id async for delivery in reader.fetch()] == durable
        with browsing(chromium, profile, site.address("talk", url=url)):
            (talk,) = site.hear()
        assert talk["posted"] == talk["read"]
        assert relay.ready["relay_id"] in talk["pinned"][0]
