from __future__ import annotations

import errno
import os
import shutil
import ssl
import stat
import sys
from pathlib import Path

import pytest

from relayd.config import Settings
from relayd.tls import (
    ServerTls,
    TlsError,
    TlsFiles,
    lacks_name,
    make_certificate,
    read_certificate,
    read_tls_files,
    tls_files,
    write_dev_certificates,
)


@pytest.fixture
def made(tmp_path):
    return write_dev_certificates(tmp_path / "certs", ("relay.test", "10.0.0.1"))


def handshake(server: ssl.SSLContext, ca: Path, name: str) -> ssl.SSLObject:
    """Shake hands in memory; returns the client's side. Raises `ssl.SSLError` if the client objects."""
    client = ssl.create_default_context(cafile=str(ca))
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    ours = client.wrap_bio(to_client, to_server, server_hostname=name)
    theirs = server.wrap_bio(to_server, to_client, server_side=True)
    waiting = [ours, theirs]
    while waiting:
        for side in list(waiting):
            try:
                side.do_handshake()
            except ssl.SSLWantReadError:
                continue
            waiting.remove(side)
    return ours


@pytest.mark.parametrize("name", ["localhost", "127.0.0.1", "relay.test", "10.0.0.1"])
def test_a_client_that_trusts_the_ca_accepts_every_name(made, name):
    side = handshake(read_tls_files(made.cert, made.key), made.ca, name)
    assert side.version() in {"TLSv1.2", "TLSv1.3"}


@pytest.mark.parametrize("room", [0, 1])
def test_a_full_disk_leaves_nothing_in_the_way_of_the_next_attempt(tmp_path, monkeypatch, room):
    real, calls = os.fsync, []

    def full(descriptor: int) -> None:
        calls.append(descriptor)
        if len(calls) > room:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(descriptor)

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", full)
        with pytest.raises(OSError, match="No space left"):
            write_dev_certificates(tmp_path)
    assert list(tmp_path.iterdir()) == []
    assert write_dev_certificates(tmp_path).ca.exists()


def test_another_name_or_another_ca_is_refused(made, tmp_path):
    context = read_tls_files(made.cert, made.key)
    with pytest.raises(ssl.SSLCertVerificationError):
        handshake(context, made.ca, "elsewhere.test")
    stranger = write_dev_certificates(tmp_path / "other")
    with pytest.raises(ssl.SSLCertVerificationError):
        handshake(context, stranger.ca, "localhost")


def test_the_key_is_private_and_nothing_is_ever_replaced(made):
    assert stat.S_IMODE(made.key.stat().st_mode) == 0o600
    before = made.cert.read_bytes()
    with pytest.raises(FileExistsError):
        write_dev_certificates(made.cert.parent)
    assert made.cert.read_bytes() == before


def test_a_reload_shows_the_new_certificate_to_new_handshakes(made, tmp_path):
    tls = ServerTls(read_tls_files(made.cert, made.key))
    new, old_ca = write_dev_certificates(tmp_path / "new"), made.ca
    shutil.copy(new.cert, made.cert)
    shutil.copy(new.key, made.key)
    tls.renew(read_tls_files(made.cert, made.key))
    for name in ("localhost", "127.0.0.1"):  # a client that connects to an address sends no server name
        handshake(tls.context, new.ca, name)
    with pytest.raises(ssl.SSLCertVerificationError):
        handshake(tls.context, old_ca, "localhost")


@pytest.mark.parametrize("broken", ["cert", "key"])
def test_a_reload_of_broken_files_keeps_the_old_ones(made, tmp_path, broken):
    tls = ServerTls(read_tls_files(made.cert, made.key))
    other = write_dev_certificates(tmp_path / "other")
    shutil.copy(getattr(other, broken), getattr(made, broken))  # no longer a pair
    with pytest.raises(TlsError):
        tls.renew(read_tls_files(made.cert, made.key))
    handshake(tls.context, made.ca, "localhost")


def test_what_is_wrong_is_said_with_the_file(made, tmp_path):
    with pytest.raises(TlsError, match=r"none\.pem: No such file"):
        read_tls_files(tmp_path / "none.pem", made.key)
    made.key.write_text("nonsense")
    with pytest.raises(TlsError, match=r"cert\.pem and .*key\.pem"):
        read_tls_files(made.cert, made.key)
    with pytest.raises(TlsError, match="not a certificate"):
        read_certificate(made.key)
    with pytest.raises(TlsError, match="No such file"):
        read_certificate(tmp_path / "none.pem")


def test_a_certificate_tells_its_names_and_times(made):
    facts = read_certificate(made.cert)
    assert {"localhost", "relay.test", "10.0.0.1"} <= set(facts.names)
    assert facts.not_before < facts.not_after


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells what is synced")
def test_a_certificate_of_the_relays_own_is_on_the_disk_before_it_is_in_place(tmp_path, monkeypatch):
    synced: dict[str, bool] = {}
    sync = os.fsync

    def fsync(fd: int) -> None:
        synced[Path(os.readlink(f"/proc/self/fd/{fd}")).name] = (tmp_path / "tls").exists()
        sync(fd)

    monkeypatch.setattr(os, "fsync", fsync)
    make_certificate(Settings(data_dir=tmp_path, tls_self_made=True))
    in_place = {"ca.pem": False, "cert.pem": False, "key.pem": False, "tls": False, tmp_path.name: True}
    assert synced == in_place


def test_a_relay_makes_its_own_certificate_once_and_all_of_it(tmp_path):
    settings = Settings(
        data_dir=tmp_path / "data", tls_self_made=True, public_url="wss://relay.example.net/s"
    )
    files = make_certificate(settings)
    assert files is not None and files.ca is not None
    assert make_certificate(settings) == tls_files(settings) == files
    facts = read_certificate(files.cert)
    assert {"localhost", "127.0.0.1", "relay.example.net"} <= set(facts.names)
    read_tls_files(files.cert, files.key)
    assert os.listdir(settings.data_dir) == ["tls"]
    assert lacks_name(files.cert, settings.public_url) is None
    assert lacks_name(files.cert, "wss://other.example.net/s") == "other.example.net"
    assert lacks_name(files.cert, "wss://[::1]:7447/s") is None
    umlaut = write_dev_certificates(tmp_path / "umlaut", ("bücher.example",))
    assert lacks_name(umlaut.cert, "wss://Bücher.example/s") is None


def test_files_that_are_named_come_before_one_of_the_relay_s_own(tmp_path, made):
    named = Settings(data_dir=tmp_path, tls_self_made=True, tls_cert=made.cert, tls_key=made.key)
    assert make_certificate(named) == TlsFiles(made.cert, made.key)
    assert make_certificate(Settings(data_dir=tmp_path)) is None
    (tmp_path / "file").write_text("")
    with pytest.raises(TlsError, match="no certificate can be made"):
        make_certificate(Settings(data_dir=tmp_path / "file", tls_self_made=True))
