"""What SIGHUP reloads, and what is logged about it."""

from __future__ import annotations

import asyncio
import gc
import os
import ssl
import threading

import pytest
import structlog

from relayd.config import ConfigurationError, Settings, load
from relayd.metrics import Metrics
from relayd.moderation import Bans
from relayd.policy import Policy
from relayd.process import reloading
from relayd.process.reloading import read_again, report
from relayd.tls import TlsError, read_certificate, write_dev_certificates


@pytest.fixture
def files(tmp_path):
    """A settings file that names a certificate, and another certificate in another folder."""
    path = tmp_path / "relayd.toml"

    def write(folder: str, more: str = "") -> None:
        path.write_text(
            f"tls_cert = '{tmp_path / folder}/cert.pem'\ntls_key = '{tmp_path / folder}/key.pem'\n{more}"
        )

    for folder in ("old", "new"):
        write_dev_certificates(tmp_path / folder)
    write("old")
    return path, write


def test_certificates_are_read_from_the_paths_of_now(files, tmp_path):
    path, write = files
    running = load(path)
    write("new")
    (tmp_path / "old" / "cert.pem").unlink()
    reread = read_again(running)
    assert reread.settings.tls_cert == tmp_path / "new" / "cert.pem"
    assert reread.changes.changed == ("tls_cert", "tls_key")
    assert reread.tls is not None
    assert reread.tls_ends_at == read_certificate(tmp_path / "new" / "cert.pem").not_after.timestamp()


def test_nothing_is_kept_of_the_settings_before(files):
    path, write = files
    running = load(path)
    policy = Policy.from_settings(running, [], Bans())

    def kept() -> tuple[int, ...]:
        gc.collect()
        return tuple(
            sum(isinstance(each, kind) for each in gc.get_objects())
            for kind in (Settings, Policy, ssl.SSLContext)
        )

    def again(number: int) -> None:
        nonlocal running, policy
        write("new" if number % 2 else "old", f"blocked_types = ['T{number}']")
        running = read_again(running).settings
        policy = Policy.from_settings(running, [], Bans())

    for number in range(3):
        again(number)
    before = kept()
    for number in range(20):
        again(number)
    # There may be fewer: what earlier tests have left may go meanwhile.
    assert all(now <= then for now, then in zip(kept(), before, strict=True))
    assert "T19" in policy.declined.types


def test_one_thing_that_is_wrong_is_enough_for_nothing_to_be_taken_over(files):
    path, write = files
    running = load(path)
    write("missing", "blocked_types = ['TEXT']")
    with pytest.raises(TlsError, match="No such file"):
        read_again(running)
    write("new", "max_limit = 0")
    with pytest.raises(ConfigurationError, match="max_limit"):
        read_again(running)


def test_a_key_is_not_read_again_from_a_pipe(files, tmp_path):
    running = load(files[0])
    (tmp_path / "old" / "key.pem").unlink()
    os.mkfifo(tmp_path / "old" / "key.pem")
    with pytest.raises(TlsError, match="not a regular file"):
        read_again(running)


async def test_a_file_that_does_not_answer_changes_nothing_and_what_was_asked_meanwhile_is_done(
    files, monkeypatch
):
    path, write = files
    answer = threading.Event()
    current = reloading.CurrentSettings(load(path), None, Metrics())
    taken: list[Settings] = []
    current.take_over = taken.append
    original = reloading.read_again
    calls: list[str] = []

    def hangs(running: Settings) -> reloading.Reread:
        calls.append(threading.current_thread().name)
        if len(calls) == 1:
            answer.wait(60)
        return original(running)

    monkeypatch.setattr(reloading, "read_again", hangs)
    monkeypatch.setattr(reloading, "RELOAD_SECONDS", 0.2)
    with structlog.testing.capture_logs() as lines:
        current.reloads.ask()
        while not calls:  # noqa: ASYNC110 - it happens in a thread
            await asyncio.sleep(0.01)
        monkeypatch.setattr(reloading, "RELOAD_SECONDS", 60)
        write("old", "blocked_types = ['TEXT']")
        for _ in range(3):
            current.reloads.ask()
        async with asyncio.timeout(60):
            while not taken:  # noqa: ASYNC110 - after two threads
                await asyncio.sleep(0.01)
    assert [line["event"] for line in lines] == ["not_reloaded", "reloaded"]
    assert "did not answer within" in lines[0]["problem"]
    assert [settings.blocked_types for settings in taken] == [("TEXT",)]
    assert len(calls) == 2, "three requests during a reload are one"
    answer.set()


def test_a_relay_without_tls_reads_no_certificate():
    reread = read_again(load())
    assert (reread.tls, reread.tls_ends_at) == (None, 0.0)


def test_the_log_names_what_changed_and_what_waits_for_a_restart(files):
    path, write = files
    running = load(path)
    write("new", "blocked_types = ['TEXT']\nport = 1\nmax_packet_bytes = 4194304")
    with structlog.testing.capture_logs() as lines:
        report(read_again(running))
    assert [line["event"] for line in lines] == ["reloaded", "restart_needed", "setting"]
    assert lines[0]["changed"] == ["tls_cert", "tls_key", "blocked_types"]
    assert lines[1]["settings"] == ["port", "max_packet_bytes"]
    assert lines[1]["log_level"] == "warning"
