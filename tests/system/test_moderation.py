"""Two relays on one database, moderated by the command: bans take effect on both, and can be lifted."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from strata.protocol.errors import RequestRefused
from strata.protocol.packets import Packet
from strata.relays.moderating import Moderator
from websockets.exceptions import ConnectionClosed, InvalidStatus

from relayd.postgres.running import running_server
from tests.support.bare_client import BareClient, open_client
from tests.support.forks import RELAYD, STRATA, run_fork
from tests.support.made_packets import ids_of, make, new_identity
from tests.support.relay_process import RelayProcess, environment, running
from tests.support.waiting import until

HASH = "0x" + "ca" * 32
OPERATOR = new_identity()


class Moderated:
    """Two relays on one database: one embeds it, the other connects to it."""

    def __init__(self, one: RelayProcess, other: RelayProcess) -> None:
        self.one, self.other = one, other
        self.both = one, other

    def command(self, *arguments: str, exit_code: int = 0) -> Any:
        """Run `relayd` beside the relays; returns its output as JSON."""
        env = environment({"data_dir": self.one.settings["data_dir"]})
        code, out, err = run_fork(RELAYD, [*arguments, "--json"], env=env)
        assert code == exit_code, err.decode()
        return json.loads(out) if out else err.decode()


@pytest.fixture(scope="module")
def moderated(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Moderated]:
    folder = tmp_path_factory.mktemp("moderated")
    # The network banned below must not be this machine.
    proxied: dict[str, Any] = {"trusted_proxies": ["127.0.0.0/8"], "operators": [OPERATOR.did]}
    with contextlib.ExitStack() as stack:
        one = stack.enter_context(running(RelayProcess(folder / "one", **proxied)))
        url = stack.enter_context(running_server(Path(str(one.settings["data_dir"]))))
        assert url is not None
        other = stack.enter_context(running(RelayProcess(folder / "other", database_url=url, **proxied)))
        yield Moderated(one, other)
        for relay in (other, one):
            assert not relay.complaints()
            assert relay.stop() == 0


async def served(client: BareClient, relay: RelayProcess, packet: Packet) -> set[bool]:
    """The set of outcomes over all paths: whether each serves the packet."""
    found = set()
    for filters in (
        {"authors": [packet.author_id]},
        {"authors": [packet.author_id], "order": "asc"},
        {"packet_ids": [packet.packet_id]},
    ):
        events, _ = await client.subscribe("pages", filters)
        found.add(packet.packet_id in ids_of(events))
    events, end = await client.subscribe("gapless", {"authors": [packet.author_id]}, gapless=True)
    assert end["complete"] is True
    found.add(packet.packet_id in ids_of(events))
    for name in ("pages", "gapless"):
        await client.send({"type": "UNSUBSCRIBE", "subscription_id": name})
    status, _, _ = relay.get(f"/packets/{packet.packet_id}")
    assert status in (200, 410)
    return found | {status == 200}


async def everywhere(moderated: Moderated, packet: Packet, is_served: bool) -> None:
    """Wait until both relays serve the packet on every path, or on none."""
    for relay in moderated.both:
        async with open_client(relay.ws) as client:
            while await served(client, relay, packet) != {is_served}:
                pass


def ruling_of(packet: Packet) -> dict[str, tuple[list[str], list[str]]]:
    """By subject: the commands that withdraw a packet and bring it back."""
    why = ["--reason", "a court order"]
    return {
        "author": (["ban", packet.author_id, *why], ["unban", packet.author_id]),
        "packet": (["remove", packet.packet_id, *why], ["restore", packet.packet_id]),
        "media": (["ban", HASH, "--kind", "media", *why], ["unban", HASH, "--kind", "media"]),
    }


@pytest.mark.req("R-185", "R-186", "R-187", "R-322", "R-323")
@pytest.mark.parametrize("by", ["author", "packet", "media"])
async def test_what_is_banned_leaves_by_no_path_of_any_relay_and_comes_back(moderated: Moderated, by: str):
    author, other = new_identity(), new_identity()
    banned = make(author, type="BANNED", media=[{"media_hash": HASH}])
    wanted = make(other)
    away, back = ruling_of(banned)[by]
    authors = [author.did, other.did]
    async with open_client(moderated.one.ws) as writer, open_client(moderated.other.ws) as reader:
        await reader.subscribe("live", {"authors": authors})
        await reader.subscribe("gapless", {"authors": authors}, gapless=True)
        assert (await writer.publish(banned))["type"] == "OK"
        for name in ("live", "gapless"):
            assert ids_of(await reader.events(name, 1)) == [banned.packet_id]
        moderated.command(*away)
        await everywhere(moderated, banned, False)
        # The manifest names the kinds of things that are declined, but not which.
        policy = json.loads(moderated.other.get("/.well-known/strata-relay.json")[2])["policy"]
        kinds = {"author": "authors", "packet": "packet_ids", "media": "media_hashes"}
        assert policy["declines"][kinds[by]] is True
        # The open subscriptions continue with packets that are not banned, and no others.
        second = make(author, type="BANNED", media=[{"media_hash": HASH}])
        answer = await writer.publish(second)
        expected = {"author": "blocked_author", "packet": None}.get(by, "policy_rejected")
        assert answer.get("code") == expected
        assert (await writer.publish(banned))["duplicate"] is True
        assert (await writer.publish(wanted))["type"] == "OK"
        for name in ("live", "gapless"):
            came = ids_of(await reader.events(name, 2 if by == "packet" else 1))
            assert came == ([second.packet_id] if by == "packet" else []) + [wanted.packet_id]
        moderated.command(*back)
        await everywhere(moderated, banned, True)
        assert (await writer.publish(make(author, type="BANNED", media=[{"media_hash": HASH}])))["type"] == (
            "OK"
        )


async def closing(client: BareClient) -> tuple[str, str | None, int]:
    """Expect the relay to give a reason and close; return the ERROR's code and detail, and the close code."""
    said: dict[str, Any] = {}
    with pytest.raises(ConnectionClosed) as closed:
        while True:
            message = await client.receive()
            said = message if message["type"] == "ERROR" else said
    assert closed.value.rcvd is not None
    return said["code"], said.get("detail"), closed.value.rcvd.code


