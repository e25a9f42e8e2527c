"""An upgrade under load: a process of the previous program works beside a new one, and gives way to it."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from relayd.store.migrate import REVISION, current_revision
from tests.support.backups import Copied
from tests.support.bare_client import open_client
from tests.support.forks import RELAYD, run_fork
from tests.support.made_packets import ids_of, make, new_identity
from tests.support.old_programs import program_of_schema_before
from tests.support.patient_clients import (
    DEADLINE,
    Ledger,
    follow,
    grown,
    publish,
    settle,
    until,
    whole_log,
)
from tests.support.relay_process import RelayProcess, environment, running


@pytest.mark.timeout(400)
@pytest.mark.req("R-308", "R-311")
async def test_the_program_before_goes_on_beside_a_new_one_and_makes_way_under_load(
    tmp_path: Path, shared_database: str
):
    sources = tmp_path / "sources"
    sources.mkdir()
    revision, program = await asyncio.to_thread(program_of_schema_before, sources)
    database = await Copied(shared_database).make(migrated=False)
    old = RelayProcess(
        tmp_path / "old",
        database_url=database.url,
        python_path=os.pathsep.join([str(program), str(program / "client")]),
    )
    new = RelayProcess(tmp_path / "new", database_url=database.url)
    ledger = Ledger()
    late = Ledger(ledger.identity)  # what a reader that connects to the new one sees
    with running(old):
        assert await current_revision(database.url) == revision != REVISION
        way = SimpleNamespace(ws=old.ws)  # where clients of the old one look for a relay
        async with asyncio.TaskGroup() as group:
            publishers = [group.create_task(publish(way, ledger)) for _ in range(2)]
            readers = [group.create_task(follow(way, ledger))]
            await grown(ledger, 200)
            with running(new):
                # The new one has changed the schema under the old one's load.
                assert await current_revision(database.url) == REVISION
                publishers.append(group.create_task(publish(new, ledger)))
                readers.append(group.create_task(follow(new, late)))
                accepted = old.metric("relayd_publishes_total", outcome="accepted")
                await grown(ledger, 300)
                assert old.metric("relayd_publishes_total", outcome="accepted") > accepted
                await ban_from(new, at=old)
                # It drains as for any restart: its clients connect to the new one, and resume.
                way.ws = new.ws
                assert await asyncio.to_thread(old.stop) == 0
                await grown(ledger, 200)
                # An old one started again on the newer schema, which serves it, has the log as well.
                await asyncio.to_thread(old.start)
                publishers.append(group.create_task(publish(old, ledger)))
                await until(
                    lambda: old.metric("relayd_publishes_total", outcome="accepted") > 50, "the old one again"
                )
                for task in publishers:
                    task.cancel()
                await asyncio.wait(publishers)
                await settle(new, ledger)
                log = await whole_log(new, ledger)
                assert set(log) == ledger.acknowledged and len(set(log)) == len(log)
                assert await whole_log(old, ledger) == log
                await until(lambda: len(ledger.seen) >= len(log) <= len(late.seen), "the readers have all")
                for task in readers:
                    task.cancel()
                await asyncio.wait(readers)
                assert ledger.seen == late.seen == log
                assert not ledger.resets + late.resets and not ledger.refused
                assert not old.complaints() + new.complaints()


async def ban_from(new: RelayProcess, *, at: RelayProcess) -> None:
    """A ruling made with the new program applies at the old relay."""
    author = new_identity()
    env = environment(new.settings)
    code, _, err = await asyncio.to_thread(run_fork, RELAYD, ["ban", author.did, "--reason", "spam"], env=env)
    assert code == 0, err
    async with open_client(at.ws) as client, asyncio.timeout(DEADLINE):
        while (await client.publish(make(author))).get("code") != "blocked_author":
            pass
        events, _ = await client.subscribe("s", {"authors": [author.did]})
        assert ids_of(events) == []
