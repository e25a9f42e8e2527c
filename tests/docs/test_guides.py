"""The guides for operators, run unchanged: each against real relays, shared by the steps of the page."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import tomllib
import urllib.request
from collections.abc import Awaitable, Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread
from types import SimpleNamespace
from typing import Any

import asyncpg
import pytest
from strata.protocol.ids import Identity
from strata.protocol.packets import Packet
from strata.protocol.places import PacketPlace, place_line
from websockets.exceptions import ConnectionClosed, InvalidStatus

from relayd.config import load
from relayd.policy import PolicyRequest
from relayd.postgres.running import running_server
from tests.support.bare_client import open_client
from tests.support.federations import peer_comes_to
from tests.support.forks import RELAYD, run_fork
from tests.support.guides import Guide
from tests.support.made_packets import make, new_identity
from tests.support.patient_clients import Ledger, Way, follow, grown, publish, settle, whole_log
from tests.support.ports import free_port
from tests.support.relay_process import ROOT, RelayProcess, environment, running
from tests.support.waiting import until, wait_until

pytestmark = pytest.mark.timeout(300)
DATES = "2026-11-22T20:14:03Z", "2026-11-22T19:02:41Z", "2026-11-29T19:02:41Z"
"""What the pages show for values that depend on the time."""
MEDIA = "0x" + "5f" * 32


def commands_environment(relay: RelayProcess) -> dict[str, str]:
    """The environment of an operator's shell on the machine of this relay."""
    return environment({**relay.settings, "port": relay.port})


async def place_of(relay: RelayProcess, packet_id: str) -> tuple[int, int]:
    """The sequence of a packet and its time of receipt."""
    with running_server(Path(str(relay.settings["data_dir"]))) as url:
        connection = await asyncpg.connect(url)
        try:
            query = "SELECT sequence, received_at FROM packet_ids WHERE packet_id = $1"
            sequence, received_at = await connection.fetchrow(query, bytes.fromhex(packet_id[2:]))
        finally:
            await connection.close()
    return sequence, received_at


async def test_the_guide_of_moderation(tmp_path: Path) -> None:
    author, other, stranger = new_identity(), new_identity(), new_identity()
    post = make(author)
    with_media = make(other, media=[{"media_hash": MEDIA}])
    typed = make(other, type="SOME_TYPE")
    removed, erased = make(other), make(other)
    config = tmp_path / "relayd.toml"
    config.write_text("")
    relay = RelayProcess(
        tmp_path,
        port=free_port(),
        arguments=("--config", str(config)),
        trusted_proxies=["127.0.0.0/8"],
    )
    with running(relay):
        guide = Guide(
            "docs/guides/moderation.md",
            tmp_path,
            commands_environment(relay),
            words={
                "did:strata:z6Mk…": author.did,
                "0x172a…": removed.packet_id,
                "0x99c0…": erased.packet_id,
                "0x5f1e…": MEDIA,
                "wss://relay.example/strata": relay.ws,
                **{date: "…" for date in DATES},
                "root (command)": "… (command)",
            },
            elsewhere={
                "strata-pipeline find": "there is no lake; tests/pipeline/jobs/test_find.py has one",
                "strata-pipeline erase": "there is no lake; tests/pipeline/jobs/test_find.py has one",
            },
        )

        async def run(beginning: str, words: dict[str, str] | None = None) -> str:
            return await asyncio.to_thread(guide.run, beginning, words)

        async def comes_to(status: int, *packets: Packet) -> None:
            async with asyncio.timeout(60):
                for packet in packets:
                    while relay.get(f"/packets/{packet.packet_id}")[0] != status:  # noqa: ASYNC110 -- another process
                        await asyncio.sleep(0.05)

        async with open_client(relay.ws) as client:
            for packet in (post, with_media, typed, removed, erased):
                assert (await client.publish(packet))["type"] == "OK"
            await run("relayd ban did:")
            await comes_to(410, post)
            assert (await client.publish(make(author)))["code"] == "blocked_author"
            await run("relayd ban 203.0.113.0/24")
            await run("relayd ban 0x")
            await run("relayd ban SOME_TYPE")
            await run("relayd remove")
            await comes_to(410, with_media, typed, removed)
            with pytest.raises(InvalidStatus, match="403"):
                async with open_client(relay.ws, additional_headers={"X-Forwarded-For": "203.0.113.9"}):
                    pass
            await run("relayd unban did:")
            await run("relayd restore")
            await comes_to(200, post, removed)
            assert (await client.publish(make(author)))["type"] == "OK"
            in_force = await run("relayd list")
            assert sorted(line.split()[0] for line in in_force.splitlines()) == ["media", "network", "type"]
            await run("relayd log did:")

            operator = (await run("strata keygen")).split()[0]
            assert operator.startswith("did:strata:"), operator
            config.write_text(guide.block("toml", "operators", {"did:strata:z6MkOperator…": operator}))
            os.kill(relay.pid, signal.SIGHUP)
            await until(lambda: relay.logged("reloaded") == 1)
            await run("export STRATA_RELAY")
            await run("strata moderate ban did:")
            await comes_to(410, post)
            assert author.did in await run("strata moderate list")
            await run("strata moderate unban did:")
            await comes_to(200, post)

            await client.authenticate(stranger)
            listed = await run("relayd sessions list")
            (session,) = [line.split()[0] for line in listed.splitlines() if stranger.did in line]
            assert session not in await run("relayd sessions list 203.0.113.0/24")
            await run("relayd sessions close", {"5f3a91c2-17": session})
            with pytest.raises(ConnectionClosed):
                while True:
                    await client.receive()

        case = json.loads(await run("relayd log 0x172a…"))
        assert [(each["act"], each["reason"]) for each in case] == [
            ("unban", "order lifted"),
            ("ban", "court order 4 C 77/26"),
        ]
        assert (await run("relayd erase 0x172a…")) == "2 packets erased\n"
        assert (await run("relayd erase --author")) == "2 packets erased\n"
        await comes_to(410, removed, erased, post)
        async with open_client(relay.ws) as client:
            assert (await client.publish(removed))["duplicate"] is True
            left = await client.publish(make(other))
        place = PacketPlace(left["packet_id"], *await place_of(relay, left["packet_id"]))
        (tmp_path / "places.jsonl").write_bytes(place_line(place))
        assert (await run("relayd erase --places")).startswith("1 packets would be erased\n")
        assert (await run("relayd erase --places")).startswith("1 packets erased\n")
        guide.finish()
        assert not relay.complaints()


