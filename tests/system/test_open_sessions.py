"""Withdrawals reach sessions that are open, in every worker: keys, members, peers, policy."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import ssl
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import strata
from strata.protocol import packets
from strata.protocol.ids import Identity
from strata.protocol.keys import revoke_content
from strata.protocol.packets import Packet
from strata.protocol.provenance import attest
from websockets.exceptions import ConnectionClosed

from relayd.config import setting_table
from relayd.tls import write_dev_certificates
from tests.support.bare_client import BareClient, open_client
from tests.support.made_packets import ids_of, make, new_identity
from tests.support.relay_process import RelayProcess, running
from tests.support.waiting import until, wait_until

HASH = "0x" + "d1" * 32
WORKERS = 2


class Reloadable:
    """A relay of two workers that speaks TLS and reloads its settings on request."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._file = folder / "relayd.toml"
        self.certificates = {name: write_dev_certificates(folder / name) for name in ("old", "new")}
        self._write({})
        self.relay = RelayProcess(
            folder,
            arguments=("--config", str(self._file), "--workers", str(WORKERS)),
            metrics_listen="127.0.0.1:0",
        )

    def set(self, **settings: Any) -> None:
        """Have every worker adopt these settings, and the defaults of all others."""
        self._write(settings)
        before = self._reloads()
        os.kill(self.relay.pid, signal.SIGHUP)
        wait_until(lambda: self._reloads() == before + WORKERS, "all workers to reload")

    def _write(self, settings: dict[str, Any]) -> None:
        tls = {name: str(self.folder / "old" / f"{file}.pem") for name, file in _TLS_FILES.items()}
        lines = (f"{name} = {json.dumps(value)}\n" for name, value in {**tls, **settings}.items())
        self._file.write_text("".join(lines))

    def _reloads(self) -> int:
        return self.relay.log.read_text().count('"reloaded"')

    @contextlib.asynccontextmanager
    async def connect(self, certificates: str = "old", **options: Any) -> AsyncIterator[BareClient]:
        trusted = ssl.create_default_context(cafile=str(self.certificates[certificates].ca))
        async with open_client(self.relay.ws, ssl=trusted, **options) as client:
            yield client

    @contextlib.asynccontextmanager
    async def at_every_worker(self, **options: Any) -> AsyncIterator[list[BareClient]]:
        """Enough open clients that each worker holds at least one."""
        async with contextlib.AsyncExitStack() as stack:
            workers = self.relay.workers()
            assert len(workers) == WORKERS
            clients: list[BareClient] = []
            while not clients or not all(_holds(worker, clients) for worker in workers):
                clients.append(await stack.enter_async_context(self.connect(**options)))
            yield clients


_TLS_FILES = {"tls_cert": "cert", "tls_key": "key"}


def _holds(worker: psutil.Process, clients: list[BareClient]) -> bool:
    ours = {client.socket.local_address[1] for client in clients}
    return any(found.raddr and found.raddr.port in ours for found in worker.net_connections("inet"))


@pytest.fixture(scope="module")
def reloadable(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Reloadable]:
    made = Reloadable(tmp_path_factory.mktemp("open"))
    with running(made.relay):
        yield made
        assert not made.relay.complaints()
        assert made.relay.stop() == 0


async def is_told(client: BareClient, code: str, detail: str, **members: str) -> None:
    """Expect an unsolicited ERROR of this kind."""
    error = await client.expect(lambda message: message["type"] == "ERROR")
    told = {name: error.get(name) for name in ("code", "detail", *members)}
    assert told == {"code": code, "detail": detail, **members}


async def is_closed(client: BareClient) -> None:
    with pytest.raises(ConnectionClosed) as closed:
        while True:
            assert (await client.receive())["type"] == "EVENT"
    assert closed.value.rcvd is not None and closed.value.rcvd.code == 1008


async def all_of(clients: list[BareClient], check: Callable[[BareClient], Awaitable[object]]) -> None:
    for client in clients:
        await check(client)


