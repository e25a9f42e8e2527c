"""TLS contexts from configured certificates (T-092, T-093; A-170): TLS 1.2 or newer, always verified."""

from __future__ import annotations

import ssl
from pathlib import Path

from strata.txrx.errors import TxRxIOError
from strata.txrx.settings import TxRxSettings

__all__ = ["client_context", "explain_tls", "server_context"]


def server_context(settings: TxRxSettings) -> ssl.SSLContext:
    """Make the context for `serve`. Raises `TxRxIOError`, which names the file."""
    if settings.tls_certificate is None or settings.tls_key is None:
        raise TxRxIOError("serving TLS takes a certificate: set tls_certificate and tls_key")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    _load_certificate(context, settings.tls_certificate, settings.tls_key)
    if settings.tls_mutual:
        if settings.tls_authorities is None:
            raise TxRxIOError("mutual TLS takes the authorities of clients: set tls_authorities")
        _load_authorities(context, settings.tls_authorities)
        context.verify_mode = ssl.CERT_REQUIRED
    return context


def client_context(settings: TxRxSettings) -> ssl.SSLContext:
    """Make the context for `dial`: the certificate must match the server's name. Raises `TxRxIOError`."""
    if settings.tls_authorities is None:
        context = ssl.create_default_context()
    else:  # the default context reads all of the system's authorities, which takes longer than connecting
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        _load_authorities(context, settings.tls_authorities)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    if settings.tls_certificate is not None and settings.tls_key is not None:
        _load_certificate(context, settings.tls_certificate, settings.tls_key)
    return context


def explain_tls(error: ssl.SSLError) -> str:
    """Describe the error in words that help to set up the certificates."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"the server's certificate is refused: {error.verify_message}"
    reason = (error.reason or str(error)).replace("_", " ").lower()
    if "certificate required" in reason or "handshake failure" in reason:
        return f"the server refuses us: {reason}; mutual TLS takes tls_certificate and tls_key"
    return f"TLS failed: {reason}"


def _load_certificate(context: ssl.SSLContext, certificate: Path, key: Path) -> None:
    for path in (certificate, key):
        _readable(path)
    try:
        # A key with a passphrase must not make a daemon prompt on its terminal.
        context.load_cert_chain(certificate, key, password=lambda: "")
    except ssl.SSLError as error:
        if error.reason == "KEY_VALUES_MISMATCH":
            raise TxRxIOError(f"{key} is not the key of the certificate in {certificate}") from None
        raise TxRxIOError(
            f"{certificate} and {key} are not a certificate and its key in PEM, without passphrase: {error}"
        ) from None


def _load_authorities(context: ssl.SSLContext, path: Path) -> None:
    _readable(path)
    try:
        context.load_verify_locations(path)
    except ssl.SSLError as error:
        raise TxRxIOError(f"{path} holds no certificates in PEM: {error}") from None


def _readable(path: Path) -> None:
    try:
        with path.open("rb"):
            pass
    except OSError as error:
        raise TxRxIOError(f"{path}: {error.strerror}") from None