@pytest.mark.req("R-186", "R-284")
async def test_sessions_of_a_banned_author_end_on_both_relays_and_none_begins(moderated: Moderated):
    alice, bob = new_identity(), new_identity()
    async with contextlib.AsyncExitStack() as stack:
        clients = [await stack.enter_async_context(open_client(relay.ws)) for relay in moderated.both]
        others = [await stack.enter_async_context(open_client(relay.ws)) for relay in moderated.both]
        for client in clients:
            assert (await client.authenticate(alice))["type"] == "AUTH_OK"
        for client in others:
            assert (await client.authenticate(bob))["type"] == "AUTH_OK"
        moderated.command("ban", alice.did, "--reason", "spam", "--by", "moderator")
        for client in clients:
            assert await closing(client) == ("blocked_author", None, 1008)
        async with open_client(moderated.other.ws) as late:
            assert (await late.authenticate(alice))["code"] == "blocked_author"
        for client in others:
            assert (await client.publish(make(bob)))["type"] == "OK"
    moderated.command("unban", alice.did)
    async with contextlib.AsyncExitStack() as stack:
        while True:
            late = await stack.enter_async_context(open_client(moderated.other.ws))
            if (await late.authenticate(alice))["type"] == "AUTH_OK":
                break


@pytest.mark.req("R-321", "R-322")
async def test_connections_from_a_banned_network_end_and_none_begins(moderated: Moderated):
    inside = {"X-Forwarded-For": "203.0.113.77"}
    outside = {"X-Forwarded-For": "198.51.100.1"}
    relay = moderated.other
    async with (
        open_client(relay.ws, additional_headers=inside) as client,
        open_client(relay.ws, additional_headers=outside) as other,
    ):
        moderated.command("ban", "203.0.113.0/24", "--reason", "a flood")
        assert await closing(client) == ("policy_rejected", "banned_address", 1008)
        with pytest.raises(InvalidStatus) as refused:
            async with open_client(relay.ws, additional_headers=inside):
                pass
        assert refused.value.response.status_code == 403
        assert (await other.publish(make(new_identity())))["type"] == "OK"
    moderated.command("unban", "203.0.113.0/24")

    async def is_back() -> bool:
        with contextlib.suppress(InvalidStatus):
            async with open_client(relay.ws, additional_headers=inside):
                return True
        return False

    while not await is_back():
        pass


