from __future__ import annotations

import contextlib
import errno
import os
import resource
import shutil
from datetime import timedelta
from typing import ClassVar

import pytest
from strata.protocol.sequences import first_of_day

from relayd.cli import doctor
from relayd.cli.doctor import Diagnosis, Verdict, examine
from relayd.config import Settings
from relayd.lineage import SKEW_SECONDS, KnownLog, Lineage, Term
from relayd.store.guard import Guard
from relayd.store.migrate import latest_revision
from relayd.store.sizes import Limit, Replica, Server, Sizes
from relayd.store.terms import Reset
from relayd.store.types import RelaySecrets, StoreUnavailable, UnsafeDatabase
from relayd.tls import read_certificate, write_dev_certificates

NOW = 1_760_000_000.0
DAY = int(NOW) // 86_400
URL = "postgresql://h/d"


class FakeStore:
    """Opens as the test sets: `failure` is raised, otherwise `last` is the log's head."""

    failure: Exception | None = None
    last = first_of_day(DAY) + 1
    latest = int(NOW) + SKEW_SECONDS
    closed = 0

    @classmethod
    async def open(cls, url: str, *, allow_unsafe: bool) -> FakeStore:
        if cls.failure is not None:
            raise cls.failure
        return cls()

    secrets = RelaySecrets(bytes(32), bytes(32), 0)
    known = KnownLog()
    begun: ClassVar[list[Reset]] = []

    async def head(self) -> int:
        return self.last

    async def latest_told_at(self) -> int:
        return self.latest

    async def resets(self) -> list[Reset]:
        return self.begun

    async def close(self) -> None:
        type(self).closed += 1


@pytest.fixture
def store(monkeypatch):
    class Store(FakeStore):
        revision: str | Exception | None = latest_revision()
        serves_us = False
        server = Server(Sizes(1, 1, connections=5, max_connections=97), (), (), is_pooled=False)

    async def current_revision(url: str) -> str | None:
        if isinstance(Store.revision, Exception):
            raise Store.revision
        return Store.revision

    async def is_served(url: str) -> bool:
        return Store.serves_us

    async def read_server(url: str) -> Server:
        return Store.server

    monkeypatch.setattr(doctor, "read_server", read_server)
    monkeypatch.setattr(doctor, "Store", Store)
    monkeypatch.setattr(doctor, "current_revision", current_revision)
    monkeypatch.setattr(doctor, "is_served", is_served)
    return Store


async def check(settings: Settings, name: str, now: float = NOW) -> Diagnosis:
    found = [item for item in await examine(settings, lambda: now) if item.name == name]
    assert found, name
    return found[-1]


async def test_a_good_database_is_said_to_be_good(store):
    settings = Settings(database_url=URL)
    assert (await check(settings, "schema")).verdict is Verdict.OK
    assert (await check(settings, "database")).verdict is Verdict.OK
    assert store.closed == 2


@pytest.mark.parametrize("revision", [None, "0000", StoreUnavailable("away"), UnsafeDatabase("newer")])
async def test_a_database_away_or_not_migrated_is_a_problem_with_advice(store, revision):
    store.revision = revision
    found = await check(Settings(database_url=URL), "schema")
    assert found.verdict is Verdict.PROBLEM
    assert found.advice


async def test_a_newer_schema_that_serves_this_program_is_no_problem(store):
    store.revision, store.serves_us = "9999", True
    found = await check(Settings(database_url=URL), "schema")
    assert (found.verdict, "9999" in found.found) == (Verdict.OK, True)


async def test_an_unsafe_database_is_a_problem(store):
    store.failure = UnsafeDatabase("fsync is off")
    found = await check(Settings(database_url=URL), "database")
    assert (found.verdict, found.found) == (Verdict.PROBLEM, "fsync is off")


async def test_a_log_that_tells_of_the_future_points_at_the_clock_and_at_the_command(store):
    store.latest = int(NOW) + SKEW_SECONDS + 1
    found = await check(Settings(database_url=URL), "log")
    assert found.verdict is Verdict.WARNING
    assert "clock if it is behind" in found.advice and "relayd mend-times" in found.advice


async def test_the_embedded_server_is_neither_started_nor_made(tmp_path):
    folder = tmp_path / "data"
    found = await check(Settings(data_dir=folder), "database")
    assert found.verdict is Verdict.OK
    assert not folder.exists()


