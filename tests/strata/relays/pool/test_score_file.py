from __future__ import annotations

import asyncio
import multiprocessing
import sqlite3

import pytest
from strata.relays.conduct import Aspect, Saved, Score, Standing
from strata.relays.pool.reputation import Observation
from strata.relays.pool.score_file import KEEP_SECONDS, SCHEMA_VERSION, ScoreFile, ScoreFileError, ScoreLog

T = 1_760_000_000.0
R = "ws://r/strata"
SAVED = Saved(Standing.BLACKLISTED, 2, T + 60, T - 5)
SCORE = Score(0.25, 0.5, 0.75, 0.125, 4096.0)


def saw(at: float = T, kind: Aspect = Aspect.PING, good: int = 1, value: float | None = 0.5) -> Observation:
    return Observation(R, at, kind, good, 0, value)


@pytest.mark.req("R-340")
def test_what_is_written_is_there_in_the_next_session(tmp_path):
    path = tmp_path / "deep" / "scores.db"
    with ScoreFile(path) as file:
        assert file.add(R, T) and not file.add(R, T + 1)
        file.write([saw(), saw(T + 1, Aspect.CONNECT, value=None)], [(R, SAVED, SCORE)], T + 2)
    with ScoreFile(path) as file:
        (relay,) = file.relays()
        assert (relay.url, relay.saved, relay.score, relay.added_at) == (R, SAVED, SCORE, T)
        assert file.observations(T) == [saw(), saw(T + 1, Aspect.CONNECT, value=None)]
        assert file.observations(T + 1) == [saw(T + 1, Aspect.CONNECT, value=None)]
        assert file.forget(R) and not file.forget(R)
        assert file.relays() == [] and file.observations(0) == []


def test_the_log_is_bounded_by_age_and_keeps_seven_days_at_least(tmp_path):
    assert KEEP_SECONDS >= 7 * 86_400
    with ScoreFile(tmp_path / "s.db") as file:
        file.write([saw(T - KEEP_SECONDS - 1), saw(T - KEEP_SECONDS)], [], T - KEEP_SECONDS)
        assert len(file.observations(0)) == 2
        file.write([], [], T)
        assert file.observations(0) == [saw(T - KEEP_SECONDS)]


def test_the_documented_schema(tmp_path):
    path = tmp_path / "s.db"
    ScoreFile(path).close()
    database = sqlite3.connect(path)
    assert database.execute("PRAGMA user_version").fetchone() == (SCHEMA_VERSION,)
    assert database.execute("PRAGMA journal_mode").fetchone() == ("wal",)
    columns = {
        table: [row[1] for row in database.execute(f"PRAGMA table_info({table})")]
        for table in ("relay_scores", "relay_probes")
    }
    database.close()
    assert columns == {
        "relay_scores": (
            "url standing score integrity latency_seconds throughput_bytes uptime strikes blacklisted_until"
            " last_seen_at added_at updated_at"
        ).split(),
        "relay_probes": "probe_id url at kind good bad value".split(),
    }


@pytest.mark.parametrize(
    "statement",
    ["PRAGMA user_version = 2", "CREATE TABLE mine (x)", "CREATE TABLE mine (x); PRAGMA user_version = 1"],
)
def test_a_file_of_another_version_or_purpose_is_refused_and_left_as_it_is(tmp_path, statement):
    path = tmp_path / "s.db"
    database = sqlite3.connect(path)
    database.executescript(statement)
    database.close()
    before = path.read_bytes()
    with pytest.raises(ScoreFileError, match="version 1"):
        ScoreFile(path)
    assert path.read_bytes() == before


@pytest.mark.parametrize("made_before", range(1, 9))
def test_a_file_that_another_program_makes_meanwhile_is_used(tmp_path, monkeypatch, made_before):
    path, moments = tmp_path / "s.db", []
    connect = sqlite3.connect

    class Watched(sqlite3.Connection):
        def execute(self, statement, *values):
            moments.append(statement)
            if len(moments) == made_before and not self.in_transaction:  # otherwise the other one waits
                ScoreFile(path).close()
            return super().execute(statement, *values)

    def opened(*arguments, **options):
        return connect(*arguments, **options, factory=sqlite3.Connection if moments else Watched)

    monkeypatch.setattr(sqlite3, "connect", opened)
    with ScoreFile(path) as file:
        assert file.relays() == []


def test_what_is_no_database_at_all_is_refused(tmp_path):
    path = tmp_path / "s.db"
    path.write_bytes(b"not a database, but long enough to look like a file of some kind" * 20)
    with pytest.raises(ScoreFileError):
        ScoreFile(path)
    with pytest.raises(ScoreFileError, match="cannot be opened"):
        ScoreFile(tmp_path / "s.db" / "below a file")


def open_and_write(path, number):
    with ScoreFile(path) as file:
        for n in range(20):
            file.write([saw(T + n)], [(f"{R}/{number}", SAVED, SCORE)], T)


@pytest.mark.slow
def test_several_programs_may_write_at_once(tmp_path):
    path = tmp_path / "s.db"
    context = multiprocessing.get_context("spawn")
    processes = [context.Process(target=open_and_write, args=(path, n)) for n in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
        assert process.exitcode == 0
    with ScoreFile(path) as file:
        assert len(file.observations(0)) == 60 and len(file.relays()) == 3


async def test_the_log_adds_up_what_is_alike_and_writes_when_it_ends(tmp_path):
    path = tmp_path / "s.db"
    log = ScoreLog(ScoreFile(path), scores=lambda: [(R, SAVED, SCORE)], wall=lambda: T)
    task = asyncio.create_task(log.run())
    await asyncio.sleep(0)
    log.put(saw(T, value=0.1))
    log.put(saw(T + 1, value=None))
    log.put(Observation(R, T + 2, Aspect.PING, 3, 1, 0.5))
    task.cancel()
    await asyncio.wait([task])
    with ScoreFile(path) as file:
        (one,) = file.observations(0)
        assert (one.at, one.good, one.bad) == (T + 2, 5, 1)
        assert one.value == pytest.approx((2 * 0.1 + 3 * 0.5) / 5)
        assert [relay.url for relay in file.relays()] == [R]


async def test_a_failing_disk_costs_observations_and_nothing_else(tmp_path, monkeypatch):
    file = ScoreFile(tmp_path / "s.db")
    loop, tried = asyncio.get_running_loop(), asyncio.Event()

    def write(*_):
        loop.call_soon_threadsafe(tried.set)
        raise ScoreFileError("disk full")

    monkeypatch.setattr(file, "write", write)
    log = ScoreLog(file, scores=list, wall=lambda: T)
    task = asyncio.create_task(log.run())
    log.put(saw())
    for _ in range(2):
        tried.clear()
        log.hurry()
        async with asyncio.timeout(10):
            await tried.wait()
    assert log.lost == 1 and not task.done()
    task.cancel()
    await asyncio.wait([task])
