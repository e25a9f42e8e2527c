"""TLS from files, renewed without a restart, and certificates for development.

The relay terminates TLS itself only if `tls_cert` and `tls_key` are set, or `tls_self_made`; behind a reverse
proxy it need not.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import ssl
import tempfile
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from urllib.parse import urlsplit

from cryptography import x509

from relayd.addresses import ascii_host
from relayd.config import Settings
from relayd.postgres.durable import make_durable

__all__ = [
    "CertificateFacts",
    "DevCertificates",
    "ServerTls",
    "TlsError",
    "TlsFiles",
    "ends_at",
    "lacks_name",
    "make_certificate",
    "read_certificate",
    "read_tls_files",
    "tls_files",
    "write_dev_certificates",
]


class TlsError(Exception):
    """A certificate or key cannot be used; `str()` says which file and why."""


class ServerTls:
    """The context that a server listens with, and the certificate that its next handshake shows.

    `context` stays the same object for the life of the relay. `renew` is one assignment, so that no handshake
    can see a certificate without its key; open connections are not affected.
    """

    def __init__(self, shown: ssl.SSLContext) -> None:
        self.context = shown
        self._shown = shown
        shown.sni_callback = self._show

    def renew(self, fresh: ssl.SSLContext) -> None:
        """Show the certificate of `fresh`, a context of `read_tls_files`, from the next handshake on."""
        self._shown = fresh

    def _show(self, socket: ssl.SSLObject, name: str, context: ssl.SSLContext) -> None:
        # OpenSSL calls this at every handshake, whether or not the client has named a server.
        socket.context = self._shown


@dataclass(frozen=True, slots=True)
class CertificateFacts:
    """The facts that `relayd doctor` reports about a certificate."""

    names: tuple[str, ...]
    not_before: datetime
    not_after: datetime


@dataclass(frozen=True, slots=True)
class DevCertificates:
    """Where `write_dev_certificates` put its files."""

    ca: Path
    cert: Path
    key: Path


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """The certificate that a relay shows."""

    cert: Path
    key: Path
    ca: Path | None = None
    """The CA that clients need to trust a certificate made by the relay itself; None for any other."""


def tls_files(settings: Settings) -> TlsFiles | None:
    """The files that these settings name; None for a relay that speaks no TLS."""
    if settings.tls_cert is not None and settings.tls_key is not None:
        return TlsFiles(settings.tls_cert, settings.tls_key)
    if not settings.tls_self_made:
        return None
    folder = settings.data_dir / "tls"
    return TlsFiles(folder / "cert.pem", folder / "key.pem", folder / "ca.pem")


def make_certificate(settings: Settings) -> TlsFiles | None:
    """Like `tls_files`, but make the relay's own certificate if the settings want one that is not there.

    It is for this machine and the host of `public_url`. Raises `TlsError` if it cannot be written.
    """
    files = tls_files(settings)
    if files is None or files.ca is None or files.cert.exists():
        return files
    host = urlsplit(settings.public_url or "").hostname
    try:
        settings.data_dir.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".tls-", dir=settings.data_dir) as folder:
            made = Path(folder) / "tls"
            write_dev_certificates(made, () if host is None else (host,))
            make_durable(*made.iterdir(), made)  # a relay that finds half a certificate does not start
            made.rename(files.cert.parent)  # all files at once
        make_durable(settings.data_dir)
    except (OSError, ValueError) as error:
        if files.cert.exists():  # another process was first
            return files
        raise TlsError(f"{files.cert.parent}: no certificate can be made: {error}") from None
    return files


def lacks_name(cert: Path, public_url: str | None) -> str | None:
    """The host of `public_url`, if clients who connect to it would refuse this certificate, else None.

    Raises `TlsError`.
    """
    host = urlsplit(public_url or "").hostname
    if host is None:
        return None
    host = ascii_host(host) or host
    names = {name.lower() for name in read_certificate(cert).names}
    wild = "*." + host.partition(".")[2]
    with contextlib.suppress(ValueError):
        host = wild = str(ipaddress.ip_address(host))
    return None if {host, wild} & names else host


def read_tls_files(cert: Path, key: Path) -> ssl.SSLContext:
    """A server's context with this certificate chain and key. Raises `TlsError`."""
    for path in (cert, key):
        try:
            path.open("rb").close()
        except OSError as error:
            raise TlsError(f"{path}: {error.strerror}") from None
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        # OpenSSL would ask for a password on the terminal; a daemon has none, so the key is refused instead.
        context.load_cert_chain(cert, key, password="")
    except (ssl.SSLError, ValueError) as error:
        reason = getattr(error, "reason", None) or "unreadable or encrypted"
        raise TlsError(f"{cert} and {key}: {reason.lower().replace('_', ' ')}") from None
    return context


def read_certificate(path: Path) -> CertificateFacts:
    """The names and times of the first certificate in a PEM file. Raises `TlsError`."""
    try:
        certificate = x509.load_pem_x509_certificate(path.read_bytes())
    except OSError as error:
        raise TlsError(f"{path}: {error.strerror}") from None
    except ValueError:
        raise TlsError(f"{path}: not a certificate in PEM form") from None
    try:
        found = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        names = tuple(str(name.value) for name in found)
    except x509.ExtensionNotFound:
        names = ()
    return CertificateFacts(names, certificate.not_valid_before_utc, certificate.not_valid_after_utc)


def ends_at(files: TlsFiles | None) -> float:
    """When the certificate in these files expires, in Unix seconds; 0 if there is none or it cannot be read.

    Call it when the certificate is loaded: the files may change while the relay still shows the old one.
    """
    with contextlib.suppress(TlsError):
        return 0.0 if files is None else read_certificate(files.cert).not_after.timestamp()
    return 0.0


def write_dev_certificates(directory: Path, names: tuple[str, ...] = ()) -> DevCertificates:
    """Make a CA and a certificate for localhost and `names`, for development only.

    The CA's own key is thrown away, so the CA can vouch for nothing else. Existing files are never replaced.
    Raises FileExistsError if one exists, and OSError if the folder cannot be written; none is left then.
    """
    import trustme  # slow to load, and a relay needs it at most once in its life

    written = DevCertificates(directory / "ca.pem", directory / "cert.pem", directory / "key.pem")
    for path in (written.ca, written.cert, written.key):
        if path.exists():
            raise FileExistsError(f"{path} exists already")
    directory.mkdir(parents=True, exist_ok=True)
    authority = trustme.CA(organization_name="relayd development")
    wanted = dict.fromkeys(("localhost", "127.0.0.1", "::1", *names))
    leaf = authority.issue_cert(*wanted, common_name="localhost")
    with contextlib.ExitStack() as undo:  # files without content would be in the way of the next attempt
        for path, data, mode in (
            (written.key, leaf.private_key_pem.bytes(), 0o600),
            (written.cert, b"".join(blob.bytes() for blob in leaf.cert_chain_pems), 0o644),
            (written.ca, authority.cert_pem.bytes(), 0o644),
        ):
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
            undo.callback(path.unlink)
            with os.fdopen(descriptor, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(descriptor)  # a file system may notice only now that it is full
        undo.pop_all()
    return written