def own_key_revoked(author: Identity) -> Packet:
    content = revoke_content(f"{author.did}#{author.did.rpartition(':')[2]}", revoked_at=int(time.time()) - 1)
    return packets.build(author, content, timestamp=int(time.time()))


@pytest.mark.req("R-277", "R-281", "R-284")
async def test_a_revoked_key_ends_every_session_it_let_in(reloadable: Reloadable):
    alice, bob = new_identity(), new_identity()
    async with reloadable.at_every_worker() as clients, reloadable.connect() as other:
        for client in clients:
            assert (await client.authenticate(alice))["type"] == "AUTH_OK"
            await client.subscribe("s", {"authors": [alice.did]}, gapless=True)
        assert (await other.authenticate(bob))["type"] == "AUTH_OK"
        assert (await other.publish(own_key_revoked(alice)))["type"] == "OK"
        for client in clients:
            await is_told(client, "unauthenticated", "key_revoked")
            await is_closed(client)
        assert (await other.publish(make(bob)))["type"] == "OK"
    assert reloadable.relay.metric("relayd_connections_closed_total", reason="withdrawn") >= len(clients)


async def refused(client: BareClient, packet: Packet, code: str, detail: str | None) -> None:
    answer = await client.publish(packet)
    assert (answer.get("code"), answer.get("detail")) == (code, detail)


async def require_auth(reloadable: Reloadable) -> None:
    author = new_identity()
    async with reloadable.at_every_worker() as clients:
        await all_of(clients, lambda client: client.subscribe("live", {"authors": [author.did]}))
        reloadable.set(require_auth=["subscribe"])
        for client in clients:
            await is_told(client, "unauthenticated", "missing_capability", subscription_id="live")
        for client in clients:
            assert (await client.publish(make(author)))["type"] == "OK", "what is still allowed goes on"
            assert await client.quiet("live") == []
            _, end = await client.subscribe("again")
            assert end["detail"] == "missing_capability"


async def members(reloadable: Reloadable) -> None:
    member, closed = new_identity(), {"require_auth": ["publish", "subscribe"]}
    reloadable.set(**closed, members=[member.did])
    async with reloadable.at_every_worker() as clients:
        for client in clients:
            await client.authenticate(member)
            await client.subscribe("s", {"authors": [member.did]}, gapless=True)
        reloadable.set(**closed, members=[new_identity().did])
        for client in clients:
            await is_told(client, "unauthenticated", "missing_capability", subscription_id="s")
            await refused(client, make(member), "unauthenticated", "missing_capability")


async def replication_peers(reloadable: Reloadable) -> None:
    peer = new_identity()
    reloadable.set(replication_peers=[peer.did])
    async with reloadable.at_every_worker() as clients:
        for client in clients:
            assert "replicate" in (await client.authenticate(peer))["capabilities"]
            await client.subscribe("feed", {"authors": [peer.did]}, gapless=True)
        reloadable.set()
        for client in clients:
            await is_told(client, "unauthenticated", "missing_capability", subscription_id="feed")
            _, end = await client.subscribe("as-anybody", {"authors": [peer.did]})
            assert end["type"] == "END_OF_HISTORY"


async def answer_to(client: BareClient, message: dict[str, Any]) -> tuple[str | None, str | None]:
    answer = await client.ask(message)
    return answer.get("code"), answer.get("detail")


async def operators(reloadable: Reloadable) -> None:
    operator, listing = new_identity(), {"type": "MODERATE", "action": "list"}
    reloadable.set(operators=[operator.did])
    async with reloadable.at_every_worker() as clients:
        for client in clients:
            assert "operate" in (await client.authenticate(operator))["capabilities"]
            assert (await client.ask(listing))["type"] == "MODERATED"
        for names, told in (
            ([new_identity().did], ("unauthenticated", "missing_capability")),
            ([], ("invalid_schema", "unknown_type")),
        ):
            reloadable.set(operators=names)
            for client in clients:  # one after another, within a second
                async with asyncio.timeout(60):
                    while await answer_to(client, listing) != told:  # noqa: ASYNC110 -- another process
                        await asyncio.sleep(0.05)


