"""The keys of every author, as this process knows them: the log's identity packets, applied in order.

Most authors have published nothing about themselves, and their key stands in their DID. Such an author costs
one look into a set. For the others a `KeyChain` is read from the log when it is first needed, kept among the
most recent, and brought forward by the feed: every entry of the log passes `observe` in sequence, in the step
in which it is forwarded, whichever process appended it. So what this directory knows has a position, the
feed's own, and `relay_append` refuses a batch that was judged behind a later identity packet (R-074).

Nothing here asks the network (R-056): the sources are the bootstrap file, the log, and the DID itself.

A chain is immutable and changes by replacement; `generation` counts the replacements. Admission has judged a
packet by a chain; one comparison tells it later whether any chain has been replaced since, and a second
whether it was that one.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

import structlog
from strata.protocol.errors import InvalidPacket
from strata.protocol.keys import IDENTITY_TYPES, KeyChain, KeyRules
from strata.protocol.packets import Packet

from relayd.identity.bootstrap import Bootstrap
from relayd.store.types import LogEntry, StoredPacket, StoreError

__all__ = ["DECISIVE_TYPES", "Identities", "LogOfIdentities"]

_log = structlog.get_logger("relayd.identity.directory")

_MANIFEST = "CLIENT_MANIFEST"
DECISIVE_TYPES = IDENTITY_TYPES | {_MANIFEST}
"""Packets by which later ones are judged."""
_CACHED_CHAINS = 16_384
_CACHED_MANIFESTS = 1024
_AUTHORS_PER_READ = 200
_REMEMBERED_CHANGES = 4096


class LogOfIdentities(Protocol):
    """The part of the store this module needs; each method may raise `StoreError`."""

    async def authors(self, types: Iterable[str]) -> set[str]: ...

    async def packets_of(self, authors: Sequence[str], types: Iterable[str]) -> list[StoredPacket]: ...


class _Loading:
    """A read of one DID's packets under way, and what the feed has brought meanwhile."""

    __slots__ = ("done", "observed")

    def __init__(self) -> None:
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.observed: list[tuple[Packet, int]] = []