async def test_a_ban_ends_by_itself_and_the_log_tells_all_of_it(moderated: Moderated):
    author = new_identity()
    packet = make(author)
    async with open_client(moderated.one.ws) as client:
        assert (await client.publish(packet))["type"] == "OK"
    (done,) = moderated.command("ban", author.did, "--reason", "cool down", "--for", "2s", "--by", "ann")
    assert done == {"kind": "author", "subject": author.did, "changed": True}
    await everywhere(moderated, packet, True)
    moderated.command("unban", author.did, exit_code=1)
    lines = moderated.command("log", author.did)
    assert [(line["act"], line["actor"], line["via"]) for line in lines] == [
        ("expire", "ann", "relay"),
        ("ban", "ann", "command"),
    ]
    assert lines[0]["before"] == lines[1]["after"]
    assert lines[1]["after"]["expires_at"] == lines[1]["at"] + 2
    assert author.did not in {ban["subject"] for ban in moderated.command("list")}


async def test_a_relay_that_starts_serves_nothing_that_is_banned(moderated: Moderated, tmp_path: Path):
    author = new_identity()
    packet = make(author)
    async with open_client(moderated.one.ws) as client:
        assert (await client.publish(packet))["type"] == "OK"
    moderated.command("remove", packet.packet_id, "--reason", "a court order")
    fresh = RelayProcess(tmp_path, database_url=moderated.other.settings["database_url"])
    with running(fresh):
        assert fresh.get(f"/packets/{packet.packet_id}")[0] == 410
        async with open_client(fresh.ws) as client:
            assert (await client.publish(make(author)))["type"] == "OK"
        assert fresh.stop() == 0


async def test_a_notification_that_is_lost_does_not_matter(moderated: Moderated):
    """Rows without a notification, as after a broken connection."""
    import asyncpg

    author = new_identity()
    packet = make(author)
    async with open_client(moderated.one.ws) as client:
        assert (await client.publish(packet))["type"] == "OK"
    connection = await asyncpg.connect(str(moderated.other.settings["database_url"]))
    try:
        await connection.execute(
            "INSERT INTO moderation VALUES ('packet', $1, 'told nobody', 'root', NULL, 0)", packet.packet_id
        )
        await connection.execute(
            "INSERT INTO moderation_log SELECT coalesce(max(number), 0) + 1, 0, 'root', 'command', 'ban',"
            " 'packet', $1, 'told nobody' FROM moderation_log",
            packet.packet_id,
        )
    finally:
        await connection.close()
    await until(lambda: moderated.one.get(f"/packets/{packet.packet_id}")[0] == 410)
    await everywhere(moderated, packet, False)