async def allowed_origins(reloadable: Reloadable) -> None:
    async with reloadable.at_every_worker(origin="https://page.example") as clients:
        reloadable.set(allowed_origins=["https://other.example"])
        for client in clients:
            await is_told(client, "policy_rejected", "origin")
            await is_closed(client)


async def blocked(reloadable: Reloadable, name: str, code: str, detail: str | None) -> None:
    author = new_identity()
    stored, later = (
        make(author, text, type="DECLINED", media=[{"media_hash": HASH}]) for text in ("stored", "later")
    )
    value = {
        "blocked_authors": author.did,
        "blocked_types": "DECLINED",
        "blocked_media_hashes": HASH,
        "blocked_packet_ids": later.packet_id,
    }[name]
    async with reloadable.at_every_worker() as clients:
        await clients[0].publish(stored)
        await all_of(clients, lambda client: client.subscribe("live", {"authors": [author.did]}))
        reloadable.set(**{name: [value]})
        for client in clients:
            await refused(client, later, code, detail)
            events, _ = await client.subscribe("history", {"authors": [author.did]})
            assert ids_of(events) == ([stored.packet_id] if name == "blocked_packet_ids" else [])
            assert await client.quiet("live") == []


async def blocked_authors(reloadable: Reloadable) -> None:
    await blocked(reloadable, "blocked_authors", "blocked_author", None)


async def blocked_types(reloadable: Reloadable) -> None:
    await blocked(reloadable, "blocked_types", "policy_rejected", "blocked_type")


async def blocked_media_hashes(reloadable: Reloadable) -> None:
    await blocked(reloadable, "blocked_media_hashes", "policy_rejected", "blocked_media")


async def blocked_packet_ids(reloadable: Reloadable) -> None:
    await blocked(reloadable, "blocked_packet_ids", "policy_rejected", "blocked_packet_id")


async def allowed_authors(reloadable: Reloadable) -> None:
    async with reloadable.at_every_worker() as clients:
        reloadable.set(allowed_authors=[new_identity().did])
        for client in clients:
            await refused(client, make(new_identity()), "policy_rejected", "author_not_allowed")


async def allowed_types(reloadable: Reloadable) -> None:
    async with reloadable.at_every_worker() as clients:
        reloadable.set(allowed_types=["NOTE"])
        for client in clients:
            await refused(client, make(new_identity()), "policy_rejected", "type_not_allowed")


async def policies(reloadable: Reloadable) -> None:
    lists = {"blocked_types": ["POST"], "allowed_types": ["NOTE"]}
    async with reloadable.at_every_worker() as clients:
        for order, detail in ((list(lists), "blocked_type"), (list(lists)[::-1], "type_not_allowed")):
            reloadable.set(**lists, policies=order)
            for client in clients:
                await refused(client, make(new_identity()), "policy_rejected", detail)


async def refused_clients(reloadable: Reloadable) -> None:
    software = new_identity()

    def attested() -> Packet:
        content = {"type": "POST", "text": "a photo", "media": [{"media_hash": HASH}]}
        about: dict[str, Any] = {"origin_type": "SOFTWARE", "genesis_media_hash": HASH}
        return attest(new_identity(), software, "1.2.3", content, timestamp=int(time.time()), **about)

    async with reloadable.at_every_worker() as clients:
        for names in ([], [software.did]):
            reloadable.set(refused_clients=names)
            for client in clients:
                answer = await client.publish(attested())
                assert answer["type"] == "OK" and ("relay_annotations" in answer) is bool(names)