async def test_the_guide_of_operations(tmp_path: Path) -> None:
    relay = RelayProcess(tmp_path, port=free_port(), arguments=("--workers", "2"), tls_self_made=True)
    data_dir = Path(str(relay.settings["data_dir"]))
    backup, put_back = tmp_path / "backup", tmp_path / "put-back" / "data"
    with running(relay), running_server(data_dir) as url:
        guide = Guide(
            "docs/guides/operations.md",
            tmp_path,
            commands_environment(relay),
            words={
                "docker-compose exec -T relay ": "",
                "/var/lib/relayd": str(data_dir),
                "7447": str(relay.port),
                "/backups/2026-11-22": str(backup),
                "--data-dir /new": f"--data-dir {put_back}",
                "--database-url …": f"--database-url '{url}'",
                "/srv/lake": str(tmp_path),
                "4f6ad01c-1": "…",
                "PID": str(relay.pid),
                DATES[0]: "…",
            },
            elsewhere={
                "kubectl create secret": "there is no cluster; tests/test_kubernetes.py renders the chart",
                "helm install": "there is no cluster; tests/test_kubernetes.py renders the chart",
            },
        )

        async def run(beginning: str) -> str:
            return await asyncio.to_thread(guide.run, beginning)

        assert f"port = {relay.port}" in (await run("relayd check-config")).splitlines()
        looked_at = {line.split(":")[0][2:] for line in (await run("relayd doctor")).splitlines()}
        assert {"database", "schema", "connections", "indexes", "pooler", "disk", "tls", "relay"} <= looked_at
        await run("docker-compose exec -T relay cat")
        await run("strata keygen")
        await run("SSL_CERT_FILE=relay-ca.pem strata publish")
        assert "relayd" in await run("SSL_CERT_FILE=relay-ca.pem strata status")

        author = new_identity()
        packets = [make(author, n=n) for n in range(8)]
        plain = SimpleNamespace(ws=relay.ws.replace("wss:", "ws:"))
        async with open_client(plain.ws) as client:
            assert {answer["type"] for answer in await client.publish_all(packets)} == {"OK"}
            erase = ["erase", packets[0].packet_id, "--reason", "asked for"]
            code, _, err = await asyncio.to_thread(run_fork, RELAYD, erase, env=commands_environment(relay))
            assert code == 0, err
            await run("relayd backup create")
            assert "the live database has 0 packets beyond it" in await run("relayd backup verify")
            await run("relayd backup restore")
            await run("relayd export")
            assert " stored 0, duplicates 8," in f" {await run('relayd import')}"
            assert "no packet is told as received in the future" in await run("relayd mend-times")
            settings = tomllib.loads(guide.block("toml", "retention_requires_archive"))
            assert settings["archive_manifests"] == f"{tmp_path}/_manifests"
            names: dict[str, Any] = {"has_published_before": lambda _: asyncio.sleep(0, False)}
            exec(guide.block("python", "from relayd.policy"), names)
            refusal = await names["no_newcomers"](PolicyRequest(packets[0], None, 0))
            assert refusal.detail == "newcomer"
        await renew_under_load(relay, plain, run)
        async with open_client(plain.ws) as client:
            await client.publish_all([make(author, n=n) for n in range(8)])
            assert json.loads(await run("relayd top"))["sessions"] == 1
            assert "content_type" in await run("relayd explain")
            await run("relayd sessions list")
        guide.finish()
        assert not relay.complaints()


