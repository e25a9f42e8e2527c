"""The ports of one process: one for WebSocket and HTTP, and one for metrics if that is set."""

from __future__ import annotations

import errno
import ssl
from collections.abc import Callable
from functools import partial

from relayd.http.api import MetricsApi
from relayd.http.scrapes import Scrapes
from relayd.logs import get_logger
from relayd.process.accepting import Acceptor, bind
from relayd.process.beside import beside
from relayd.process.files import room_for_sockets
from relayd.relay import RunningRelay
from relayd.sessions.connection import Connection
from relayd.sessions.http_requests import HttpResponder

__all__ = ["PortTaken", "Ports"]

_log = get_logger("relayd.server")


class PortTaken(Exception):
    """The address to listen on is not available."""


class Ports:
    """The ports on which a process listens. `chosen` holds ports that the system chose, for a later start.

    `shared` is the port that several workers listen on; a single process takes the port of the settings.
    """

    def __init__(self, relay: RunningRelay, chosen: dict[str, int], shared: int | None) -> None:
        self._settings = relay.settings
        self._relay = relay
        self._chosen = chosen
        self._shared = shared
        self._listeners: list[Acceptor] = []
        self.ws_url = ""

    async def open(
        self, responder: HttpResponder, scrapes: Scrapes, *, tls: ssl.SSLContext | None
    ) -> dict[str, str]:
        """Listen; return the addresses by name, as in the ready line. Raises `PortTaken`."""
        settings = self._settings
        self._leave_room()
        port = await self._listen(
            settings.host,
            self._chosen.get("main", settings.port) if self._shared is None else self._shared,
            lambda: Connection(self._relay, responder, settings.path),
            tls=tls,
        )
        if self._shared is None:
            self._chosen["main"] = port
        host = f"[{settings.host}]" if ":" in settings.host else settings.host
        secure = "s" if tls else ""
        http_url = f"http{secure}://{host}:{port}"
        self.ws_url = f"ws{secure}://{host}:{port}{settings.path}"
        metrics_url = f"{http_url}/metrics"
        if settings.metrics_listen:
            metrics_host, _, metrics_port = settings.metrics_listen.rpartition(":")
            api = MetricsApi(scrapes.get)
            taken = self._chosen["metrics"] = await self._listen(
                metrics_host.strip("[]"),
                self._chosen.get("metrics", int(metrics_port)),
                lambda: Connection(self._relay, api, None),
            )
            metrics_url = f"http://{metrics_host}:{taken}/metrics"
        return {"ws": self.ws_url, "http": http_url, "metrics": metrics_url, "relay_id": self._relay.relay_id}

    def close(self) -> None:
        """Accept no more connections. Idempotent."""
        for listener in self._listeners:
            listener.close()

    def _leave_room(self) -> None:
        """If the system allows few files, accept fewer sockets than the settings allow."""
        access = self._relay.access
        room = room_for_sockets(access.max_sockets, self._settings.read_connections)
        if room < access.max_sockets:
            _log.warning("few_files", sockets=room, wanted=access.max_sockets)
            access.max_sockets = room

    async def _listen(
        self,
        host: str,
        port: int,
        connection: Callable[[], Connection],
        *,
        tls: ssl.SSLContext | None = None,
    ) -> int:
        """Listen; return the port, which the system chooses if it is 0."""
        try:
            sockets = await beside(partial(bind, host, port, reuse_port=self._shared is not None))
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise PortTaken(f"port {port} on {host} is taken; choose another with --port") from None
            raise PortTaken(f"cannot listen on {host}:{port}: {error.strerror or error}") from None
        listeners = [
            Acceptor(
                each,
                connection,
                tls=tls,
                takes_plain=self._settings.tls_cert is None,
                handshake_timeout=self._settings.handshake_timeout,
                slices=self._relay.slices,
            )
            for each in sockets
        ]
        self._listeners += listeners
        return listeners[0].port
