"""Policy on running relays: declined packets go out on no path; an operator's own policies are consulted."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import asyncpg
import msgspec
import pytest
from strata.protocol.auth import answer_challenge
from strata.protocol.packets import Packet
from strata.protocol.wire import AuthChallenge, encode

from tests.support.bare_client import BareClient, open_client
from tests.support.made_packets import ids_of, make, new_identity
from tests.support.relay_process import ROOT, RelayProcess, running
from tests.support.waiting import wait_until

HASH = "0x" + "ce" * 32


class Configured:
    """A relay whose policy is changed with SIGHUP."""

    def __init__(self, folder: Path, **settings: Any) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.file = folder / "relayd.toml"
        self.file.write_text("")
        self.relay = RelayProcess(folder, arguments=("--config", str(self.file)), **settings)

    def set(self, **settings: Any) -> None:
        """Write these settings to the file and make the relay read it."""
        lines = (f"{name} = {json.dumps(value)}\n" for name, value in settings.items())
        self.file.write_text("".join(lines))
        before = self._reloads()
        os.kill(self.relay.pid, signal.SIGHUP)
        wait_until(lambda: self._reloads() > before, "reloaded")

    def _reloads(self) -> int:
        return self.relay.log.read_text().count('"reloaded"')


@contextlib.contextmanager
def configured(folder: Path, **settings: Any) -> Iterator[Configured]:
    made = Configured(folder, **settings)
    with running(made.relay):
        yield made
        assert not made.relay.complaints()


@pytest.fixture(scope="module")
def governed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Configured]:
    with configured(tmp_path_factory.mktemp("governed")) as made:
        yield made


async def served_by_history(client: BareClient, wanted: Packet, other: Packet) -> set[str]:
    """Try every kind of history query that has both packets in its range; returns what all of them served."""
    found: list[set[str]] = []
    authors = [wanted.author_id, other.author_id]
    for filters in (
        {"authors": authors},
        {"authors": authors, "types": [wanted.content_type, other.content_type]},
        {"authors": authors, "order": "asc"},
        {"packet_ids": [wanted.packet_id, other.packet_id]},
    ):
        events, _ = await client.subscribe("history", filters)
        found.append(set(ids_of(events)))
    events, _ = await client.subscribe("gapless", {"authors": authors}, gapless=True)
    found.append(set(ids_of(events)))
    for name in ("history", "gapless"):
        await client.send({"type": "UNSUBSCRIBE", "subscription_id": name})
    assert all(one == found[0] for one in found)
    return found[0]


def declining(packet: Packet) -> dict[str, dict[str, list[str]]]:
    return {
        "author": {"blocked_authors": [packet.author_id]},
        "id": {"blocked_packet_ids": [packet.packet_id]},
        "media": {"blocked_media_hashes": [HASH]},
        "type": {"blocked_types": ["DECLINED"]},
    }


@pytest.mark.req("R-185", "R-301", "R-322", "R-323")
@pytest.mark.parametrize("by", ["author", "id", "media", "type"])
async def test_a_stored_packet_that_is_declined_leaves_by_no_path_and_comes_back_unharmed(
    governed: Configured, by: str
):
    relay = governed.relay
    wanted = make(new_identity())
    declined = make(new_identity(), type="DECLINED", media=[{"media_hash": HASH}])
    both = {wanted.packet_id, declined.packet_id}
    async with open_client(relay.ws) as client:
        for packet in (declined, wanted):
            assert (await client.publish(packet))["type"] == "OK"
        assert await served_by_history(client, wanted, declined) == both
        governed.set(**declining(declined)[by])
        assert await served_by_history(client, wanted, declined) == {wanted.packet_id}
        assert relay.get(f"/packets/{declined.packet_id}")[0] == 410
        assert relay.get(f"/packets/{wanted.packet_id}")[0] == 200
        # The duplicate (check 8) comes before policy: it is stored, and saying so reveals nothing.
        assert (await client.publish(declined))["duplicate"] is True
        governed.set()
        assert await served_by_history(client, wanted, declined) == both
        status, _, body = relay.get(f"/packets/{declined.packet_id}")
        assert (status, json.loads(body)["packet"]) == (200, declined.value)


@pytest.mark.req("R-186", "R-323")
@pytest.mark.parametrize("by", ["author", "id", "media", "type"])
async def test_an_open_subscription_gets_nothing_more_of_what_is_declined(
    tmp_path: Path, shared_database: str, by: str
):
    """The packet arrives at a relay that accepts it, and another relay on the same log does not serve it."""
    wanted, author = make(new_identity()), new_identity()
    before = make(author)
    after = make(author, type="DECLINED", media=[{"media_hash": HASH}])
    with (
        configured(tmp_path / "strict", database_url=shared_database) as strict,
        running(RelayProcess(tmp_path / "lax", database_url=shared_database)) as lax,
    ):
        async with open_client(strict.relay.ws) as reader, open_client(lax.ws) as writer:
            authors = [wanted.author_id, author.did]
            await reader.subscribe("live", {"authors": authors})
            await reader.subscribe("gapless", {"authors": authors}, gapless=True)
            await writer.publish(before)
            for name in ("live", "gapless"):
                assert ids_of(await reader.events(name, 1)) == [before.packet_id]
            strict.set(**declining(after)[by])
            for packet in (after, wanted):
                assert (await writer.publish(packet))["type"] == "OK"
            for name in ("live", "gapless"):
                assert ids_of(await reader.events(name, 1)) == [wanted.packet_id]
                assert await reader.quiet(name) == []
            # Nor does a new subscription get it from the memory of the newest packets.
            events, _ = await reader.subscribe("new", {"authors": authors, "packet_ids": [after.packet_id]})
            assert events == []
            refused = await reader.publish(make(author, type="DECLINED", media=[{"media_hash": HASH}]))
            expected = {"author": "blocked_author", "id": None}.get(by, "policy_rejected")
            assert refused.get("code") == expected


@pytest.mark.req("R-186")
async def test_a_blocked_author_is_refused_whoever_brings_the_packet(tmp_path: Path):
    blocked, peer = new_identity(), new_identity()
    relay = RelayProcess(tmp_path, blocked_authors=[blocked.did], replication_peers=[peer.did])
    with running(relay):
        async with open_client(relay.ws) as author, open_client(relay.ws) as replicating:
            challenge = msgspec.convert(replicating.challenges[0], AuthChallenge)
            await replicating.send(encode(answer_challenge(challenge, peer)).decode())
            granted = await replicating.expect(lambda message: message["type"] == "AUTH_OK")
            assert "replicate" in granted["capabilities"]
            for client in (author, replicating):
                assert (await client.publish(make(blocked)))["code"] == "blocked_author"
                assert (await client.publish(make(new_identity())))["type"] == "OK"


@pytest.mark.req("R-324")
async def test_nothing_that_is_said_about_a_packet_changes_its_place_or_hides_it(governed: Configured):
    author, crowd = new_identity(), [new_identity() for _ in range(3)]
    posts = [make(author, f"post {n}") for n in range(4)]
    async with open_client(governed.relay.ws) as client:
        for post in posts:
            assert (await client.publish(post))["type"] == "OK"
        for critic in crowd:
            said = make(critic, "false!", type="NOTE", target_packet=posts[1].packet_id, verdict="FALSE")
            assert (await client.publish(said))["type"] == "OK"
        for order in ("asc", "desc"):
            events, _ = await client.subscribe("s", {"authors": [author.did], "order": order})
            expected = [post.packet_id for post in posts]
            assert ids_of(events) == (expected if order == "asc" else expected[::-1])


@pytest.mark.req("R-187")
async def test_allow_lists_refuse_the_rest_and_withdraw_nothing(governed: Configured):
    member, stranger = new_identity(), new_identity()
    stored = make(stranger)
    async with open_client(governed.relay.ws) as client:
        assert (await client.publish(stored))["type"] == "OK"
        governed.set(allowed_authors=[member.did], allowed_types=["POST"])
        assert (await client.publish(make(member)))["type"] == "OK"
        for packet, detail in (
            (make(stranger), "author_not_allowed"),
            (make(member, type="VOTE"), "type_not_allowed"),
        ):
            error = await client.publish(packet)
            assert (error["code"], error["detail"]) == ("policy_rejected", detail)
        events, _ = await client.subscribe("s", {"authors": [stranger.did]})
        assert ids_of(events) == [stored.packet_id]
        governed.set()


@pytest.mark.req("R-325", "R-326")
def test_the_manifest_follows_the_policy_in_force(governed: Configured):
    def policy() -> dict[str, Any]:
        manifest: dict[str, Any] = json.loads(governed.relay.get("/.well-known/strata-relay.json")[2])
        found: dict[str, Any] = manifest["policy"]
        return found

    assert policy()["accepts_public_packets"] is True
    assert not any(policy()["declines"].values())
    assert policy()["protected_accounts"] == "none"
    governed.set(blocked_media_hashes=[HASH], blocked_types=["VOTE"])
    assert policy()["declines"]["media_hashes"] is True
    assert policy()["declined_types"] == ["VOTE"]
    governed.set()


@pytest.mark.req("R-186")
async def test_the_abuse_table_is_read_now_and_then(tmp_path: Path, shared_database: str):
    author = new_identity()
    relay = RelayProcess(tmp_path, database_url=shared_database, abuse_refresh_interval=0.05)
    with running(relay):
        async with open_client(relay.ws) as client:
            stored = make(author)
            assert (await client.publish(stored))["type"] == "OK"
            connection = await asyncpg.connect(shared_database)
            try:
                await connection.execute(
                    "INSERT INTO abuse (author_id, verdict, reason) VALUES ($1, 'block', 'spam')", author.did
                )
                while (answer := await client.publish(make(author)))["type"] == "OK":
                    continue
                assert (answer["code"], answer["detail"]) == ("blocked_author", "abuse")
                events, _ = await client.subscribe("s", {"packet_ids": [stored.packet_id]})
                assert ids_of(events) == [stored.packet_id], "it is acknowledged, so it stays"
                await connection.execute("DELETE FROM abuse")
                while (await client.publish(make(author)))["type"] != "OK":
                    continue
            finally:
                await connection.close()


# Plug-ins.


def install(folder: Path, name: str, entry_points: dict[str, str], module: str, source: str) -> None:
    """Make a distribution importable for a relay that runs in `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{module}.py").write_text(source)
    info = folder / f"{name}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    lines = [f"{key} = {value}" for key, value in entry_points.items()]
    (info / "entry_points.txt").write_text("\n".join(["[relayd.policies]", *lines, ""]))


@pytest.mark.req("R-185", "R-187")
async def test_the_example_plug_in_limits_an_author_across_sessions(tmp_path: Path):
    example = ROOT / "examples" / "quota_policy"
    project = tomllib.loads((example / "pyproject.toml").read_text())["project"]
    points = project["entry-points"]["relayd.policies"]
    # As in the example's own text, except for the quota.
    source = (example / "author_quota.py").read_text().replace('"AUTHOR_QUOTA", "30"', '"AUTHOR_QUOTA", "3"')
    install(tmp_path, "relayd_author_quota", points, "author_quota", source)
    author, other = new_identity(), new_identity()
    with running(RelayProcess(tmp_path, policy_plugins=["author_quota"])) as relay:
        async with open_client(relay.ws) as one, open_client(relay.ws) as two:
            answers = [await (one, two)[n % 2].publish(make(author)) for n in range(12)]
            refused = [answer for answer in answers if answer["type"] == "ERROR"]
            # A minute may end while we publish; then three more are accepted.
            assert 6 <= len(refused) <= 9
            for answer in refused:
                assert (answer["code"], answer["detail"]) == ("rate_limited", "author_quota")
                assert 1 <= answer["retry_after"] <= 60
            assert (await one.publish(make(other)))["type"] == "OK"
            events, _ = await one.subscribe("s", {"authors": [author.did]})
            assert len(events) == len(answers) - len(refused)
        verdicts = "relayd_policy_plugin_verdicts_total"
        assert relay.metric(verdicts, plugin="author_quota", verdict="refused") == len(refused)
        manifest = json.loads(relay.get("/.well-known/strata-relay.json")[2])
        assert manifest["policy"]["plugins"] is True


BROKEN = """
import asyncio, time

def hangs(request):
    if request.packet.content["text"] == "hang":
        time.sleep(3600)

async def raises(request):
    if request.packet.content["text"] == "raise":
        raise RuntimeError("the marker text")
"""


@pytest.mark.req("R-192")
@pytest.mark.parametrize("failure", ["refuse", "accept"])
async def test_a_broken_plug_in_costs_its_packets_a_bounded_wait_and_nobody_else(
    tmp_path: Path, failure: str
):
    install(tmp_path, "broken", {"hangs": "broken:hangs", "raises": "broken:raises"}, "broken", BROKEN)
    relay = RelayProcess(
        tmp_path, policy_plugins=["hangs", "raises"], policy_timeout=0.5, policy_failure=failure
    )
    with running(relay):
        async with open_client(relay.ws) as unlucky, open_client(relay.ws) as other:
            name = unlucky.name()
            packet = make(new_identity(), "hang").canonical.decode()
            await unlucky.send(f'{{"type":"PUBLISH","client_msg_id":"{name}","packet":{packet}}}')
            answers = [await other.publish(make(new_identity(), text)) for text in ("raise", "fine")]
            answers.append(await unlucky.answer(name))
            assert answers[1]["type"] == "OK"
            for answer in answers[::2]:
                if failure == "accept":
                    assert answer["type"] == "OK"
                else:
                    assert (answer["code"], answer["detail"]) == ("internal_error", "policy_unavailable")
        verdicts = "relayd_policy_plugin_verdicts_total"
        assert relay.metric(verdicts, plugin="hangs", verdict="timeout") == 1
        assert relay.metric(verdicts, plugin="raises", verdict="raised") == 1
        wait_until(lambda: relay.logged("policy_plugin_failed") >= 2, "the lines of both")
        text = relay.log.read_text()
        assert text.count("policy_plugin_failed") == 2 and "marker" not in text
        assert not relay.complaints()
        assert relay.stop() == 0, "a thread that hangs does not keep the relay alive"


def test_a_plug_in_that_is_not_there_stops_the_start(tmp_path: Path):
    relay = RelayProcess(tmp_path, policy_plugins=["nobody"])
    process = relay.spawn()
    assert process.stdout is not None and process.stdout.read() == b""
    assert relay.wait() == 2
    assert "policy_plugins: nobody: not installed" in relay.log.read_text()