async def tls_files(reloadable: Reloadable) -> None:
    files = {name: str(reloadable.folder / "new" / f"{file}.pem") for name, file in _TLS_FILES.items()}
    async with reloadable.at_every_worker() as clients:
        reloadable.set(**files)
        for client in clients:  # the certificate of their handshake still serves them
            assert (await client.publish(make(new_identity())))["type"] == "OK"
        async with reloadable.connect("new"):
            pass
        with pytest.raises(ssl.SSLCertVerificationError):
            async with reloadable.connect("old"):
                pass


REACHES: dict[str, Callable[[Reloadable], Awaitable[None]]] = {
    "tls_cert": tls_files,
    "tls_key": tls_files,
    "policies": policies,
    "require_auth": require_auth,
    "members": members,
    "replication_peers": replication_peers,
    "operators": operators,
    "allowed_origins": allowed_origins,
    "refused_clients": refused_clients,
    "blocked_authors": blocked_authors,
    "blocked_packet_ids": blocked_packet_ids,
    "blocked_media_hashes": blocked_media_hashes,
    "blocked_types": blocked_types,
    "allowed_authors": allowed_authors,
    "allowed_types": allowed_types,
}
"""How each setting that SIGHUP can change reaches an open session, in every worker."""


@pytest.mark.req("R-185", "R-289", "R-292", "R-323")
@pytest.mark.parametrize(
    "name",
    # `spare_members` only moves budgets: tests/relayd/access/test_gate.py covers it.
    [row.name for row in setting_table().values() if row.reload and row.name != "spare_members"],
)
async def test_every_setting_that_sighup_changes_reaches_open_sessions(reloadable: Reloadable, name: str):
    try:
        await REACHES[name](reloadable)
    finally:
        reloadable.set()


@pytest.mark.req("R-170", "R-323")
async def test_what_waits_in_the_socket_of_a_slow_reader_is_not_sent_once_its_author_is_declined(
    reloadable: Reloadable,
):
    author = new_identity()

    def withdrawn() -> float:
        return reloadable.relay.metric("relayd_connections_closed_total", reason="withdrawn")

    before = withdrawn()
    large = [make(author, "x" * 200_000, n=n) for n in range(60)]  # more than the sockets buffer
    async with reloadable.connect(max_queue=1) as reader, reloadable.connect() as writer:
        await reader.subscribe("live", {"authors": [author.did]}, gapless=True)
        for packet in large:
            assert (await writer.publish(packet))["type"] == "OK"
        reloadable.set(blocked_authors=[author.did])
        await until(lambda: withdrawn() > before, "the slow reader is dropped")
        got = []
        with pytest.raises(ConnectionClosed):
            while True:
                got.append(await reader.receive())
        assert len(got) < len(large)
    async with reloadable.connect() as reader:
        events, _ = await reader.subscribe("s", {"authors": [author.did]}, gapless=True)
        assert events == []
    reloadable.set()


@pytest.mark.req("R-277", "R-339")
async def test_the_client_authenticates_where_that_has_come_to_be_required_and_ends_with_its_key(
    reloadable: Reloadable,
):
    me, writer = Identity.generate(), new_identity()
    trusted = ssl.create_default_context(cafile=str(reloadable.certificates["old"].ca))
    made = strata.Options(publish_timeout=60.0, backoff_cap=0.5)
    async with (
        strata.connect(reloadable.relay.ws, identity=me, ssl=trusted, options=made) as relay,
        reloadable.connect() as other,
        asyncio.timeout(30),
    ):
        deliveries = relay.subscribe(authors=[writer.did])
        for number in range(2):
            packet = make(writer, n=number)
            assert (await other.publish(packet))["type"] == "OK"
            assert (await anext(deliveries)).packet.packet_id == packet.packet_id
            assert (relay.session is None) is (number == 0)
            if number == 0:
                reloadable.set(require_auth=["subscribe"])
                await until(lambda: relay.session is not None, "the client has authenticated")
        assert (await other.publish(own_key_revoked(me)))["type"] == "OK"
        with pytest.raises(strata.ConnectionFailed, match="may authenticate no more"):
            await anext(deliveries)
    reloadable.set()