async def renew_under_load(relay: RelayProcess, way: Way, run: Callable[[str], Awaitable[str]]) -> None:
    """SIGHUP and SIGUSR2, during which publishers and readers lose nothing."""
    ledger = Ledger()
    async with asyncio.TaskGroup() as group:
        publisher = group.create_task(publish(way, ledger))
        reader = group.create_task(follow(way, ledger))
        await grown(ledger, 100)
        await run("kill -HUP PID")
        await until(lambda: relay.logged("reloaded") == 2)
        await run("kill -USR2 PID")
        await until(lambda: relay.logged("workers_renewed") == 1)
        await grown(ledger, 100)
        publisher.cancel()
        await asyncio.wait([publisher])
        await settle(way, ledger)
        log = await whole_log(way, ledger)
        await until(lambda: len(ledger.seen) >= len(log))
        reader.cancel()
    assert ledger.seen == log and set(log) == ledger.acknowledged
    assert not ledger.refused and not ledger.resets


async def test_the_guide_of_relays_among_relays(tmp_path: Path) -> None:
    upstream_seed, downstream_seed = bytes([61]) * 32, bytes([62]) * 32
    upstream_did, downstream_did = (Identity.from_seed(seed).did for seed in (upstream_seed, downstream_seed))
    peers = tmp_path / "peers.toml"
    guide = Guide(
        "docs/guides/federation.md",
        tmp_path,
        {},
        words={
            "did:strata:z6MkDownstream…": downstream_did,
            "did:strata:z6MkUpstream…": upstream_did,
            "/etc/relayd/peers.toml": str(peers),
            " DID": f" {upstream_did}",
        },
    )
    configs = [tmp_path / "upstream.toml", tmp_path / "downstream.toml"]
    upstream, downstream = (
        RelayProcess(
            tmp_path / config.stem,
            port=free_port(),
            arguments=("--config", str(config)),
            identity_seed=seed.hex(),
        )
        for config, seed in zip(configs, (upstream_seed, downstream_seed), strict=True)
    )
    for config in configs:
        config.write_text(guide.block("toml", ""))
    url = f"ws://127.0.0.1:{upstream.port}/strata"
    peers.write_text(guide.block("toml", "# /etc/relayd/peers.toml", {"wss://relay.example.net/strata": url}))
    guide.speak_as(environment({**downstream.settings, "port": downstream.port, "peers_file": peers}))

    async def run(beginning: str) -> str:
        return await asyncio.to_thread(guide.run, beginning)

    with running(upstream), running(downstream):
        downstream.settings["peers_file"] = peers
        packet = make(new_identity())
        async with open_client(upstream.ws) as client:
            assert (await client.publish(packet))["type"] == "OK"
        await until(lambda: downstream.get(f"/packets/{packet.packet_id}")[0] == 200)
        assert "replicate" in await run("relayd peers check")
        assert "0  there, and missing" in await run("relayd peers reconcile DID")
        assert upstream_did in await run("relayd peers show DID")
        assert upstream_did in await run("relayd peers list")
        await run("relayd peers pause DID")
        await peer_comes_to(downstream, lambda peer: peer["state"] == "paused")
        await run("relayd peers resume DID")
        await peer_comes_to(downstream, lambda peer: peer["state"] == "connected")
        await run("relayd peers forgive DID")
        await run("relayd peers reset-cursor DID")
        guide.finish()
        assert not upstream.complaints() + downstream.complaints()


def test_the_guide_of_more_than_one_machine(tmp_path: Path) -> None:
    """Its steps are run under load, in the same words, in tests/system/test_failover.py and test_bus.py."""
    guide = Guide(
        "docs/guides/scaling.md",
        tmp_path,
        {},
        elsewhere={
            "pg_basebackup": "tests/support/standbys.py makes each standby so",
            "SELECT pg_promote": "tests/system/test_failover.py promotes with this line",
            "ALTER SYSTEM SET synchronous_standby_names": "tests/system/test_failover.py",
            "pip install": "tests install nothing; tests/docs/test_commands.py knows the extra",
        },
    )
    for beginning in ("database_url", "bus_url"):
        file = tmp_path / "relayd.toml"
        file.write_text(guide.block("toml", beginning))
        assert load(file)
    guide.finish()


