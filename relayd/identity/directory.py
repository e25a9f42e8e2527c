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
import functools
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

import structlog
from strata.protocol.errors import InvalidPacket
from strata.protocol.keys import IDENTITY_TYPES, KeyChain, KeyRules
from strata.protocol.packets import Packet

from relayd import failpoints
from relayd.faults import Faults
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

    def fail(self, error: BaseException) -> None:
        """Tell all who wait, unless they have been told."""
        if self.done.done():
            return
        # Without its frames, which hold this: the circle would keep all that waits until a collection.
        error.__traceback__ = error.__context__ = error.__cause__ = None
        self.done.set_exception(error)
        self.done.exception()  # seen: perhaps nobody waits any more


class Identities:
    """Who may sign for whom.

    `on_change(author, digest)` is called when the feed has brought an identity packet of this author with
    this id, whatever came of it.
    """

    def __init__(
        self,
        log: LogOfIdentities,
        bootstrap: Bootstrap,
        rules: KeyRules,
        *,
        on_change: Callable[[str, bytes], None] = lambda author, digest: None,
        max_chains: int = _CACHED_CHAINS,
        faults: Faults | None = None,
    ) -> None:
        self.generation = 0
        self.rules = rules
        self._log = log
        self._bootstrap = bootstrap
        self._on_change = on_change
        self._faults = faults or Faults()
        self._max_chains = max_chains
        # The DIDs whose keys cannot be read from the DID alone.
        self._special: set[str] = set(bootstrap.names())
        self._publishers: set[str] = set()
        """The DIDs that have published a client manifest."""
        # In order of last use; the first goes when there is no more room.
        self._chains: dict[str, KeyChain] = {}
        self._manifests: OrderedDict[str, tuple[int, Packet]] = OrderedDict()
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
        """Read these DIDs' chains and manifests, in as few reads as may be.

        Waits for all of them, and raises `StoreError`, or what else the first that failed met.
        """
        wanted = list(dict.fromkeys(dids))
        fresh = [did for did in wanted if did not in self._loading]
        for start in range(0, len(fresh), _AUTHORS_PER_READ):
            self._begin(fresh[start : start + _AUTHORS_PER_READ])
        waiting = [self._loading[did].done for did in wanted]
        if not waiting:
            return
        await asyncio.wait(waiting)
        try:
            for done in waiting:
                done.result()
        finally:
            del done, waiting  # see `_Loading.fail`

    def _begin(self, dids: list[str]) -> None:
        """Start one read; whatever comes of it, who waits for it is told."""
        loading = {did: _Loading() for did in dids}
        task = asyncio.create_task(self._read(loading), name="keys")
        self._loading |= loading
        self._reads.add(task)
        task.add_done_callback(functools.partial(self._read_ended, loading))

    def _read_ended(self, loading: dict[str, _Loading], task: asyncio.Task[None]) -> None:
        self._reads.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None and not isinstance(error, StoreError):
            self._faults.caught("identity", error)
        for did, one in loading.items():
            self._loading.pop(did, None)
            if error is None:
                one.done.cancel()  # those that are done stay so
            else:
                one.fail(error)

    async def close(self) -> None:
        """End the reads under way; who waits for one is cancelled."""
        for task in self._reads:
            task.cancel()
        await asyncio.gather(*self._reads, return_exceptions=True)

    def observe(self, entries: Sequence[LogEntry]) -> None:
        """Take the log's next entries, in sequence and without a gap; the feed calls this. Never raises."""
        for entry in entries:
            new = entry.packet
            if new.content_type not in DECISIVE_TYPES:
                continue
            try:
                self._observe(entry)
            except Exception as error:
                self._faults.caught("identity", error)
                # What is known of this author may be wrong now: read it anew before anything else counts.
                self._chains.pop(new.author_id, None)
                self._manifests.pop(new.author_id, None)
                if (loading := self._loading.pop(new.author_id, None)) is not None:
                    loading.fail(error)
                (self._publishers if new.content_type == _MANIFEST else self._special).add(new.author_id)
            if new.content_type != _MANIFEST:
                self.generation += 1
                self._tell(new.author_id, new.packet_id)

    def _observe(self, entry: LogEntry) -> None:
        if failpoints.ARMED:
            failpoints.hit("identity.observe")
        packet = _parsed(entry.packet.body)
        if packet is None:
            return
        if packet.content_type == _MANIFEST:
            self._observe_manifest(packet, entry.received_at)
        else:
            self._observe_event(packet, entry.received_at)

    def _tell(self, author: str, digest: bytes) -> None:
        try:
            self._on_change(author, digest)
        except Exception as error:
            self._faults.caught("identity", error)

    def _observe_event(self, packet: Packet, received_at: int) -> None:
        did = packet.author_id
        chain = self.chain(did)  # before it counts as special: a first event needs no read
        self._special.add(did)
        if (loading := self._loading.get(did)) is not None:
            loading.observed.append((packet, received_at))
        if chain is not None:
            self._keep(did, _applied(chain, packet, received_at))

    def _observe_manifest(self, packet: Packet, received_at: int) -> None:
        did = packet.author_id
        is_first = did not in self._publishers
        self._publishers.add(did)
        if (loading := self._loading.get(did)) is not None:
            loading.observed.append((packet, received_at))
        if is_first or did in self._manifests:
            self._keep_manifest(packet, received_at)

    async def _read(self, loading: dict[str, _Loading]) -> None:
        """One read for several DIDs. What this raises goes to everybody who waits for one of them."""
        if failpoints.ARMED:
            await failpoints.reached("identity.read")
        rows = await self._log.packets_of(list(loading), DECISIVE_TYPES)
        for did in loading:
            self._loading.pop(did, None)
        packets: dict[str, list[tuple[Packet, int]]] = {did: [] for did in loading}
        for row in rows:
            packet = _parsed(row.body)
            if packet is not None:
                packets[packet.author_id].append((packet, row.received_at))
        for did, one in loading.items():
            if one.done.done():  # it failed meanwhile
                continue
            try:
                self._loaded(did, packets[did], one.observed)
            except Exception as error:  # of this one, and the others are read
                self._faults.caught("identity", error)
                one.fail(error)
            else:
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
        return Packet.read(body)
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
