"""The console: the web page at `/`, and its files (decision 67).

All files are read once, at the start, and an answer is made of bytes that are already there: a request for
one costs one look into a dictionary. File names contain hashes of the contents, so caches may keep a file
forever. The page itself is requested again each time, and the usual answer is "not modified".
"""

from __future__ import annotations

import gzip
import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Final
from urllib.parse import urlsplit

import relayd
from relayd.access.gate import RequestHeaders
from relayd.responses import Response, items_of, unless_known

__all__ = ["FOLDER", "WebConsole"]

FOLDER: Final = Path(relayd.__file__).with_name("console")
"""The folder of the built files, which `web/build.mjs` writes."""

_PAGE: Final = "index.html"
_TYPES: Final[Mapping[str, str]] = MappingProxyType(
    {
        ".html": "text/html; charset=utf-8",
        ".js": "text/javascript; charset=utf-8",
        ".css": "text/css; charset=utf-8",
        ".svg": "image/svg+xml",
    }
)
_HOST: Final = re.compile(r"([A-Za-z0-9.-]{1,255}|\[[0-9A-Fa-f:.]{2,45}\])(:[0-9]{1,5})?")
_LONGEST_HOST: Final = 260
_SAFE: Final[Mapping[str, str]] = MappingProxyType(
    {
        "Referrer-Policy": "no-referrer",
        "Cross-Origin-Opener-Policy": "same-origin",
        "Cross-Origin-Resource-Policy": "same-origin",
    }
)
_POLICY: Final = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; worker-src 'self';"
    " connect-src 'self'{sockets}; base-uri 'none'; form-action 'none'; frame-ancestors 'none';"
    " require-trusted-types-for 'script'; trusted-types strata"
)


@dataclass(frozen=True, slots=True)
class _File:
    content_type: str
    plain: bytes
    packed: bytes
    tag: str
    caching: str


class WebConsole:
    """The files of the console. `public_url` is the setting; the relay listens at `websocket_path`."""

    def __init__(self, files: Mapping[str, bytes], *, public_url: str | None, websocket_path: str) -> None:
        self._public = _origin_of(public_url)
        marks = {b"%socket%": websocket_path.removeprefix("/"), b"%public%": public_url or ""}
        self._files: dict[str, _File] = {}
        for name, content in files.items():
            if name == _PAGE:
                for mark, value in marks.items():
                    content = content.replace(mark, _escaped(value).encode())
                self._files["/"] = _file(name, content, "no-cache")
            else:
                self._files[f"/{name}"] = _file(name, content, "public, max-age=31536000, immutable")

    @classmethod
    def read(cls, folder: Path = FOLDER, *, public_url: str | None, websocket_path: str) -> WebConsole:
        """Read the built files. Raises `OSError` if they are missing."""
        names = [folder / _PAGE, *sorted((folder / "assets").iterdir())]
        files = {path.relative_to(folder).as_posix(): path.read_bytes() for path in names}
        return cls(files, public_url=public_url, websocket_path=websocket_path)

    @property
    def paths(self) -> set[str]:
        """Every path that is answered."""
        return set(self._files)

    def page(self, path: str, headers: RequestHeaders) -> Response | None:
        """The answer to `GET path`, or None if the console does not serve the path."""
        file = self._files.get(path.partition("?")[0])
        if file is None:
            return None
        said = {
            "Cache-Control": file.caching,
            "Content-Security-Policy": _POLICY.format(sockets=self._sockets(headers)),
            "ETag": file.tag,
            "Vary": "Accept-Encoding",
            **_SAFE,
        }
        plain = Response(200, file.content_type, file.plain, said)
        # Both encodings have one tag: a client may have either.
        answer = unless_known(plain, headers.get_all("If-None-Match"))
        if answer is plain and "gzip" in items_of(headers.get_all("Accept-Encoding")):
            return Response(200, file.content_type, file.packed, {**said, "Content-Encoding": "gzip"})
        return answer

    def _sockets(self, headers: RequestHeaders) -> str:
        """Where the page may connect besides `'self'`, which older browsers do not apply to WebSockets.

        A Host that could be read as anything but a host is left out.
        """
        found = list(self._public)
        hosts = headers.get_all("Host")
        if len(hosts) == 1 and len(hosts[0]) <= _LONGEST_HOST and _HOST.fullmatch(hosts[0]):
            found += [f"ws://{hosts[0]}", f"wss://{hosts[0]}"]
        return "".join(f" {source}" for source in dict.fromkeys(found))


def _origin_of(public_url: str | None) -> tuple[str, ...]:
    """Scheme and host of the URL, as a policy names them; nothing if the URL is not a plain one."""
    if public_url is None:
        return ()
    parts = urlsplit(public_url)
    host = parts.netloc.rpartition("@")[2]
    return (f"{parts.scheme}://{host}",) if _HOST.fullmatch(host) else ()


def _escaped(text: str) -> str:
    return text.replace("&", "&amp;").replace('"', "&quot;").replace("<", "&lt;")


def _file(name: str, content: bytes, caching: str) -> _File:
    tag = f'"{hashlib.sha256(content).hexdigest()[:32]}"'
    packed = gzip.compress(content, 9, mtime=0)
    return _File(_TYPES[Path(name).suffix], content, packed, tag, caching)