@pytest.mark.req("R-287", "R-289")
async def test_an_operator_rules_over_the_wire_and_nobody_else(moderated: Moderated, tmp_path: Path):
    author = new_identity()
    packet = make(author)
    manifest = json.loads(moderated.other.get("/.well-known/strata-relay.json")[2])
    assert manifest["auth"]["capabilities"] == ["publish", "subscribe", "replicate", "operate"]
    ban = {"type": "MODERATE", "action": "ban", "kind": "author", "subject": author.did, "reason": "spam"}
    async with open_client(moderated.one.ws) as stranger:
        assert (await stranger.publish(packet))["type"] == "OK"
        for _ in range(2):
            answer = await stranger.ask(ban)
            assert (answer["code"], answer["detail"]) == ("unauthenticated", "missing_capability")
            if not _:
                assert "operate" not in (await stranger.authenticate(author))["capabilities"]
    with pytest.raises(RequestRefused, match="not an operator"):
        async with Moderator(moderated.other.ws, author):
            pass
    async with Moderator(moderated.other.ws, OPERATOR) as moderator:
        assert await moderator.ban("author", author.did, reason="spam") is True
        assert await moderator.ban("author", author.did, reason="spam") is False
        await everywhere(moderated, packet, False)
        found = [entry async for entry in moderator.bans("author")]
        assert [(entry["subject"], entry["actor"]) for entry in found] == [(author.did, OPERATOR.did)]
        for kind, subject, code in (
            ("author", OPERATOR.did, "policy_rejected"),
            ("author", "nobody", "invalid_schema"),
            ("network", "0.0.0.0/0", "invalid_schema"),
        ):
            with pytest.raises(RequestRefused) as refused:
                await moderator.ban(kind, subject, reason="x")  # type: ignore[arg-type]
            assert refused.value.code == code
    # The same from the command line of a client.
    key = tmp_path / "operator.json"
    OPERATOR.save(key)
    env = environment({}) | {"STRATA_RELAY": moderated.one.ws, "STRATA_IDENTITY": str(key)}

    async def strata(*arguments: str) -> list[dict[str, Any]]:
        code, out, err = await asyncio.to_thread(
            run_fork, STRATA, ["moderate", *arguments, "--json"], env=env
        )
        assert code == 0, err.decode()
        return [json.loads(line) for line in out.splitlines()]

    (done,) = await strata("unban", author.did, "--reason", "an appeal")
    assert done["changed"] is True
    await everywhere(moderated, packet, True)
    lines = await strata("log", author.did)
    assert [(line["act"], line["actor"], line["via"], line["reason"]) for line in lines] == [
        ("unban", OPERATOR.did, "wire", "an appeal"),
        ("ban", OPERATOR.did, "wire", "spam"),
    ]


async def sessions_of(moderator: Moderator, *of: Any) -> dict[str, dict[str, Any]]:
    """The open sessions by the DID for which they speak."""
    return {str(entry["identity"]): entry async for entry in moderator.sessions(*of)}


