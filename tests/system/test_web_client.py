"""The packed TypeScript client against real relays, and against Python across kills.

They need node and `make web`; RELAYD_REQUIRE_NODE=1 turns their absence into a failure.
"""

from __future__ import annotations

import asyncio
import json
import random
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import pytest
import strata
from strata.protocol import packets
from strata.protocol.documents import method_id
from strata.protocol.ids import Identity
from strata.protocol.keys import rotate_content
from strata.protocol.packets import Packet

from tests.faults.proxy import FaultyNetwork
from tests.support.node_package import WEB, Agent, pack_and_install, require_node, run_node
from tests.support.ports import free_port
from tests.support.relay_process import RelayProcess, running

pytestmark = pytest.mark.timeout(400)

OPTIONS = strata.Options(publish_timeout=120.0, ack_timeout=5.0, backoff_cap=0.5, connect_timeout=60.0)
OTHER = Identity.from_seed(b"\x63" * 32).did


def me(number: int) -> Identity:
    """The identity that the agent derives from this number."""
    return Identity.from_seed(bytes([number]) * 32)


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An empty folder with the packed client installed."""
    require_node()
    return pack_and_install(tmp_path_factory.mktemp("web") / "package")


@pytest.fixture(scope="module")
def fragile(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RelayProcess]:
    """A relay that tests kill and restart, at one address."""
    with running(RelayProcess(tmp_path_factory.mktemp("fragile"), port=free_port())) as process:
        yield process


async def everything(url: str, author: Identity) -> list[str]:
    """The packets of an author at a relay, as Python verifies them."""
    async with strata.connect(url, options=OPTIONS) as relay:
        return [delivery.packet.packet_id async for delivery in relay.fetch(authors=author.did)]


def test_the_package_holds_what_it_needs_and_no_more(package: Path) -> None:
    installed = package / "node_modules/strata-client"
    described = json.loads((installed / "package.json").read_text())
    assert set(described["dependencies"]) == {"@noble/ed25519", "@noble/hashes"}
    files = {path.relative_to(installed).as_posix() for path in installed.rglob("*") if path.is_file()}
    assert {"dist/index.js", "dist/index.d.ts", "dist/node.js", "LICENSE", "README.md"} <= files
    assert not [name for name in files if not name.startswith("dist/") and "/" in name]
    assert sorted(path.name for path in (package / "node_modules").iterdir() if path.name[0] != ".") == [
        "@noble",
        "strata-client",
    ]
    assert "node:" not in (installed / "dist/index.js").read_text()


def test_the_package_is_typed(package: Path) -> None:
    program = package / "typed.ts"
    program.write_text(
        'import { connect, type Delivery, InvalidPacket, Packet } from "strata-client";\n'
        'import { fileOutbox } from "strata-client/node";\n'
        "export async function first(url: string): Promise<Delivery | undefined> {\n"
        '  const relay = await connect(url, { outbox: fileOutbox("/x"), authenticate: "never" });\n'
        '  for await (const delivery of relay.subscribe({ authors: ["did:x:y"] })) return delivery;\n'
        "  // @ts-expect-error -- no such option\n"
        "  relay.subscribe({ author: 5 });\n"
        "  return undefined;\n"
        "}\n"
        "export const read = (text: string): string | InvalidPacket => Packet.parse(text).packetId;\n"
    )
    command = [str(WEB / "node_modules/.bin/tsc"), "--noEmit", "--strict", "--module", "nodenext"]
    command += ["--target", "es2022", "--lib", "es2023,dom,esnext.disposable", "--types", "", program.name]
    done = subprocess.run(command, cwd=package, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


async def test_python_publishes_and_node_verifies_across_a_kill(package: Path, fragile: RelayProcess) -> None:
    author = Identity.generate()
    async with strata.connect(fragile.ws, identity=author, options=OPTIONS) as relay:
        with Agent(package, "read", url=fragile.ws, query={"authors": [author.did]}, stop=60) as agent:
            sent = [(await relay.post({"type": "POST", "text": f"a {n}"})).packet_id for n in range(20)]
            heard = await asyncio.to_thread(agent.take, 20)
            publishing = asyncio.gather(*(relay.post({"type": "POST", "text": f"b {n}"}) for n in range(20)))
            fragile.kill()
            await asyncio.to_thread(fragile.start)
            sent += [published.packet_id for published in await publishing]
            sent += [(await relay.post({"type": "POST", "text": f"c {n}"})).packet_id for n in range(20)]
            heard += await asyncio.to_thread(agent.take, 40)
            said = (await asyncio.to_thread(agent.next))["statistics"]
    ids = [event["id"] for event in heard]
    assert ids == await everything(fragile.ws, author), "in the relay's order, and each once"
    assert set(ids) == set(sent)
    assert isinstance(said, dict)
    assert (said["connections"], said["eventsDelivered"], said["eventsTampered"]) == (2, 60, 0)


async def test_node_publishes_and_python_verifies_across_a_kill(package: Path, fragile: RelayProcess) -> None:
    with Agent(package, "post", url=fragile.ws, number=1, count=60) as agent:
        acknowledged = await asyncio.to_thread(agent.take, 20)
        fragile.kill()
        await asyncio.to_thread(fragile.start)
        acknowledged += await asyncio.to_thread(agent.take, 40)
    ids = [event["id"] for event in acknowledged]
    assert len(set(ids)) == 60
    assert await everything(fragile.ws, me(1)) == ids


NAMES = (
    "a",
    "10",
    "9",
    "",
    "\ue000",
    "\U0001f600",
    "\u00e9",
    "e\u0301",
    "__proto__",
    "constructor",
    "\n",
    '"',
)
TEXTS = (
    "",
    "plain",
    "\u2028\u2029",
    "\x7f\x00\x1f",
    "\\\\/",
    "\U0001f980",
    "\ufeff",
    "<\u0308",
    "0x" + "0" * 64,
)


def drawn(draw: random.Random, depth: int = 0) -> Any:
    """A JSON value, with the cases in which canonical forms differ."""
    kind = draw.randrange(5 if depth < 4 else 3)
    if kind == 0:
        return draw.choice((True, False, None, -0.0, 0, 2**53 - 1, -(2**53) + 1, 5e-324, 1.5e300, 1e21, 1e-7))
    if kind == 1:
        return draw.choice(
            (draw.random(), draw.uniform(-1e9, 1e9), draw.randrange(10**9), 10.0 ** draw.randrange(-30, 15))
        )
    if kind == 2:
        return draw.choice(TEXTS)
    if kind == 3:
        return [drawn(draw, depth + 1) for _ in range(draw.randrange(4))]
    return {name: drawn(draw, depth + 1) for name in draw.sample(NAMES, draw.randrange(5))}


async def test_what_node_signs_is_what_python_would_have_signed(
    package: Path, fragile: RelayProcess, tmp_path: Path
) -> None:
    draw = random.Random(4)
    contents = [
        {"type": "POST", "text": "", "number": n} | {name: drawn(draw) for name in draw.sample(NAMES, 4)}
        for n in range(60)
    ]
    (tmp_path / "contents.json").write_text(json.dumps(contents))
    with Agent(package, "contents", url=fragile.ws, number=7, file=str(tmp_path / "contents.json")) as agent:
        made = [str(said["canonical"]) for said in await asyncio.to_thread(agent.take, len(contents))]
    for text, content in zip(made, contents, strict=True):
        packet = Packet.parse(text.encode())
        packet.verify()
        assert packet.content == content
        again = packets.build(me(7), content, timestamp=packet.timestamp, nonce=packet.nonce)
        assert again.packet_id == packet.packet_id
        assert again.canonical == text.encode()
    assert await everything(fragile.ws, me(7)) == [Packet.parse(text.encode()).packet_id for text in made]


async def test_a_reader_resumes_at_its_cursor(package: Path, fragile: RelayProcess) -> None:
    author = Identity.generate()
    async with strata.connect(fragile.ws, identity=author, options=OPTIONS) as relay:
        sent = [(await relay.post({"type": "POST", "text": f"{n}"})).packet_id for n in range(12)]
    with Agent(package, "read", url=fragile.ws, query={"authors": author.did}, stop=5) as agent:
        first = agent.take(5)
    query = {"authors": author.did, "cursor": first[-1]["cursor"], "live": False}
    small = {"queueEvents": 3, "pageEvents": 2}
    with Agent(package, "read", url=fragile.ws, query=query, more=small) as agent:
        rest = agent.take(7)
        assert "statistics" in agent.next(), "reading that is not live ends"
    assert [event["id"] for event in first + rest] == sent


async def test_a_quiet_relay_is_not_taken_for_a_silent_one(package: Path, fragile: RelayProcess) -> None:
    author = Identity.generate()
    more = {"pingInterval": 0.2, "pingTimeout": 0.4}
    with Agent(package, "read", url=fragile.ws, query={"authors": author.did}, stop=1, more=more) as agent:
        await asyncio.sleep(2)
        async with strata.connect(fragile.ws, identity=author, options=OPTIONS) as relay:
            await relay.post({"type": "POST", "text": "at last"})
        _, ended = await asyncio.to_thread(agent.take, 2)
    assert cast(dict[str, int], ended["statistics"])["connections"] == 1


async def stand_still(agents: list[Agent], seconds: float, meanwhile: Callable[[], object]) -> None:
    """Stop programs for a while, as a frozen tab or a closed laptop does."""
    for agent in agents:
        agent.process.send_signal(signal.SIGSTOP)
    meanwhile()
    await asyncio.sleep(seconds)
    for agent in agents:
        agent.process.send_signal(signal.SIGCONT)


async def test_a_program_that_stood_still_finds_its_answers(package: Path, fragile: RelayProcess) -> None:
    author = Identity.generate()
    async with strata.connect(fragile.ws, identity=author, options=OPTIONS) as relay:
        sent = [(await relay.post({"type": "POST", "text": f"{n}"})).packet_id for n in range(300)]
    more = {"historyTimeout": 3, "keyTimeout": 3, "publishTimeout": 3, "pageEvents": 2}
    query = {"authors": author.did, "live": False}
    async with FaultyNetwork(fragile.port) as network:
        reading = Agent(package, "read", url=network.url, query=query, more=more)
        posting = Agent(package, "post", url=network.url, number=11, count=300, more=more)
        with reading, posting:
            first = await asyncio.to_thread(reading.take, 20), await asyncio.to_thread(posting.take, 20)
            network.partition()  # each has asked for something, and hears nothing yet
            await stand_still([reading, posting], 8, network.heal)
            rest = await asyncio.to_thread(reading.take, 281), await asyncio.to_thread(posting.take, 281)
    read, posted = first[0] + rest[0][:-1], first[1] + rest[1][:-1]
    assert [said["id"] for said in read] == sent
    assert cast(dict[str, int], rest[0][-1]["statistics"])["connections"] == 1
    assert await everything(fragile.ws, me(11)) == [said["id"] for said in posted]


async def test_a_program_that_slept_does_not_wait_for_a_dead_connection(
    package: Path, fragile: RelayProcess
) -> None:
    author = Identity.generate()
    async with FaultyNetwork(fragile.port) as network:
        reading = Agent(package, "read", url=network.url, query={"authors": author.did})
        posting = Agent(package, "post", url=network.url, number=12, count=10_000)
        with reading, posting:
            posted = await asyncio.to_thread(posting.take, 20)
            async with strata.connect(fragile.ws, identity=author, options=OPTIONS) as relay:
                await relay.post({"type": "POST", "text": "before"})
                assert (await asyncio.to_thread(reading.next))["text"] == "before"
                await stand_still([reading, posting], 8, network.deceive_clients)
                await relay.post({"type": "POST", "text": "after"})
                async with asyncio.timeout(30):  # by the pings alone it would take a minute and a half
                    assert (await asyncio.to_thread(reading.next))["text"] == "after"
                    posted += await asyncio.to_thread(posting.take, 100)
    stored = await everything(fragile.ws, me(12))
    assert stored[: len(posted)] == [said["id"] for said in posted], "each once and in order"


async def test_an_outbox_survives_the_kill_of_its_program(package: Path, tmp_path: Path) -> None:
    folder = tmp_path / "box"
    relay = RelayProcess(tmp_path / "relay", port=free_port())
    url = f"ws://127.0.0.1:{relay.port}/strata"
    with Agent(package, "outbox", url=url, number=2, count=12, folder=str(folder)) as agent:
        assert agent.next() == {"error": "ConnectionFailed"}
        durable = [event["durable"] for event in agent.take(12)]
        agent.kill()
    options = {"url": url, "number": 2, "count": 3, "folder": str(folder), "timeout": 60}
    with running(relay), Agent(package, "outbox", **options) as agent:
        said = list(agent.lines())
        durable += [event["durable"] for event in said if "durable" in event]
        assert said[-1] == {"empty": True}
        assert await everything(url, me(2)) == durable, "in the order they were added"
    assert not list(folder.glob("*.json")), "what the relay has is forgotten"


async def test_an_outbox_killed_amid_sending_loses_and_doubles_nothing(
    package: Path, fragile: RelayProcess, tmp_path: Path
) -> None:
    options = {"url": fragile.ws, "number": 3, "folder": str(tmp_path / "box"), "timeout": 60}
    with Agent(package, "outbox", count=200, **options) as agent:
        durable = [event["durable"] for event in agent.take(60) if "durable" in event]
        agent.kill()
    with Agent(package, "outbox", count=0, **options) as agent:
        assert {"empty": True} in list(agent.lines())
    stored = await everything(fragile.ws, me(3))
    assert set(durable) <= set(stored)
    assert len(stored) == len(set(stored))


def test_another_relay_than_the_expected_one_is_not_signed_for(
    package: Path, fragile: RelayProcess, tmp_path: Path
) -> None:
    pins = str(tmp_path / "pins.json")
    for expected in ({"relayId": OTHER}, {"pins": pins}):
        Path(pins).write_text(json.dumps({f"ws://127.0.0.1:{fragile.port}/strata": OTHER}))
        with Agent(package, "authenticate", url=fragile.ws, number=4, **expected) as agent:
            said = agent.next()
        assert (said["error"], said["code"]) == ("InvalidMessage", "unauthenticated")
        assert said["detail"] == "server_id_unexpected"
    Path(pins).unlink()
    with Agent(package, "authenticate", url=fragile.ws, number=4, pins=pins) as agent:
        assert agent.next() == {
            "authorId": me(4).did,
            "capabilities": ["publish", "subscribe"],
            "relayId": fragile.ready["relay_id"],
        }
        agent.process.wait(30)
    assert list(json.loads(Path(pins).read_text()).values()) == [fragile.ready["relay_id"]]


def test_a_refusal_says_why_and_an_outbox_keeps_it(package: Path, fragile: RelayProcess) -> None:
    with Agent(package, "refused", url=fragile.ws, number=5) as agent:
        assert agent.next() == {
            "error": "RequestRefused",
            "code": "timestamp_too_old",
            "retry": "never",
            "known": True,
        }
        assert agent.next() == {"state": "refused", "isStale": True, "code": "timestamp_too_old"}


async def test_a_relay_that_wants_authentication_gets_it(package: Path, tmp_path: Path) -> None:
    with running(RelayProcess(tmp_path, require_auth=["publish", "subscribe"])) as closed:
        with Agent(package, "post", url=closed.ws, number=6, count=3) as agent:
            ids = [event["id"] for event in agent.take(3)]
            assert agent.next() == {"session": me(6).did, "relayId": closed.ready["relay_id"]}
        async with strata.connect(closed.ws, identity=me(6), options=OPTIONS) as relay:
            assert [d.packet.packet_id async for d in relay.fetch(authors=me(6).did)] == ids


async def test_node_judges_by_keys_that_change(package: Path, fragile: RelayProcess) -> None:
    old, new = Identity.generate(), Identity.generate()
    speaking = new.speaking_for(old.did)
    async with strata.connect(fragile.ws, identity=old, options=OPTIONS) as relay:
        with Agent(package, "read", url=fragile.ws, query={"authors": old.did}, stop=4) as agent:
            ids = [(await relay.post({"type": "POST", "text": "by the old key"})).packet_id]
            assert (await asyncio.to_thread(agent.next))["id"] == ids[0]
            now = (await relay.post({"type": "POST", "text": "what time is it?"})).received_at or 0
            event = rotate_content(
                f"{old.did}#keys-2", new.public_key, replaces=method_id(old.did), valid_from=now
            )
            await relay.post(event)
            packet = packets.build(speaking, {"type": "POST", "text": "by the new key"}, timestamp=now)
            await relay.publish(packet)
            heard = await asyncio.to_thread(agent.take, 3)
    assert heard[-1]["id"] == packet.packet_id


def test_the_unit_tests_of_the_client_pass() -> None:
    require_node()
    run_node("build.mjs", "test", cwd=WEB, timeout=280)


@pytest.mark.parametrize("example", sorted(path.name for path in (WEB / "examples").glob("*.mjs")))
def test_an_example_runs(package: Path, fragile: RelayProcess, example: str, tmp_path: Path) -> None:
    shutil.copy(WEB / "examples" / example, package)
    environ = {"RELAY": fragile.ws, "FOLDER": str(tmp_path)}
    said = run_node(example, cwd=package, environ=environ)
    assert said, "an example shows something"