def test_what_readme_and_the_five_minutes_say_besides_the_tour(tmp_path: Path) -> None:
    """The tour of README is run by tests/system/test_readme.py."""
    readme = "README.md"
    tour = {
        line.partition("  #")[0].strip()
        for block in re.findall(r"^```sh tour\n(.*?)^```$", (ROOT / readme).read_text(), re.M | re.S)
        for line in block.splitlines()
    }
    for page, others in (
        (
            readme,
            {
                "make ": "tests/test_makefile.py; `make run` is what a fixture does for most tests",
                "export PIPELINE": "tests/system/test_pipeline.py has the URL from the relay's folder",
                "strata-pipeline ": "tests/system/test_pipeline.py",
                "docker-compose ": "tests/test_compose.py reads the file; no test has Docker",
                "RELAY_DOMAIN=": "tests/test_compose.py reads the file; no test has Docker or a name",
                "SSL_CERT_FILE=": "the guide of operations has the same, and its test runs it",
                "curl ": "tests/system/test_http.py",
                "import ": "tests/system/test_readme.py",
            },
        ),
        (
            "docs/start/five-minutes.md",
            {
                "make run": "a fixture does it for most tests",
                "make demo": "tests/system/test_examples.py",
                "strata channel room": "tests/system/test_channel_cli.py",
            },
        ),
    ):
        Guide(page, tmp_path, {}, elsewhere=others | dict.fromkeys(tour, "the tour")).finish()


class Alertmanager:
    """Accepts what Prometheus sends to an Alertmanager, and keeps the newest of each alert."""

    def __init__(self) -> None:
        self.alerts: dict[str, dict[str, Any]] = {}
        kept = self.alerts

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                for alert in json.loads(self.rfile.read(int(self.headers["Content-Length"]))):
                    kept[alert["labels"]["alertname"]] = alert
                self.send_response(200)
                self.end_headers()

            def log_message(self, *_: object) -> None: ...

        self._server = HTTPServer(("127.0.0.1", 0), Handler)
        self.port = self._server.server_port

    @contextlib.contextmanager
    def listening(self) -> Iterator[Alertmanager]:
        thread = Thread(target=self._server.serve_forever, args=(0.1,))
        thread.start()
        try:
            yield self
        finally:
            self._server.shutdown()
            thread.join()
            self._server.server_close()


@contextlib.contextmanager
def prometheus(folder: Path, relay: RelayProcess, alertmanager: Alertmanager) -> Iterator[str]:
    """A Prometheus with the shipped files, which scrapes twice a second instead of four times a minute."""
    shutil.copytree(ROOT / "deploy" / "prometheus", folder)
    quick = {
        "prometheus.yml": {
            "15s": "500ms",
            "relay:7447": f"127.0.0.1:{relay.port}",
            "alertmanager:9093": f"127.0.0.1:{alertmanager.port}",
        },
        "alerts.yml": {"for: 1m": "for: 1s"},
    }
    for name, words in quick.items():
        text = (folder / name).read_text()
        for said, ours in words.items():
            assert said in text
            text = text.replace(said, ours)
        (folder / name).write_text(text)
    url = f"http://127.0.0.1:{free_port()}"
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            [
                "prometheus",
                f"--config.file={folder / 'prometheus.yml'}",
                f"--storage.tsdb.path={folder / 'data'}",
                f"--web.listen-address={url.removeprefix('http://')}",
                f"--web.user-assets={ROOT / 'docs' / 'runbooks'}",
                f"--web.external-url={url}",
            ],
            stdout=log,
            stderr=log,
        )
    try:
        yield url
    finally:
        process.terminate()
        process.wait(30)


@pytest.mark.skipif(
    shutil.which("prometheus") is None, reason="needs Prometheus (apt-get install prometheus)"
)
def test_the_drill_of_alerts(tmp_path: Path) -> None:
    """Operating a relay, "A drill": the alert fires, leads to its page, and ends by itself."""
    relay = RelayProcess(tmp_path, port=free_port())
    with (
        running(relay),
        Alertmanager().listening() as alertmanager,
        prometheus(tmp_path / "prometheus", relay, alertmanager) as url,
    ):

        def firing() -> set[str]:
            with contextlib.suppress(OSError), urllib.request.urlopen(f"{url}/api/v1/alerts") as answer:
                alerts = json.load(answer)["data"]["alerts"]
                return {each["labels"]["alertname"] for each in alerts if each["state"] == "firing"}
            return {"nobody answers yet"}

        wait_until(lambda: firing() == set(), "Prometheus")
        assert relay.stop() == 0
        wait_until(lambda: "RelayDown" in alertmanager.alerts, "the alert")
        assert firing() == {"RelayDown"}
        page = alertmanager.alerts["RelayDown"]["annotations"]["runbook_url"]
        with urllib.request.urlopen(page) as answer:
            assert answer.read().decode() == (ROOT / "docs" / "runbooks" / "RelayDown.md").read_text()
        relay.start()
        wait_until(lambda: firing() == set(), "the end of the alert")