@pytest.mark.req("R-287", "R-289")
async def test_an_operator_sees_the_sessions_of_both_relays_and_closes_one(
    moderated: Moderated, tmp_path: Path
):
    alice, bob, carol = new_identity(), new_identity(), new_identity()
    names = (alice.did, bob.did, carol.did)
    elsewhere = {"X-Forwarded-For": "198.51.100.7"}
    async with (
        open_client(moderated.one.ws) as first,
        open_client(moderated.other.ws, additional_headers=elsewhere) as second,
        open_client(moderated.other.ws) as third,
        Moderator(moderated.one.ws, OPERATOR) as moderator,
    ):
        for client, who in ((first, alice), (second, bob), (third, carol)):
            assert (await client.authenticate(who))["type"] == "AUTH_OK"
        await second.subscribe("s", {"authors": [bob.did]})
        assert (await second.publish(make(bob)))["type"] == "OK"
        found = await sessions_of(moderator)
        assert set(found) >= {*names, OPERATOR.did}
        assert [found[OPERATOR.did]["own"], found[bob.did]["own"]] == [True, False]
        counted = {name: found[bob.did][name] for name in ("address", "subscriptions", "publishes")}
        assert counted == {"address": "198.51.100.7", "subscriptions": 1, "publishes": 1}
        assert len({str(found[name]["id"])[:8] for name in names}) == 2, "of two processes"
        for kind, subject in (("author", bob.did), ("network", "198.51.100.0/24")):
            assert set(await sessions_of(moderator, kind, subject)) == {bob.did}
        # The same on the relay's machine, page by page if there are many.
        told = moderated.command("sessions", "list")
        assert {each["identity"] for each in told} >= {*names, OPERATOR.did}
        page = await third.ask({"type": "MODERATE", "action": "sessions"})
        assert (page["code"], page["detail"]) == ("unauthenticated", "missing_capability")
        # A session closed over the wire may be open at the other relay.
        session = str(found[bob.did]["id"])
        for subject, code in (("somebody", "invalid_schema"), (session[:8], "invalid_schema")):
            with pytest.raises(RequestRefused) as refused:
                await moderator.close_session(subject, reason="x")
            assert refused.value.code == code
        assert await moderator.close_session(session, reason="a test") is True
        assert await closing(second) == ("policy_rejected", "closed_by_operator", 1008)
        assert await moderator.close_session(session, reason="a test") is False
        done = moderated.command("sessions", "close", str(found[alice.did]["id"]), "--reason", "a test")
        assert done["changed"] is True
        assert await closing(first) == ("policy_rejected", "closed_by_operator", 1008)
        moderated.command("sessions", "close", str(found[alice.did]["id"]), "--reason", "x", exit_code=1)
        assert (await third.publish(make(carol)))["type"] == "OK", "the others go on"
        async with open_client(moderated.other.ws) as again:
            assert (await again.authenticate(bob))["type"] == "AUTH_OK", "it is no ban"
        (line,) = [each async for each in moderator.log(session)]
        assert (line["act"], line["kind"], line["actor"], line["via"]) == (
            "close",
            "session",
            OPERATOR.did,
            "wire",
        )
        # The same from the command line of a client.
        OPERATOR.save(tmp_path / "operator.json")
        env = environment({}) | {
            "STRATA_RELAY": moderated.one.ws,
            "STRATA_IDENTITY": str(tmp_path / "operator.json"),
        }

        async def strata(*arguments: str) -> dict[str, Any]:
            command = ["moderate", *arguments, "--json"]
            code, out, err = await asyncio.to_thread(run_fork, STRATA, command, env=env)
            assert code == 0, err.decode()
            answer: dict[str, Any] = json.loads(out)
            return answer

        told = await strata("sessions", carol.did)
        assert told["id"] == found[carol.did]["id"]
        done = await strata("close", told["id"], "--reason", "a test")
        assert (done["action"], done["kind"], done["changed"]) == ("close", "session", True)
        assert await closing(third) == ("policy_rejected", "closed_by_operator", 1008)
        opened_at = found[bob.did]["opened_at"]
        assert line["before"] == {"identity": bob.did, "opened_at": opened_at}
        assert moderated.command("log", session)[0]["reason"] == "a test"
        assert session not in {ban["subject"] for ban in moderated.command("list")}


async def test_sessions_come_in_pages_and_no_operator_closes_another(moderated: Moderated, tmp_path: Path):
    rival = new_identity()
    url = moderated.other.settings["database_url"]
    relay = RelayProcess(tmp_path, database_url=url, operators=[OPERATOR.did, rival.did])
    with running(relay):
        async with contextlib.AsyncExitStack() as stack:
            for _ in range(3):
                await stack.enter_async_context(open_client(relay.ws))
            client = await stack.enter_async_context(open_client(relay.ws))
            await client.authenticate(OPERATOR)
            other = await stack.enter_async_context(open_client(relay.ws))
            await other.authenticate(rival)
            ask = {"type": "MODERATE", "action": "sessions", "limit": 2}
            ids: list[str] = []
            page: dict[str, Any] = {}
            while not ids or page.get("next") is not None:
                page = await client.ask(ask | ({"after": page["next"]} if page else {}))
                assert len(page["entries"]) <= 2
                assert (page["silent"], page["total"]) == (0, 5)
                ids += [entry["id"] for entry in page["entries"]]
            assert len(set(ids)) == len(ids) == 5
            page = await client.ask(ask | {"kind": "author", "subject": rival.did})
            (entry,) = page["entries"]
            close = {"type": "MODERATE", "action": "close", "subject": entry["id"], "reason": "rivalry"}
            assert (await client.ask(close))["code"] == "policy_rejected"
            for wrong in ("x", "[]", '["a"]', '["a","b\\u0000"]', "a\0"):
                page = await client.ask({"type": "MODERATE", "action": "list", "after": wrong})
                assert page["code"] == "invalid_schema", wrong
        assert relay.stop() == 0