class Identities:
    """Who may sign for whom. `on_change(packet)` is called when the feed has brought an identity packet."""

    def __init__(
        self,
        log: LogOfIdentities,
        bootstrap: Bootstrap,
        rules: KeyRules,
        *,
        on_change: Callable[[Packet], None] = lambda packet: None,
        max_chains: int = _CACHED_CHAINS,
    ) -> None:
        self.generation = 0
        self.rules = rules
        self._log = log
        self._bootstrap = bootstrap
        self._on_change = on_change
        self._max_chains = max_chains
        # The DIDs whose keys cannot be read from the DID alone.
        self._special: set[str] = set(bootstrap.names())
        self._publishers: set[str] = set()
        """The DIDs that have published a client manifest."""
        # In order of last use; the first goes when there is no more room.
        self._chains: dict[str, KeyChain] = {}
        self._manifests: OrderedDict[str, tuple[int, Packet]] = OrderedDict()
        # The generation in which each DID's chain changed last, in that order; the first goes.
        self._changes: dict[str, int] = {}
        self._forgotten = 0
        self._loading: dict[str, _Loading] = {}
        self._reads: set[asyncio.Task[None]] = set()

    async def open(self) -> None:
        """Learn whose chains and manifests the log holds. Raises `StoreError`.

        The feed must start no later than the log stood when this was called.
        """
        self._special |= await self._log.authors(IDENTITY_TYPES)
        self._publishers |= await self._log.authors([_MANIFEST])

    def is_plain(self, did: str) -> bool:
        """Whether all that is known of this DID stands in itself: the usual case."""
        return did not in self._special

    def chain(self, did: str) -> KeyChain | None:
        """The DID's chain as the feed has it now; None where it has to be loaded first."""
        if did not in self._special:
            return KeyChain.genesis(did, rules=self.rules)
        return self._chains.get(did)

    def changed_since(self, did: str, generation: int) -> bool:
        """Whether the DID's chain may have changed after this generation; where that is forgotten, it may."""
        return self._changes.get(did, self._forgotten) > generation

    def manifest(self, client_id: str) -> Packet | None:
        """The newest CLIENT_MANIFEST of a DID, of those loaded (R-236)."""
        found = self._manifests.get(client_id)
        return None if found is None else found[1]

    def missing(self, dids: Iterable[str], clients: Iterable[str] = ()) -> list[str]:
        """Which of these have to be loaded before `chain` and `manifest` are complete."""
        return [did for did in dids if did in self._special and did not in self._chains] + [
            did for did in clients if did in self._publishers and did not in self._manifests
        ]

    async def resolve(self, did: str) -> KeyChain:
        """The DID's chain, loaded if need be; one of an unknown DID resolves no key. Raises `StoreError`.

        Cancelling does not stop the read: others may wait for it.
        """
        while (chain := self.chain(did)) is None:
            await self.load([did])
        return chain

    async def load(self, dids: Iterable[str]) -> None:
        """Read these DIDs' chains and manifests, in as few reads as may be. Raises `StoreError`."""
        wanted = list(dict.fromkeys(dids))
        fresh = [did for did in wanted if did not in self._loading]
        for did in fresh:
            self._loading[did] = _Loading()
        waiting = [self._loading[did].done for did in wanted]
        for start in range(0, len(fresh), _AUTHORS_PER_READ):
            task = asyncio.create_task(self._read(fresh[start : start + _AUTHORS_PER_READ]), name="keys")
            self._reads.add(task)
            task.add_done_callback(self._reads.discard)
        for done in waiting:
            await asyncio.shield(done)

    async def close(self) -> None:
        """End the reads under way; who waits for one is cancelled."""
        for task in self._reads:
            task.cancel()
        await asyncio.gather(*self._reads, return_exceptions=True)

    def observe(self, entries: Sequence[LogEntry]) -> None:
        """Take the log's next entries, in sequence and without a gap; the feed calls this."""
        for entry in entries:
            if entry.packet.content_type in DECISIVE_TYPES:
                packet = _parsed(entry.packet.body)
                if packet is None:
                    continue
                if packet.content_type == _MANIFEST:
                    self._observe_manifest(packet, entry.received_at)
                else:
                    self._observe_event(packet, entry.received_at)

    def _observe_event(self, packet: Packet, received_at: int) -> None:
        did = packet.author_id
        chain = self.chain(did)  # before it counts as special: a first event needs no read
        self._special.add(did)
        if (loading := self._loading.get(did)) is not None:
            loading.observed.append((packet, received_at))
        if chain is not None:
            self._keep(did, _applied(chain, packet, received_at))
        self.generation += 1
        self._changes.pop(did, None)
        self._changes[did] = self.generation
        if len(self._changes) > _REMEMBERED_CHANGES:
            self._forgotten = self._changes.pop(next(iter(self._changes)))
        self._on_change(packet)

    def _observe_manifest(self, packet: Packet, received_at: int) -> None:
        did = packet.author_id
        is_first = did not in self._publishers
        self._publishers.add(did)
        if (loading := self._loading.get(did)) is not None:
            loading.observed.append((packet, received_at))
        if is_first or did in self._manifests:
            self._keep_manifest(packet, received_at)

    async def _read(self, dids: list[str]) -> None:
        """One read for several DIDs; every caller that waits for one of them gets the outcome."""
        loading = {did: self._loading[did] for did in dids}
        try:
            rows = await self._log.packets_of(dids, DECISIVE_TYPES)
        except StoreError as error:
            for one in loading.values():
                one.done.set_exception(error)
                one.done.exception()  # seen: perhaps no caller waits any more
            return
        except asyncio.CancelledError:
            for one in loading.values():
                one.done.cancel()
            raise
        finally:
            for did in dids:
                del self._loading[did]
        packets: dict[str, list[tuple[Packet, int]]] = {did: [] for did in dids}
        for row in rows:
            packet = _parsed(row.body)
            if packet is not None:
                packets[packet.author_id].append((packet, row.received_at))
        for did, one in loading.items():
            self._loaded(did, packets[did], one.observed)
            one.done.set_result(None)

    def _loaded(self, did: str, stored: list[tuple[Packet, int]], observed: list[tuple[Packet, int]]) -> None:
        known = {packet.packet_id for packet, _ in stored}
        both = stored + [item for item in observed if item[0].packet_id not in known]
        for packet, received_at in both:
            if packet.content_type == _MANIFEST:
                self._keep_manifest(packet, received_at)
        if did in self._special:
            events = [item for item in both if item[0].content_type in IDENTITY_TYPES]
            documents = self._bootstrap.documents.get(did, ())
            static_key = self._bootstrap.keys.get(did)
            chain = KeyChain.replay(did, events, documents=documents, static_key=static_key, rules=self.rules)
            self._keep(did, chain)

    def _keep(self, did: str, chain: KeyChain) -> None:
        chains = self._chains
        chains.pop(did, None)
        chains[did] = chain
        if len(chains) > self._max_chains:
            del chains[next(iter(chains))]

    def _keep_manifest(self, packet: Packet, received_at: int) -> None:
        """R-236: the latest counts, and of two in the same second the one with the smaller id."""
        manifests, did = self._manifests, packet.author_id
        current = manifests.get(did)
        if current is None or (-received_at, packet.packet_id) < (-current[0], current[1].packet_id):
            manifests[did] = (received_at, packet)
        manifests.move_to_end(did)
        if len(manifests) > _CACHED_MANIFESTS:
            manifests.popitem(last=False)


def _parsed(body: bytes) -> Packet | None:
    """A packet of the log. A body that is no packet proves nothing, and must not stop the feed."""
    try:
        return Packet.parse(body)
    except InvalidPacket as error:
        _log.error("log_holds_no_packet", code=error.code, detail=error.detail)
        return None


def _applied(chain: KeyChain, packet: Packet, received_at: int) -> KeyChain:
    """The chain with one event more. One that does not hold changes nothing: another relay's software, or
    an import, may have let it into the log."""
    try:
        return chain.apply(packet, received_at)
    except InvalidPacket as error:
        _log.warning("identity_packet_ignored", packet_id=packet.packet_id, code=error.code)
        return chain
