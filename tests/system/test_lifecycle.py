"""A relay's life: restarts, signals, exit codes, TLS, workers (design §4)."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import re
import signal
import socket
import ssl
from datetime import UTC, datetime
from pathlib import Path

import psutil
import pytest
import trustme
from websockets.exceptions import ConnectionClosed, ConnectionClosedOK

from relayd.tls import DevCertificates, read_certificate, write_dev_certificates
from tests.support.backups import Copied
from tests.support.bare_client import open_client, publish_text
from tests.support.federations import ids_at
from tests.support.made_packets import ids_of, make, new_identity
from tests.support.relay_process import RelayProcess, running
from tests.support.waiting import wait_until


@pytest.mark.req("R-097", "R-108", "R-110", "R-155")
@pytest.mark.parametrize("end", ["stop", "kill"])
async def test_what_was_acknowledged_and_where_a_reader_stood_survive_a_restart(tmp_path: Path, end):
    identity = new_identity()
    filters = {"authors": [identity.did]}
    packets = [make(identity, n=n) for n in range(10)]
    with running(RelayProcess(tmp_path, from_scratch=end == "stop")) as relay:
        async with open_client(relay.ws) as client:
            first = await client.publish_all(packets)
            events, _ = await client.subscribe("s", {**filters, "limit": 4})
        relay_id = relay.ready["relay_id"]
        relay.stop() if end == "stop" else relay.kill()
        relay.start()
        assert relay.ready["relay_id"] == relay_id
        async with open_client(relay.ws) as client:
            again = await client.publish_all(packets)
            assert all(answer.get("duplicate") for answer in again)
            assert [a["received_at"] for a in again] == [a["received_at"] for a in first]
            rest, _ = await client.subscribe("s", {**filters, "cursor": events[-1]["cursor"]})
            assert ids_of(events + rest) == [packet.packet_id for packet in packets]
            received = {answer["packet_id"]: answer["received_at"] for answer in first}
            assert all(received[e["packet"]["packet_id"]] == e["received_at"] for e in events + rest)


@pytest.mark.req("R-189", "R-192")
async def test_sigterm_answers_what_was_taken_and_closes_with_1001(tmp_path: Path):
    identity = new_identity()
    with running(RelayProcess(tmp_path)) as relay:
        async with open_client(relay.ws) as client, open_client(relay.ws) as idle:
            packets = [make(identity, n=n) for n in range(200)]
            for packet in packets:
                await client.send(publish_text(packet, packet.packet_id))
            accepted = {(await client.receive())["packet_id"]}
            relay.terminate()
            with pytest.raises(ConnectionClosed) as closed:
                while True:
                    message = await client.receive()
                    assert message["type"] == "OK"
                    accepted.add(message["packet_id"])
            assert closed.value.rcvd is not None
            assert closed.value.rcvd.code == 1001
            with pytest.raises(ConnectionClosedOK):
                await idle.receive()
        assert relay.wait() == 0
        relay.start()
        async with open_client(relay.ws) as client:
            events, _ = await client.subscribe("s", {"authors": [identity.did], "limit": 500})
            stored = ids_of(events)
            assert accepted <= set(stored)
            assert stored == [p.packet_id for p in packets][: len(stored)]


async def test_draining_is_visible_and_a_second_signal_ends_at_once(tmp_path: Path):
    with running(RelayProcess(tmp_path)) as relay:
        # A peer that never answers makes the drain wait for its deadline.
        host, port = relay.http.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port))) as peer:
            peer.sendall(
                b"GET /strata HTTP/1.1\r\nHost: x\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
                b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\n\r\n"
            )
            assert b"101" in peer.recv(4096)
            relay.terminate()
            wait_until(lambda: '"draining"' in relay.log.read_text(), "the drain")
            # A signal sent at once counts as the same request, so repeat it, as an impatient operator does.
            process = relay.process
            assert process is not None

            def has_ended() -> bool:
                process.send_signal(signal.SIGTERM)
                return process.poll() is not None

            wait_until(has_ended, "the end")
            assert relay.wait() != 0


@pytest.mark.req("R-308")
@pytest.mark.parametrize(
    ("settings", "code"),
    [
        ({"max_limit": 0}, 2),
        ({"no_such_setting": 1}, 2),
        ({"tls_cert": "/nonexistent", "tls_key": "/nonexistent"}, 2),
        ({"database_url": "postgresql://nobody@127.0.0.1:1/none"}, 3),
    ],
)
def test_exit_codes(tmp_path: Path, settings, code):
    relay = RelayProcess(tmp_path, from_scratch=True, **settings)
    relay.spawn()
    assert relay.wait() == code
    assert "Traceback" not in relay.last_words(200)


def test_a_taken_port_is_exit_code_4(tmp_path: Path):
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        relay = RelayProcess(tmp_path, port=holder.getsockname()[1])
        relay.spawn()
        assert relay.wait() == 4


async def test_tls_from_files_and_a_renewed_certificate_on_sighup(tmp_path: Path):
    old = write_dev_certificates(tmp_path / "old")
    new = write_dev_certificates(tmp_path / "new")
    with running(RelayProcess(tmp_path, tls_cert=old.cert, tls_key=old.key)) as relay:
        assert relay.ws.startswith("wss://")
        trusts_old = ssl.create_default_context(cafile=str(old.ca))
        trusts_new = ssl.create_default_context(cafile=str(new.ca))
        async with open_client(relay.ws, ssl=trusts_old) as early:
            assert (await early.publish(make(new_identity())))["type"] == "OK"
            old.cert.write_bytes(new.cert.read_bytes())
            old.key.write_bytes(new.key.read_bytes())
            assert relay.process is not None
            relay.process.send_signal(signal.SIGHUP)
            wait_until(lambda: '"reloaded"' in relay.log.read_text(), "the reload")
            async with open_client(relay.ws, ssl=trusts_new) as late:
                assert (await late.publish(make(new_identity())))["type"] == "OK"
            with pytest.raises(ssl.SSLCertVerificationError):
                async with open_client(relay.ws, ssl=trusts_old):
                    pass
            assert (await early.publish(make(new_identity(), "x" * 100_000)))["type"] == "OK"
            # Invalid files change nothing.
            old.key.write_text("broken")
            relay.process.send_signal(signal.SIGHUP)
            wait_until(lambda: "not_reloaded" in relay.log.read_text(), "the refusal")
            async with open_client(relay.ws, ssl=trusts_new) as late:
                await late.barrier()


async def test_a_relay_with_a_certificate_of_its_own_speaks_wss_and_ws_on_one_port(tmp_path: Path):
    data = tmp_path / "data"
    relay = RelayProcess(tmp_path, arguments=("--workers", "2"), tls_self_made=True)
    with running(relay):
        assert relay.ws.startswith("wss://")
        told = f"SSL_CERT_FILE={data / 'tls' / 'ca.pem'}"
        assert [
            line for line in relay.log.read_text().splitlines() if "tls_self_made" in line and told in line
        ]
        packet = make(new_identity())
        trusting = ssl.create_default_context(cafile=str(data / "tls" / "ca.pem"))
        async with open_client(relay.ws, ssl=trusting) as secure:
            assert (await secure.publish(packet))["type"] == "OK"
        async with open_client(relay.ws.replace("wss:", "ws:")) as plain:
            assert (await plain.publish(packet))["duplicate"] is True


@pytest.mark.req("R-111", "R-311")
async def test_two_workers_behave_as_one_relay(tmp_path: Path):
    identity = new_identity()
    with running(RelayProcess(tmp_path, arguments=("--workers", "2"))) as relay:
        clients = []
        for _ in range(8):  # the kernel spreads connections over the workers
            manager = open_client(relay.ws)
            clients.append((manager, await manager.__aenter__()))
        for _, client in clients:
            await client.subscribe("s", {"authors": [identity.did], "limit": 0})
        packets = [make(identity, n=n) for n in range(160)]
        async with asyncio.TaskGroup() as group:
            for number, (_, client) in enumerate(clients):
                group.create_task(client.publish_all(packets[number::8] + packets[:5]))
        orders = []
        for _, client in clients:
            orders.append(ids_of(await client.events("s", 160)))
            await client.barrier()
            assert not [m for m in client.inbox if m["type"] == "EVENT"]
        assert set(orders[0]) == {packet.packet_id for packet in packets}
        assert all(order == orders[0] for order in orders)
        assert relay.metric("relayd_connections") >= 8
        for manager, _ in clients:
            await manager.__aexit__(None, None, None)
        assert relay.stop() == 0


@pytest.mark.req("R-186", "R-187")
async def test_policy_is_read_anew_on_sighup_and_a_broken_file_changes_nothing(tmp_path: Path):
    author = new_identity()
    file = tmp_path / "relayd.toml"
    file.write_text("")
    with running(RelayProcess(tmp_path, arguments=("--config", str(file)))) as relay:

        def reload(text: str, said: str) -> None:
            file.write_text(text)
            before = relay.log.read_text().count(said)
            os.kill(relay.pid, signal.SIGHUP)
            wait_until(lambda: relay.log.read_text().count(said) > before, said)

        async with open_client(relay.ws) as client:
            assert (await client.publish(make(author)))["type"] == "OK"
            reload(f'blocked_authors = ["{author.did}"]\n', '"reloaded"')
            assert (await client.publish(make(author)))["code"] == "blocked_author"
            reload("blocked_authors = 1\n", '"not_reloaded"')
            assert (await client.publish(make(author)))["code"] == "blocked_author"
            reload("", '"reloaded"')
            assert (await client.publish(make(author)))["type"] == "OK"


async def test_a_reload_changes_everything_or_nothing_and_names_what_waits_for_a_restart(tmp_path: Path):
    author = new_identity()
    old, new = (write_dev_certificates(tmp_path / folder) for folder in ("old", "new"))
    file = tmp_path / "relayd.toml"

    def write(certificates: str, *lines: str) -> None:
        folder = tmp_path / certificates
        file.write_text(
            "\n".join([f"tls_cert = '{folder}/cert.pem'", f"tls_key = '{folder}/key.pem'", *lines])
        )

    write("old")
    ends = datetime(2031, 1, 1, tzinfo=UTC)
    renewed = trustme.CA().issue_cert("localhost", not_after=ends)
    arguments = ("--config", str(file))
    with running(RelayProcess(tmp_path, arguments=arguments, metrics_listen="127.0.0.1:0")) as relay:

        def reload(said: str) -> dict[str, object]:
            before = relay.log.read_text().count(said)
            os.kill(relay.pid, signal.SIGHUP)
            wait_until(lambda: relay.log.read_text().count(said) > before, said)
            lines: list[dict[str, object]] = [json.loads(line) for line in relay.log.read_text().splitlines()]
            return [line for line in lines if f'"{line["event"]}"' == said][-1]

        async def answer(certificates: DevCertificates) -> object:
            trusted = ssl.create_default_context(cafile=str(certificates.ca))
            async with open_client(relay.ws, ssl=trusted) as client:
                return (await client.publish(make(author)))["type"]

        # The policy is valid, the certificate is not: the policy must not change either.
        write("missing", f"blocked_authors = ['{author.did}']")
        assert "No such file" in str(reload('"not_reloaded"')["problem"])
        assert await answer(old) == "OK"
        # The certificate is valid, the policy is not.
        write("new", "blocked_authors = 1")
        reload('"not_reloaded"')
        assert await answer(old) == "OK"
        # Both are valid, and another setting must wait.
        write("new", f"blocked_authors = ['{author.did}']", "max_limit = 400")
        assert reload('"reloaded"')["changed"] == ["tls_cert", "tls_key", "blocked_authors"]
        assert await answer(new) == "ERROR"
        with pytest.raises(ssl.SSLCertVerificationError):
            await answer(old)
        assert reload('"restart_needed"')["settings"] == ["max_limit"]
        # The expiry of the certificate in use: it would pass unnoticed if a renewed one were not loaded.
        shown = relay.metric("relayd_tls_not_after_timestamp_seconds")
        assert shown == read_certificate(new.cert).not_after.timestamp()
        new.key.write_bytes(renewed.private_key_pem.bytes())
        new.cert.write_bytes(renewed.cert_chain_pems[0].bytes())
        assert relay.metric("relayd_tls_not_after_timestamp_seconds") == shown
        reload('"reloaded"')
        assert relay.metric("relayd_tls_not_after_timestamp_seconds") == ends.timestamp()


@pytest.mark.timeout(400)
async def test_a_worker_that_comes_back_while_the_database_is_away_waits_for_it(
    tmp_path: Path, shared_database: str
):
    database = await Copied(shared_database).make()
    relay = RelayProcess(tmp_path, database_url=database.url, arguments=("--workers", "2"))
    with running(relay):
        before = {worker.pid for worker in relay.workers()}
        async with database.away():
            os.kill(min(before), signal.SIGKILL)
            await asyncio.to_thread(wait_until, lambda: relay.logged("worker_waits") > 0, "it to wait", 150)
        served = relay.logged("serving")
        await asyncio.to_thread(wait_until, lambda: relay.logged("serving") > served, "it to serve", 150)
        assert relay.logged("worker_died") == 1
        assert len({worker.pid for worker in relay.workers()} - before) == 1


async def test_a_worker_whose_supervisor_dies_while_it_is_being_started_ends_as_well(
    tmp_path: Path, shared_database: str
):
    database = await Copied(shared_database).make()
    settings = {"database_url": database.url, "failpoints": "workers.start=delay:1.5"}
    relay = RelayProcess(tmp_path, arguments=("--workers", "2"), **settings)  # type: ignore[arg-type]
    with running(relay):
        before = {worker.pid for worker in relay.workers()}
        os.kill(min(before), signal.SIGKILL)
        # Wait until it has read what Python passes to it: without that it would end at once with a traceback.
        wait_until(lambda: relay.logged("failpoint") == 3, "its successor to begin", 60)
        workers = relay.workers()
        assert len({worker.pid for worker in workers} - before) == 1
        os.kill(relay.pid, signal.SIGKILL)
        try:
            _, alive = psutil.wait_procs(workers, timeout=60)
            assert not alive
        finally:
            for worker in workers:
                with contextlib.suppress(psutil.NoSuchProcess):
                    worker.kill()
        assert "Traceback" not in relay.log.read_text()


async def test_a_reload_reaches_a_worker_that_is_just_being_started(tmp_path: Path):
    author = new_identity()
    file = tmp_path / "relayd.toml"
    file.write_text("")
    with running(RelayProcess(tmp_path, arguments=("--config", str(file), "--workers", "2"))) as relay:

        def workers() -> set[int]:
            return {worker.pid for worker in relay.workers()}

        before = workers()
        os.kill(min(before), signal.SIGKILL)
        wait_until(lambda: workers() - before, "the worker's successor to begin")
        file.write_text(f"blocked_authors = ['{author.did}']")
        os.kill(relay.pid, signal.SIGHUP)
        wait_until(lambda: relay.logged("reloaded") == 2, "both to reload", 60)
        assert relay.logged("worker_died") == 1
        for _ in range(8):  # the kernel spreads connections over the workers
            async with open_client(relay.ws) as client:
                assert (await client.publish(make(author)))["code"] == "blocked_author"


@pytest.mark.parametrize("workers", [1, 2])
def test_a_reload_or_a_renewal_asked_for_while_the_relay_starts_does_not_end_it(tmp_path: Path, workers):
    file = tmp_path / "relayd.toml"
    file.write_text("")
    arguments = ("--config", str(file), "--workers", str(workers))
    relay = RelayProcess(tmp_path, arguments=arguments, failpoints="server.start=delay:2")
    relay.spawn()
    try:
        wait_until(lambda: relay.logged("failpoint") == workers, "the start to be under way", 60)
        file.write_text("blocked_types = ['X']")
        os.kill(relay.pid, signal.SIGUSR2)
        os.kill(relay.pid, signal.SIGHUP)
        relay.ready = relay.await_ready()
        wait_until(lambda: relay.logged("reloaded") == workers, "it to be heeded", 60)
        _, _, manifest = relay.get("/.well-known/strata-relay.json")
        assert json.loads(manifest)["policy"]["declined_types"] == ["X"]
        assert relay.stop() == 0
    finally:
        relay.kill()


def test_a_worker_that_cannot_read_a_file_any_more_takes_no_other_one_with_it(tmp_path: Path):
    peers = tmp_path / "peers.toml"
    peers.write_text("")
    settings = {"peers_file": peers, "retention_days": 0}
    with running(RelayProcess(tmp_path, arguments=("--workers", "2"), **settings)) as relay:  # type: ignore[arg-type]
        lost, kept = relay.workers()
        peers.write_text("[[peer]]\nurl = 'ftp://a'\nrelay_id = 'b'\n")
        lost.kill()
        wait_until(lambda: relay.logged("worker_died") >= 2, "its successor to fail", 60)
        assert relay.is_running() and kept.is_running()
        assert "b is not a DID" in relay.log.read_text()
        peers.write_text("")
        served = relay.logged("serving")
        wait_until(lambda: relay.logged("serving") > served, "the next one to serve", 60)
        assert relay.stop() == 0
    peers.write_text("[[peer]]\nurl = 'ftp://a'\nrelay_id = 'b'\n")
    again = RelayProcess(tmp_path, arguments=("--workers", "2"), **settings)  # type: ignore[arg-type]
    again.spawn()
    assert again.wait() == 2


async def test_a_worker_that_is_started_again_begins_with_the_settings_of_the_last_reload(tmp_path: Path):
    author = new_identity()
    file = tmp_path / "relayd.toml"
    file.write_text("")
    with running(RelayProcess(tmp_path, arguments=("--config", str(file), "--workers", "2"))) as relay:

        def wait_for_serving(count: int) -> None:
            wait_until(lambda: relay.logged("serving") == count, "the worker's successor")

        file.write_text("blocked_authors = 1")
        os.kill(relay.pid, signal.SIGHUP)
        wait_until(lambda: relay.logged("not_reloaded") > 0, "the refusal")
        assert relay.logged("not_reloaded") == 1, "no worker is asked to take over what is wrong"
        file.write_text(f"blocked_authors = ['{author.did}']")
        os.kill(relay.pid, signal.SIGHUP)
        wait_until(lambda: relay.logged("reloaded") == 2, "both workers to reload")
        workers = relay.workers()
        assert len(workers) == 2
        for number, worker in enumerate(workers):
            worker.kill()
            wait_for_serving(3 + number)
        async with open_client(relay.ws) as client:
            assert (await client.publish(make(author)))["code"] == "blocked_author"


async def test_a_worker_that_is_killed_or_hangs_is_replaced_and_the_others_notice_nothing(tmp_path: Path):
    settings = {"worker_timeout": 20}
    with running(RelayProcess(tmp_path, arguments=("--workers", "2"), **settings)) as relay:  # type: ignore[arg-type]
        async with contextlib.AsyncExitStack() as stack:
            clients = [await stack.enter_async_context(open_client(relay.ws)) for _ in range(12)]
            lost, kept = relay.workers()
            os.kill(lost.pid, signal.SIGSTOP)  # its event loop stands still
            wait_until(lambda: relay.logged("worker_hung") == 1, "the hung worker to be noticed", 150)
            wait_until(
                lambda: len(relay.workers()) == 2 and relay.logged("serving") == 3, "its successor", 60
            )
            assert relay.metric("relayd_worker_restarts_total", reason="hung") == 1
            fresh = next(worker for worker in relay.workers() if worker.pid != kept.pid)
            fresh.kill()
            wait_until(lambda: relay.logged("serving") == 4, "its successor", 60)
            assert relay.metric("relayd_worker_restarts_total", reason="died") == 1
            assert kept.is_running()
            served = 0
            for client in clients:  # clients of the other worker were not disturbed
                with contextlib.suppress(ConnectionClosed):
                    assert (await client.publish(make(new_identity())))["type"] == "OK"
                    served += 1
            assert served > 0
            assert served == relay.metric("relayd_connections")


def test_the_processor_time_never_falls_when_workers_are_replaced(tmp_path: Path):
    with running(RelayProcess(tmp_path, arguments=("--workers", "2"))) as relay:
        seen = [0.0]

        def look() -> bool:
            with contextlib.suppress(OSError, KeyError):  # the worker that answers has been killed
                seen.append(relay.metric("process_cpu_seconds_total"))
            return True

        wait_until(lambda: look() and seen[-1] > 0.5, "the workers to count their start", 60)
        relay.workers()[0].kill()
        wait_until(lambda: look() and relay.logged("serving") == 3, "its successor", 60)
        os.kill(relay.pid, signal.SIGUSR2)
        wait_until(lambda: look() and relay.logged("workers_renewed") == 1, "the renewal", 90)
        look()
        assert seen == sorted(seen)


async def test_a_setting_for_new_processes_renews_the_workers_one_at_a_time(tmp_path: Path):
    file = tmp_path / "relayd.toml"
    file.write_text("max_limit = 400")
    with running(RelayProcess(tmp_path, arguments=("--config", str(file), "--workers", "2"))) as relay:
        before = {worker.pid for worker in relay.workers()}
        file.write_text("max_limit = 300")
        os.kill(relay.pid, signal.SIGHUP)
        wait_until(lambda: relay.logged("workers_renewed") == 1, "the renewal", 90)
        assert len({worker.pid for worker in relay.workers()} - before) == 2
        assert relay.logged("worker_died") == 0
        assert relay.metric("relayd_worker_restarts_total", reason="renewed") == 2
        # The second gave way when the first one's successor served.
        events = re.findall(r'"event": ?"(draining|worker_renewed)"', relay.log.read_text())
        assert events == ["draining", "worker_renewed"] * 2
        _, _, manifest = relay.get("/.well-known/strata-relay.json")
        assert json.loads(manifest)["limits"]["max_limit"] == 300


@pytest.mark.req("R-192")
async def test_of_what_is_read_before_a_wave_closes_all_that_is_answered_is_stored_and_in_order(
    tmp_path: Path,
):
    """A publisher whose answers keep making room is no longer read once its wave has come, which here closes
    all. The wave waits half a second for answers: what is stored later has none, and would be sent again."""
    identity = new_identity()
    sent: list[str] = []
    accepted: list[str] = []
    async with contextlib.AsyncExitStack() as stack:
        relay = stack.enter_context(running(RelayProcess(tmp_path, drain_spread=1, max_pending_publishes=4)))
        for _ in range(60):
            await stack.enter_async_context(open_client(relay.ws))
        client = await stack.enter_async_context(open_client(relay.ws))

        async def publish() -> None:
            with contextlib.suppress(ConnectionClosed):
                for n in itertools.count():
                    packet = make(identity, n=n)
                    sent.append(packet.packet_id)
                    await client.send(publish_text(packet, packet.packet_id))

        sending = asyncio.create_task(publish())
        with pytest.raises(ConnectionClosed) as closed:
            while True:
                accepted.append((await client.receive())["packet_id"])
                if len(accepted) == 100:
                    relay.terminate()
        # What a peer goes on sending may reset the connection, and the close frame be lost with it.
        assert closed.value.rcvd is None or closed.value.rcvd.code == 1001
        await sending
        assert relay.wait() == 0
        relay.start()
        stored = ids_of(await ids_at(relay, [identity.did]))
    assert len(accepted) >= 100 and stored[: len(accepted)] == accepted
    assert stored == sent[: len(stored)]


async def test_a_stopping_relay_closes_a_crowd_in_waves_and_serves_the_rest_meanwhile(tmp_path: Path):
    async with contextlib.AsyncExitStack() as stack:
        relay = stack.enter_context(running(RelayProcess(tmp_path, drain_spread=4)))
        clients = [await stack.enter_async_context(open_client(relay.ws)) for _ in range(120)]
        relay.terminate()
        wait_until(lambda: relay.logged("draining") == 1, "the drain")
        status, _, body = relay.get("/readyz")
        assert (status, b"draining" in body) == (503, True)
        # A client whose turn has not come is served: some wave is the last.
        answers = await asyncio.gather(
            *(client.publish(make(new_identity())) for client in clients), return_exceptions=True
        )
        assert any(isinstance(answer, dict) and answer["type"] == "OK" for answer in answers)
        for client in clients:
            await client.socket.wait_closed()
            assert (client.socket.close_code, client.socket.close_reason) == (
                1001, "the relay is going away; resume by cursor",
            )  # fmt: skip
        assert relay.wait() == 0
