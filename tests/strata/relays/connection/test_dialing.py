"""Which failures are worth another attempt, and how they are described."""

from __future__ import annotations

import ssl

import pytest
from strata.relays.connection.dialing import describe, may_retry, shown
from websockets.datastructures import Headers
from websockets.exceptions import (
    ConnectionClosedError,
    InvalidMessage,
    InvalidStatus,
    InvalidUpgrade,
    InvalidURI,
)
from websockets.frames import Close
from websockets.http11 import Response


def status(code):
    return InvalidStatus(Response(code, "", Headers()))


def closed(received=None, sent=None):
    theirs, ours = (Close(code, "") if code else None for code in (received, sent))
    return ConnectionClosedError(theirs, ours, rcvd_then_sent=True if theirs and ours else None)


def cut_short():
    error = InvalidMessage("did not receive a valid HTTP response")
    error.__cause__ = EOFError()
    return error


@pytest.mark.parametrize(
    ("error", "again"),
    [
        (ConnectionRefusedError(111, "refused"), True),
        (ConnectionResetError(104, "reset"), True),
        (TimeoutError(), True),
        (EOFError(), True),
        (cut_short(), True),
        (closed(), True),
        (closed(1000), True),
        (closed(1001), True),
        (closed(1011), True),
        (closed(1012), True),
        (closed(1013), True),
        (closed(None, 1011), True),  # our keepalive gave up
        (status(503), True),
        (status(429), True),
        (status(404), False),
        (status(403), False),
        (status(200), False),
        (closed(1002), False),
        (closed(1008), False),
        (closed(1009), False),
        (closed(None, 1009), False),
        (InvalidURI("x", "y"), False),
        (InvalidMessage("no HTTP"), False),
        (InvalidUpgrade("Upgrade", "h2"), False),
        (ssl.SSLCertVerificationError(1, "self-signed"), False),
        (ValueError("a fault of ours"), False),
    ],
    ids=repr,
)
def test_try_again_or_give_up(error, again):
    assert may_retry(error) is again
    assert str(describe(error, "ws://h/strata")).startswith("no connection to ws://h/strata: ")


@pytest.mark.parametrize(
    ("error", "proxy", "advice"),
    [
        (status(200), None, "the usual one is /strata"),
        (status(404), None, "the usual one is /strata"),
        (ConnectionRefusedError(111, "refused"), None, "is the relay running?"),
        (
            ConnectionRefusedError(111, "refused"),
            "http://me:secret@p:1",
            "proxy http://p:1: nothing listens there; is the proxy",
        ),
        (ssl.SSLError(1, "[SSL: WRONG_VERSION_NUMBER] wrong version number"), None, "ws, and not wss?"),
        (ConnectionResetError(), None, "the connection was cut"),
        (closed(None, 1009), None, "Options.max_message_bytes"),
    ],
    ids=repr,
)
def test_a_failure_says_what_to_do(error, proxy, advice):
    assert advice in str(describe(error, "ws://h/strata", proxy))


def test_a_url_is_shown_without_its_secrets():
    assert shown("wss://me:secret@relay.example:8443/strata?token=x") == "wss://relay.example:8443/strata"
