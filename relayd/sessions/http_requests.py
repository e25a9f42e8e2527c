"""Plain HTTP on the relay's port.

`rejection` refuses an opening handshake, `respond` answers every other request. Capabilities and budgets
apply here too: reading a packet by its id is a read like any other (R-288, R-292).
"""

from __future__ import annotations

import contextlib
import dataclasses
import http
import math
import re
from collections.abc import Iterator
from email.utils import formatdate
from typing import Final, Protocol

from websockets.datastructures import Headers
from websockets.http11 import Request, Response
from websockets.server import ServerProtocol

from relayd.access.auth import SUBSCRIBE
from relayd.access.gate import Access, RequestHeaders, Turnaway, Visitor
from relayd.access.limits import Quota, purse
from relayd.metrics import Counters
from relayd.responses import Response as HttpResponse
from relayd.responses import error_response, unless_known
from relayd.store.payers import Asker

__all__ = ["HttpResponder", "as_origin_form", "fault_response", "rejection", "respond"]

_READS = ("/packets/", "/did/", "/did-docs/")
"""Paths that serve packets or their contents, as a subscription would."""
_METHODS: Final = ("GET", "HEAD")
_ABSOLUTE: Final = re.compile("https?://([^/?]+)", re.IGNORECASE)
_DID: Final = "/did/"
_MOST_CHAINS: Final = 8
"""The requests of one address at a time that may have a chain of keys read: how long that takes is known, and
charged, only afterwards."""


class HttpResponder(Protocol):
    """Answers plain HTTP requests. HEAD is answered as GET, without the body."""

    def page(self, path: str, headers: RequestHeaders) -> HttpResponse | None: ...

    async def respond(self, path: str, asker: Asker) -> HttpResponse:
        """Answer a GET at the expense of `asker`."""


class HttpAsker(Asker, Protocol):
    """A connection that asks by HTTP."""

    @property
    def payer(self) -> Quota:
        """The account that takes turns at the database."""


def as_origin_form(request: Request) -> None:
    """Leave the path of a target that names its host too; then that host counts (RFC 9112 section 3.2.2)."""
    named = _ABSOLUTE.match(request.path)
    if named is not None:
        request.path = "/" + request.path[named.end() :].removeprefix("/")
        request.headers.pop("Host", None)
        request.headers["Host"] = named[1]


def rejection(protocol: ServerProtocol, turnaway: Turnaway) -> Response:
    """The response to a WebSocket handshake that is refused."""
    response = protocol.reject(http.HTTPStatus(turnaway.status), turnaway.sentence + "\n")
    if turnaway.retry_after is not None:
        response.headers["Retry-After"] = str(turnaway.retry_after)
    return response


def fault_response() -> Response:
    """The response to a request on which the relay itself failed."""
    return _response(error_response(500, "internal_error", "the relay failed on this request"))


async def respond(
    request: Request,
    responder: HttpResponder,
    access: Access,
    visitor: Visitor,
    rate_limited: Counters,
    now: float,
    asking: HttpAsker,
) -> Response:
    """Answer a plain request; a request over a limit is counted.

    Cancelling it cancels any read of the store under way.
    """
    method = getattr(request, "method", "GET")
    if method not in _METHODS:
        allow = ", ".join(_METHODS)
        return _response(
            error_response(405, "method_not_allowed", f"the methods are {allow}", {"Allow": allow})
        )
    page = responder.page(request.path, request.headers)
    answer = _refused(request.path, request.headers, access, visitor, asking.payer, rate_limited, now)
    if answer is None:
        with _counted(request.path, visitor.quota):
            answer = page or await responder.respond(request.path, asking)
        answer = unless_known(answer, request.headers.get_all("If-None-Match"))
        if visitor.quota is not None and (backfill := purse("backfill", visitor.quota.line)) is not None:
            backfill.spend(len(answer.body), now)
    if access.chooses_origins and request.path.startswith(_READS):
        # Otherwise a cache could give one page the answer to another.
        answer = dataclasses.replace(answer, headers={**answer.headers, "Vary": "Origin"})
    return _response(answer, whole=method != "HEAD")


@contextlib.contextmanager
def _counted(path: str, quota: Quota | None) -> Iterator[None]:
    """Count a request that may have a chain of keys read, while it is under way."""
    if quota is None or not path.startswith(_DID):
        yield
        return
    quota.chains += 1
    try:
        yield
    finally:
        quota.chains -= 1


def _refused(
    path: str,
    headers: RequestHeaders,
    access: Access,
    visitor: Visitor,
    payer: Quota,
    rate_limited: Counters,
    now: float,
) -> HttpResponse | None:
    """The refusal of this request, or None. HTTP requests are always anonymous."""
    if access.is_banned_address(visitor):
        sentence = "this relay takes no requests from that address"
        return error_response(403, "policy_rejected", sentence)
    if visitor.knocks:
        rate_limited["connect"].inc()
        return _too_many(access.retry_after(visitor, now))
    if not path.startswith(_READS):
        return None
    if not access.admits_page(visitor, headers):
        # A page that may not connect must not read around that.
        return error_response(403, "policy_rejected", "this relay takes no requests from that origin")
    if SUBSCRIBE not in access.grants.anonymous:
        # a client that may not subscribe without AUTH must not read around it.
        return error_response(
            401,
            "unauthenticated",
            "this relay serves packets to authenticated sessions alone",
            {"WWW-Authenticate": "Strata-AUTH"},
        )
    if visitor.quota is None:
        return None
    if path.startswith(_DID) and visitor.quota.chains >= _MOST_CHAINS:
        rate_limited["loop"].inc()
        return _too_many(1)
    owing = {"loop": purse("loop", visitor.quota.line), "pacing": purse("read", payer.line)}
    for limit, work in owing.items():
        if work is not None and (owed := work.debt_seconds(now)) > 0:
            rate_limited[limit].inc()
            return _too_many(math.ceil(owed))
    budget, backfill = purse("subscribe", visitor.quota.line), purse("backfill", visitor.quota.line)
    if budget is not None and not budget.take(now):
        rate_limited["subscribe"].inc()
        return _too_many(budget.excess(now).retry_after)
    if backfill is not None and backfill.debt_seconds(now) > 0:
        rate_limited["backfill"].inc()
        return _too_many(backfill.excess(now).retry_after)
    return None


def _too_many(wait: int) -> HttpResponse:
    return error_response(
        429, "rate_limited", "too many requests from this address", {"Retry-After": str(wait)}
    )


def _response(answer: HttpResponse, *, whole: bool = True) -> Response:
    """The response in the library's form, without the body for HEAD."""
    headers = {
        "Date": formatdate(usegmt=True),
        **answer.headers,
        "Content-Type": answer.content_type,
        "Connection": "close",
    }
    if answer.status != http.HTTPStatus.NOT_MODIFIED:  # no body; its length would be another response's
        headers["Content-Length"] = str(len(answer.body))
    return Response(
        answer.status,
        http.HTTPStatus(answer.status).phrase,
        Headers(headers),
        answer.body if whole else b"",
    )