async def test_an_embedded_server_that_runs_is_looked_at_like_any_other(store, tmp_path, monkeypatch):
    monkeypatch.setattr(doctor, "running_server", lambda folder: contextlib.nullcontext(URL))
    store.server = Server(Sizes(1, 1, connections=90, max_connections=97), (), (), is_pooled=False)
    settings = Settings(data_dir=tmp_path / "data")
    assert (await check(settings, "connections")).verdict is Verdict.WARNING
    assert (await check(settings, "schema")).verdict is Verdict.OK


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
async def test_a_folder_that_cannot_be_written_is_a_problem(tmp_path):
    tmp_path.chmod(0o500)
    assert (await check(Settings(data_dir=tmp_path / "data"), "database")).verdict is Verdict.PROBLEM


async def test_a_folder_of_another_user_keeps_nothing_else_from_being_examined(tmp_path, monkeypatch):
    def closed(folder):
        raise PermissionError(errno.EACCES, "Permission denied", str(folder))

    monkeypatch.setattr(doctor, "running_server", closed)
    checks = await examine(Settings(data_dir=tmp_path), lambda: NOW)
    (found,) = [each for each in checks if each.verdict is Verdict.PROBLEM]
    assert found.name == "database" and "relay's user" in found.advice
    assert {"clock", "tls", "open files"} <= {each.name for each in checks}


async def test_little_room_is_a_warning(tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10, 9, 1))
    assert (await check(Settings(data_dir=tmp_path), "disk")).verdict is Verdict.WARNING


@pytest.mark.parametrize(("synchronised", "verdict"), [(True, Verdict.OK), (False, Verdict.WARNING)])
async def test_the_clock_is_judged_by_what_the_kernel_says(tmp_path, monkeypatch, synchronised, verdict):
    monkeypatch.setattr(doctor, "_clock_is_synchronised", lambda: synchronised)
    assert (await check(Settings(data_dir=tmp_path), "clock")).verdict is verdict


async def test_open_files_have_to_suffice_for_the_connections(tmp_path, monkeypatch):
    monkeypatch.setattr(resource, "getrlimit", lambda which: (1024, 1024))
    few = Settings(data_dir=tmp_path, max_connections=100)
    assert (await check(few, "open files")).verdict is Verdict.OK
    many = Settings(data_dir=tmp_path, max_connections=1000)
    assert (await check(many, "open files")).verdict is Verdict.WARNING


async def test_plain_websocket_is_fine_on_loopback_only(tmp_path):
    assert (await check(Settings(data_dir=tmp_path), "tls")).verdict is Verdict.OK
    assert (await check(Settings(data_dir=tmp_path, host="0.0.0.0"), "tls")).verdict is Verdict.WARNING


async def test_a_certificate_is_judged_by_its_end(tmp_path):
    made = write_dev_certificates(tmp_path / "certs")
    end = read_certificate(made.cert).not_after
    settings = Settings(data_dir=tmp_path, tls_cert=made.cert, tls_key=made.key)
    for left, verdict in ((30, Verdict.OK), (20, Verdict.WARNING), (0, Verdict.PROBLEM)):
        moment = (end - timedelta(days=left)).timestamp()
        assert (await check(settings, "tls", moment)).verdict is verdict
    made.key.write_text("nonsense")
    assert (await check(settings, "tls")).verdict is Verdict.PROBLEM


async def test_what_loading_changed_is_a_warning(tmp_path):
    found = await check(Settings(data_dir=tmp_path, warnings=("clamped",)), "settings")
    assert (found.verdict, found.found) == (Verdict.WARNING, "clamped")


async def test_a_log_that_has_lost_its_end_is_named(store, tmp_path):
    settings = Settings(database_url=URL, data_dir=tmp_path)
    before = Lineage([Term(1, bytes(4), 0, 1)]).claim(store.last + 10, is_exact=True)
    Guard(tmp_path / "log-guard", bytes(32)).write(before)
    (log,) = [check for check in await examine(settings, lambda: NOW) if check.name == "log"]
    assert log.verdict is Verdict.WARNING and "older copy" in log.found
    # The relay has begun an epoch since, which is reported for a week.
    store.known = KnownLog(Lineage([Term(1, bytes(4), 0, 1), Term(2, b"next", store.last, 2)]))
    store.begun = [Reset(2, store.last, "rolled_back", int(NOW) - 60)]
    (log,) = [check for check in await examine(settings, lambda: NOW) if check.name == "log"]
    assert "epoch 2" in log.found and str(store.last) in log.advice
    store.begun = [Reset(2, store.last, "rolled_back", int(NOW) - 8 * 86_400)]
    assert not [check for check in await examine(settings, lambda: NOW) if check.name == "log"]


