"""A real S3 server in this process; a test can watch, block and answer its requests."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from http.client import HTTPConnection
from typing import Any, NamedTuple

from strata_pipeline.lake.stores.objects import ObjectStore

__all__ = ["BUCKET", "Asked", "ObjectServer", "serving"]

BUCKET = "lakes"


class Asked(NamedTuple):
    """A request."""

    method: str
    key: str
    """The object's key, without the bucket."""
    is_conditional: bool


class ObjectServer:
    """The server and its one bucket."""

    def __init__(self) -> None:
        self.before: Callable[[Asked], str | None]
        """Called before each request; a status that it returns is the answer, and the request is dropped."""
        self.after: Callable[[Asked], str | None]
        """Called after each request was carried out; a status that it returns is the answer."""
        self.deaf: bool
        """Whether it ignores If-None-Match, as older stores did."""
        # Most workers of a run collect these tests and run none of them.
        from moto.moto_server.werkzeug_app import create_backend_app
        from werkzeug.serving import WSGIRequestHandler, make_server
        from werkzeug.test import run_wsgi_app

        class Quiet(WSGIRequestHandler):
            def log(self, type: str, message: str, *arguments: Any) -> None:
                pass

        self.behave()
        # Without the part that finds the requested service: it searches a folder, twice.
        self._moto = create_backend_app("s3")
        self._run = run_wsgi_app
        self._lock = threading.Lock()  # checking and putting are two steps
        self._server = make_server("127.0.0.1", 0, self._answer, threaded=True, request_handler=Quiet)
        self._thread = threading.Thread(target=self._server.serve_forever, name="S3")
        self._thread.start()
        self.put_folder("")

    @property
    def environment(self) -> dict[str, str]:
        """The environment that a command needs."""
        return {
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{self._server.server_port}",
            "AWS_ALLOW_HTTP": "true",
            "AWS_REGION": "us-east-1",
            "AWS_ACCESS_KEY_ID": "somebody",
            "AWS_SECRET_ACCESS_KEY": "secret",
        }

    def store(self, prefix: str) -> ObjectStore:
        """A store at a prefix of the bucket."""
        return ObjectStore.at(f"s3://{BUCKET}/{prefix}", self.environment)

    def put_folder(self, key: str) -> None:
        """Put an empty object at a key that begins and ends with a slash, as some tools do for a folder; an
        empty key makes the bucket."""
        connection = HTTPConnection("127.0.0.1", self._server.server_port)
        connection.request("PUT", f"/{BUCKET}{key}", headers={"Content-Length": "0"})
        assert connection.getresponse().status == 200
        connection.close()

    def behave(self) -> None:
        """Be a plain server again."""
        self.before = self.after = lambda asked: None
        self.deaf = False

    def end(self) -> None:
        """Stop the server."""
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def _answer(self, environ: dict[str, Any], start: Callable[..., Any]) -> Iterable[bytes]:
        path = environ["PATH_INFO"].removeprefix(f"/{BUCKET}").lstrip("/")
        asked = Asked(environ["REQUEST_METHOD"], path, "HTTP_IF_NONE_MATCH" in environ)
        if self.deaf:
            environ.pop("HTTP_IF_NONE_MATCH", None)
        status = self.before(asked)
        if status is None:
            with self._lock:
                body, told, headers = self._run(self._moto, environ, buffered=True)
            status = self.after(asked)
            if status is None:
                start(told, list(headers))
                return body
        else:
            environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
        start(status, [("Content-Length", "0")])
        return []


@contextmanager
def serving() -> Iterator[ObjectServer]:
    """A server, for as long as the block lasts."""
    server = ObjectServer()
    try:
        yield server
    finally:
        server.end()
