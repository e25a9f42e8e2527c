"""Relays of different owners that read from each other: each has its own database and identity."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import subprocess
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from strata.protocol.ids import Identity

from relayd.config import Settings
from relayd.federation.overview import peer_rows
from tests.support.bare_client import Message, open_client
from tests.support.forks import RELAYD, run_fork
from tests.support.ports import free_port
from tests.support.relay_process import RelayProcess, environment

__all__ = [
    "Federated",
    "eventually",
    "federated",
    "holds",
    "ids_at",
    "noted",
    "peer_comes_to",
    "peer_of",
    "peers_command",
]

TIMEOUT = 90.0


class Federated:
    """Relays that are configured before they start: `links` holds pairs (reader, upstream)."""

    def __init__(
        self,
        folder: Path,
        names: Sequence[str],
        links: Iterable[tuple[str, str]],
        *,
        group: str,
        per_relay: Mapping[str, Mapping[str, Any]],
        **settings: Any,
    ) -> None:
        self.identities = {name: Identity.from_seed(bytes([n + 50]) * 32) for n, name in enumerate(names)}
        ports = {name: free_port() for name in names}
        links = list(links)
        self.relays: dict[str, RelayProcess] = {}
        for n, name in enumerate(names):
            home = folder / name
            home.mkdir(parents=True, exist_ok=True)
            upstreams = [upstream for reader, upstream in links if reader == name]
            readers = [reader for reader, upstream in links if upstream == name]
            own: dict[str, Any] = {}
            if upstreams:
                own["peers_file"] = home / "peers.toml"
                own["peers_file"].write_text(
                    "".join(self.line(each, ports[each], group) for each in upstreams)
                )
            if readers:
                own["replication_peers"] = [self.identities[reader].did for reader in readers]
            self.relays[name] = RelayProcess(
                home,
                port=ports[name],
                identity_seed=(bytes([n + 50]) * 32).hex(),
                metrics_listen="127.0.0.1:0",
                **(settings | own | dict(per_relay.get(name, {}))),
            )

    def line(self, upstream: str, port: int, group: str) -> str:
        """The entry for an upstream in `peers_file`."""
        return (
            f'[[peer]]\nurl = "ws://127.0.0.1:{port}/strata"\n'
            f'relay_id = "{self.identities[upstream].did}"\ngroup = "{group}"\n\n'
        )

    def __getitem__(self, name: str) -> RelayProcess:
        return self.relays[name]


@contextlib.contextmanager
def federated(
    folder: Path,
    names: Sequence[str],
    links: Iterable[tuple[str, str]],
    *,
    group: str = "",
    per_relay: Mapping[str, Mapping[str, Any]] | None = None,
    **settings: Any,
) -> Iterator[Federated]:
    """Started relays, killed at the end; `per_relay` has settings for single relays."""
    made = Federated(folder, names, links, group=group, per_relay=per_relay or {}, **settings)
    try:
        for relay in made.relays.values():
            relay.spawn()
        for relay in made.relays.values():
            relay.ready = relay.await_ready()
        yield made
    finally:
        for relay in made.relays.values():
            if relay.process is not None:
                relay.kill()


async def ids_at(relay: RelayProcess, authors: Sequence[str]) -> list[Message]:
    """Every stored EVENT of these authors, in the relay's order."""
    events: list[Message] = []
    async with open_client(relay.ws) as client:
        await client.send(
            {
                "type": "SUBSCRIBE",
                "subscription_id": "all",
                "gapless": True,
                "history_marker": True,
                "filters": {"authors": list(authors)},
            }
        )
        while (message := await client.receive())["type"] == "EVENT":
            events.append(message)
        assert message["type"] == "END_OF_HISTORY", message
    return events


async def holds(
    relay: RelayProcess, authors: Sequence[str], enough: Callable[[list[Message]], bool]
) -> list[Message]:
    """The relay's EVENTs of these authors, once `enough` accepts them."""
    events: list[Message] = []
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(TIMEOUT):
            while not enough(events := await ids_at(relay, authors)):  # noqa: ASYNC110 -- another process
                await asyncio.sleep(0.2)
    assert enough(events), (len(events), relay.last_words())
    return events


async def eventually(condition: Callable[[], object]) -> None:
    """Wait until a condition holds in other processes; checks are slow, so a thread makes them, not often."""
    async with asyncio.timeout(TIMEOUT):
        while not await asyncio.to_thread(condition):  # noqa: ASYNC110 -- other processes
            await asyncio.sleep(0.3)


async def peer_of(relay: RelayProcess) -> dict[str, Any]:
    """The row of `relayd peers list` for the relay's first peer, without starting a process each time."""
    settings = dataclasses.replace(
        Settings(),
        data_dir=Path(str(relay.settings["data_dir"])),
        peers_file=Path(str(relay.settings["peers_file"])),
    )
    return (await peer_rows(settings))[0]


async def peer_comes_to(relay: RelayProcess, holds: Callable[[dict[str, Any]], object]) -> dict[str, Any]:
    """Wait until this holds of the relay's first peer."""
    async with asyncio.timeout(TIMEOUT):
        while not holds(peer := await peer_of(relay)):  # noqa: ASYNC110 -- another process
            await asyncio.sleep(0.2)
    return peer


def noted(relay: RelayProcess, relay_id: str, kind: str) -> tuple[int, int]:
    """How often a peer behaved well and badly, as the operator sees it."""
    found = json.loads(peers_command(relay, "show", relay_id, "--json").stdout)["noted"]
    good, bad = found.get(kind, "0 good, 0 bad").split(", ")
    return int(good.split()[0]), int(bad.split()[0])


def peers_command(relay: RelayProcess, *arguments: str) -> subprocess.CompletedProcess[str]:
    """`relayd peers …` beside a running relay."""
    code, out, err = run_fork(RELAYD, ["peers", *arguments], env=environment(relay.settings))
    return subprocess.CompletedProcess(arguments, code, out.decode(), err.decode())