async def test_the_server_has_connections_left_and_indexes_that_work(store):
    settings = Settings(database_url=URL, workers=4)
    for name in ("connections", "indexes", "pooler"):
        assert (await check(settings, name)).verdict is Verdict.OK, name
    store.server = Server(Sizes(1, 1, connections=60, max_connections=97), (), ("packets_x",), is_pooled=True)
    assert (await check(settings, "connections")).verdict is Verdict.WARNING
    assert "packets_x" in (await check(settings, "indexes")).found
    assert (await check(settings, "pooler")).verdict is Verdict.PROBLEM


async def test_a_database_with_no_connection_left_is_a_problem_among_the_other_checks(store, monkeypatch):
    async def head(self: object) -> int:
        raise StoreUnavailable("no connection left")

    monkeypatch.setattr(store, "head", head)
    found = await check(Settings(database_url=URL), "database")
    assert (found.verdict, found.found) == (Verdict.PROBLEM, "no connection left")
    assert await check(Settings(database_url=URL), "clock")
    assert store.closed == 2


@pytest.mark.parametrize("of", ["role", "database"])
async def test_the_limit_that_leaves_the_fewest_connections_is_named(store, of):
    enough, few = Limit("role", 100, 3), Limit(of, 10, 3)
    store.server = Server(Sizes(1, 1, connections=5, max_connections=97), (enough, few), (), is_pooled=False)
    found = await check(Settings(database_url=URL), "connections")
    assert found.verdict is Verdict.WARNING and "3 of 10" in found.found
    assert f"ALTER {of.upper()}" in found.advice


@pytest.mark.parametrize(
    ("replica", "verdict"),
    [
        (Replica(is_replica=True, lag_seconds=3.0, head=1), Verdict.OK),
        (Replica(is_replica=True, lag_seconds=900.0, head=FakeStore.last), Verdict.OK),  # nothing was written
        (Replica(is_replica=True, lag_seconds=900.0, head=1), Verdict.WARNING),
        (StoreUnavailable("away"), Verdict.WARNING),
    ],
)
async def test_a_replica_is_judged_by_what_it_lacks(store, monkeypatch, replica, verdict):
    async def read_replica(url: str) -> object:
        if isinstance(replica, Exception):
            raise replica
        return replica

    monkeypatch.setattr(doctor, "read_replica", read_replica)
    settings = Settings(database_url=URL, read_database_url=URL)
    assert (await check(settings, "replica")).verdict is verdict


async def test_proxies_that_are_not_named_or_name_everybody_are_a_warning(tmp_path, monkeypatch):
    (tmp_path / "mark").write_text("")
    monkeypatch.setattr(doctor, "_CONTAINER_MARKS", (str(tmp_path / "mark"),))
    data = tmp_path / "data"
    assert (await check(Settings(data_dir=data), "proxies")).verdict is Verdict.WARNING
    named = Settings(data_dir=data, trusted_proxies=("10.0.0.1",))
    assert (await check(named, "proxies")).verdict is Verdict.OK
    everybody = Settings(data_dir=data, trusted_proxies=("::/0",))
    assert (await check(everybody, "proxies")).verdict is Verdict.WARNING


async def test_manifests_have_to_be_there_for_retention(tmp_path):
    def settings() -> Settings:
        folder = tmp_path / "manifests"
        return Settings(data_dir=tmp_path, retention_requires_archive=True, archive_manifests=folder)

    assert (await check(settings(), "manifests")).verdict is Verdict.WARNING
    (tmp_path / "manifests").mkdir()
    assert (await check(settings(), "manifests")).verdict is Verdict.WARNING
    (tmp_path / "manifests" / "00000001.json").write_text("{}")
    assert (await check(settings(), "manifests")).verdict is Verdict.OK


async def test_a_bus_that_cannot_be_reached_is_a_warning(tmp_path, monkeypatch):
    async def reached(url: str) -> float:
        return 0.0012

    async def away(url: str) -> float:
        raise ConnectionError("nobody listens")

    settings = Settings(data_dir=tmp_path, bus_url="nats://bus:4222")
    for probe, verdict, found in (
        (reached, Verdict.OK, "reachable, 1.2 ms there and back"),
        (away, Verdict.WARNING, "nobody listens"),
    ):
        monkeypatch.setattr(doctor, "probe_bus", probe)
        (check,) = [each for each in await examine(settings, lambda: NOW) if each.name == "bus"]
        assert (check.verdict, check.found) == (verdict, found)
    without = await examine(Settings(data_dir=tmp_path), lambda: NOW)
    assert not [each for each in without if each.name == "bus"]
