"""The chat page of `web/examples/chat`, built and served as in a deployment."""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer

from tests.support.node_package import WEB, alone, run_node

__all__ = ["chat_site"]

POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self' ws: http:; "
    "require-trusted-types-for 'script'"
)


class _Pages(SimpleHTTPRequestHandler):
    """Serves the built page under a strict policy."""

    def end_headers(self) -> None:
        self.send_header("Content-Security-Policy", POLICY)
        super().end_headers()

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def chat_site() -> Iterator[str]:
    """The page's address, for as long as the block lasts. Needs node and the packages of `npm ci`."""
    with alone():
        run_node("build.mjs", "chat", cwd=WEB)
    handler = functools.partial(_Pages, directory=str(WEB / "build/chat"))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