async def test_a_relay_without_operators_knows_no_such_message(relay: RelayProcess):
    async with open_client(relay.ws) as client:
        answer = await client.ask({"type": "MODERATE", "action": "list"})
        assert (answer["code"], answer["detail"]) == ("invalid_schema", "unknown_type")
    manifest = json.loads(relay.get("/.well-known/strata-relay.json")[2])
    assert "operate" not in manifest["auth"]["capabilities"]


@pytest.mark.req("R-323")
async def test_an_erased_packet_is_gone_everywhere_and_readers_keep_their_places(moderated: Moderated):
    author, other = new_identity(), new_identity()
    doomed, kept = [make(author) for _ in range(3)], make(other)
    authors = [author.did, other.did]
    async with open_client(moderated.one.ws) as writer, open_client(moderated.other.ws) as reader:
        for packet in (*doomed, kept):
            assert (await writer.publish(packet))["type"] == "OK"
        events, _ = await reader.subscribe("s", {"authors": authors, "order": "asc"})
        cursors = {event["packet"]["packet_id"]: event["cursor"] for event in events}
        done = moderated.command("erase", "--author", author.did, "--reason", "asked for", "--by", "ann")
        assert done == {"erased": 3, "spared": 0, "absent": 0}
        for packet in doomed:
            await everywhere(moderated, packet, False)
            assert (await writer.publish(packet))["duplicate"] is True, "no copy of it comes in again"
        # A reader that stood at an erased packet continues behind it, and one that reads all misses nothing.
        for place, expected in ((doomed[1], [kept]), (kept, [])):
            filters = {"authors": authors, "cursor": cursors[place.packet_id]}
            events, end = await reader.subscribe("s", filters, gapless=True)
            assert ids_of(events) == [each.packet_id for each in expected]
            assert end["complete"] is True
        later = make(author)
        assert (await writer.publish(later))["type"] == "OK", "an erasure is no ban"
        assert ids_of(await reader.events("s", 1)) == [later.packet_id]
    assert [line["act"] for line in moderated.command("log", author.did)] == ["erase"]
    moderated.command("erase", doomed[0].packet_id, "--reason", "again", exit_code=1)


@pytest.mark.req("R-323")
async def test_an_erasure_that_is_killed_is_done_by_the_next(moderated: Moderated):
    author = new_identity()
    doomed = [make(author) for _ in range(3)]
    async with open_client(moderated.one.ws) as writer:
        for packet in doomed:
            assert (await writer.publish(packet))["type"] == "OK"
    url = str(moderated.other.settings["database_url"])
    env = environment({"database_url": url, "failpoints": "store.erase.before_commit=kill@1"})
    command = [sys.executable, "-m", "relayd", "erase", "--author", author.did, "--reason", "asked for"]
    process = await asyncio.create_subprocess_exec(*command, env=env)
    assert await process.wait() == -signal.SIGKILL
    done = moderated.command("erase", "--author", author.did, "--reason", "asked for")
    assert done["erased"] == 3
    for packet in doomed:
        await everywhere(moderated, packet, False)
    async with open_client(moderated.one.ws) as client:
        assert (await client.publish(make(author)))["type"] == "OK"
