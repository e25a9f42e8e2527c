"""TLS from configured certificates (T-092, T-093; decision A-170). TLS 1.2 or newer, always verified."""

from __future__ import annotations

import ssl
from pathlib import Path

from strata.txrx.errors import ChannelIOError
from strata.txrx.settings import ChannelSettings

__all__ = ["client_context", "explain_tls", "server_context"]


def server_context(settings: ChannelSettings) -> ssl.SSLContext:
    """For `serve`. Raises `ChannelIOError`, naming the file."""
    if settings.tls_certificate is None:
        raise ChannelIOError("serving TLS takes a certificate: set tls_certificate and tls_key")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    _load_certificate(context, settings)
    if settings.tls_mutual:
        if settings.tls_authorities is None:
            raise ChannelIOError("mutual TLS takes the authorities of clients: set tls_authorities")
        _load_authorities(context, settings.tls_authorities)
        context.verify_mode = ssl.CERT_REQUIRED
    return context


def client_context(settings: ChannelSettings) -> ssl.SSLContext:
    """For `dial`: the server's name is checked against its certificate. Raises `ChannelIOError`."""
    context = ssl.create_default_context()
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    if settings.tls_authorities is not None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        _load_authorities(context, settings.tls_authorities)
    if settings.tls_certificate is not None:
        _load_certificate(context, settings)
    return context


def explain_tls(error: ssl.SSLError) -> str:
    """What was wrong, in words for whoever set the certificates up."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"the server's certificate is refused: {error.verify_message}"
    reason = (error.reason or str(error)).replace("_", " ").lower()
    if "certificate required" in reason or "handshake failure" in reason:
        return f"the server refuses us: {reason}; mutual TLS takes tls_certificate and tls_key"
    return f"TLS failed: {reason}"


def _load_certificate(context: ssl.SSLContext, settings: ChannelSettings) -> None:
    certificate, key = settings.tls_certificate, settings.tls_key
    assert certificate is not None and key is not None
    for path in (certificate, key):
        _readable(path)
    try:
        # A key with a passphrase must not make a daemon ask its terminal.
        context.load_cert_chain(certificate, key, password=lambda: "")
    except ssl.SSLError as error:
        if error.reason == "KEY_VALUES_MISMATCH":
            raise ChannelIOError(f"{key} is not the key of the certificate in {certificate}") from None
        raise ChannelIOError(
            f"{certificate} and {key} are not a certificate and its key in PEM, without passphrase: {error}"
        ) from None


def _load_authorities(context: ssl.SSLContext, path: Path) -> None:
    _readable(path)
    try:
        context.load_verify_locations(path)
    except ssl.SSLError as error:
        raise ChannelIOError(f"{path} holds no certificates in PEM: {error}") from None


def _readable(path: Path) -> None:
    try:
        with path.open("rb"):
            pass
    except OSError as error:
        raise ChannelIOError(f"{path}: {error.strerror}") from None
