"""The keys of every author, as this process knows them: the log's identity packets, applied in order.

Most authors have published nothing about themselves, and their key stands in their DID. Such an author costs
one look into a set. For the others, a `KeyChain` is read from the log when it is first needed, kept among
the most recent, and advanced by the feed: every entry of the log passes `observe` in sequence, in the step
in which it is forwarded, whichever process appended it. So the knowledge of this directory has a position,
that of the feed, and `relay_append` refuses a batch that was judged before a later identity packet arrived
(R-074).

`authors` knows by name which authors have published anything about themselves.

Nothing here asks the network (R-056): the sources are the bootstrap file, the log, and the DID itself.

Chains and manifests are immutable and change by replacement; `generation` counts the replacements. Admission
judges a packet by a chain. Later, one comparison shows whether anything has been replaced since, and a
second whether it was that chain.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Final, NamedTuple, Protocol

from strata.protocol.errors import InvalidPacket
from strata.protocol.keys import KeyChain, KeyRules
from strata.protocol.packets import Packet
from strata.protocol.provenance.manifest import CLIENT_MANIFEST

from relayd import failpoints
from relayd.faults import FaultLog
from relayd.identity.authors import DECISIVE_TYPES, Authors, LogOfAuthors
from relayd.identity.bootstrap import BootstrapContents
from relayd.identity.kept import Kept
from relayd.identity.outlines import OBJECT_BYTES, outlined, weight_of
from relayd.identity.turns import ReadingTurns
from relayd.logs import get_logger
from relayd.store.payers import NOBODY, Asker, Payer, Together
from relayd.store.types import LogEntry, StoredPacket, StoreError

__all__ = ["Identities", "LogOfIdentities"]

_log = get_logger("relayd.identity.directory")

_CHAINS_BYTES: Final = 64 * 2**20
_MANIFESTS_BYTES: Final = 16 * 2**20
_AUTHORS_PER_READ: Final = 32
"""The most chains that a single read brings into memory."""
_RESOLVED_TOGETHER: Final = 2
"""The reads at a time for those who need one chain each. More would only share the interpreter lock."""
_REMEMBERED_CHANGES: Final = 4096
_REMEMBERED_BEGINNINGS: Final = 256


class LogOfIdentities(LogOfAuthors, Protocol):
    """The part of the store that this module needs; each method may raise `StoreError`."""

    async def packets_of(
        self, authors: Sequence[str], types: Iterable[str], *, payer: Payer | None = None
    ) -> list[StoredPacket]: ...


class _Loading:
    """A read of one DID's packets under way, and what the feed has brought meanwhile.

    `asker` pays for the processor time that it takes to understand the packets.
    """

    __slots__ = ("asker", "done", "is_late", "observed")

    def __init__(self, asker: Asker) -> None:
        self.asker = asker
        self.is_late = False
        """Whether what the read finds of a manifest may have been erased since."""
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.observed: list[tuple[Packet, int]] = []

    def fail(self, error: BaseException) -> None:
        """Report the error to all who wait, unless the read has already ended."""
        if self.done.done():
            return
        # Drop its frames, which hold this object: the cycle would keep all that waits until a collection.
        error.__traceback__ = error.__context__ = error.__cause__ = None
        self.done.set_exception(error)
        self.done.exception()  # retrieved, because perhaps nobody waits any more


class _Manifest(NamedTuple):
    """The manifest of a DID that counts so far; `packet` is None if the log holds none."""

    received_at: int
    """As EVENTs report it: for a manifest that a peer brought, when the first relay received it."""
    packet: Packet | None


class _Understood(NamedTuple):
    """What the log said about one DID."""

    ids: frozenset[str]
    """The ids of all its packets."""
    chain: KeyChain
    manifest: _Manifest


class Identities:
    """Which keys may sign for which DID.

    `on_change(author, digest)` is called when the feed has brought an identity packet or a manifest of this
    author with this id, whether or not it had an effect.
    """

    def __init__(
        self,
        log: LogOfIdentities,
        bootstrap: BootstrapContents,
        rules: KeyRules,
        *,
        on_change: Callable[[str, bytes], None] = lambda author, digest: None,
        max_chain_bytes: int = _CHAINS_BYTES,
        faults: FaultLog | None = None,
    ) -> None:
        self.generation = 0
        self.rules = rules
        self._log = log
        self._bootstrap = bootstrap
        self._on_change = on_change
        self._faults = faults or FaultLog()
        # The first events of a DID often arrive together, and each is judged by how the chain began.
        self._genesis = functools.lru_cache(_REMEMBERED_BEGINNINGS)(
            functools.partial(KeyChain.genesis, rules=rules)
        )
        self._authors = Authors(log, bootstrap.names(), self._faults)
        # The generation in which each DID's chain changed last, in that order; the oldest is dropped first.
        self._changes: dict[str, int] = {}
        self._forgotten = 0
        self._chains: Kept[KeyChain] = Kept(max_chain_bytes, _weight_of_chain)
        self._manifests: Kept[_Manifest] = Kept(_MANIFESTS_BYTES, _weight_of_manifest)
        self._loading: dict[str, _Loading] = {}
        self._reads: set[asyncio.Task[None]] = set()
        self._turns = ReadingTurns(_RESOLVED_TOGETHER)

    async def open(self) -> None:
        """Begin to learn whose chains and manifests the log holds, and wait a while for the end.

        Raises `StoreError` if the log cannot be read. The feed must start no later than the end of the log
        at the time of this call. Cancelling it leaves the reading to `close`.
        """
        await self._authors.open()

    def is_plain(self, did: str) -> bool:
        """Whether the DID is known to stand for itself, with nothing published about it: the usual case."""
        return self._authors.is_plain(did)

    def chain(self, did: str) -> KeyChain | None:
        """The DID's chain as the feed has it now; None if it has to be loaded first."""
        if self.is_plain(did):
            return self._genesis(did)
        return self._chains.get(did)

    def changed_since(self, did: str, generation: int) -> bool:
        """Whether the DID's chain may have changed after this generation. True if that has been forgotten."""
        return self._changes.get(did, self._forgotten) > generation

    def manifest(self, client_id: str) -> Packet | None:
        """The newest CLIENT_MANIFEST of a DID, among those loaded (R-236)."""
        found = self._manifests.get(client_id)
        return None if found is None else found.packet

    def missing(self, dids: Iterable[str], clients: Iterable[str] = ()) -> list[str]:
        """The DIDs that have to be loaded before `chain` and `manifest` are complete."""
        return [did for did in dids if not self.is_plain(did) and did not in self._chains] + [
            did for did in clients if not self._authors.is_no_client(did) and did not in self._manifests
        ]

    async def resolve(self, did: str, asker: Asker = NOBODY, *, in_turn: bool = True) -> KeyChain:
        """The DID's chain, loaded if need be; that of an unknown DID resolves no key. Raises `StoreError`.

        Few chains are read at a time, those of who owes least first (`ReadingTurns`), or without `in_turn`
        in order of arrival. The asker pays for a read that it begins, and not for one that it waits for.
        Cancelling this does not stop a read under way: others may wait for it.
        """
        while (chain := self.chain(did)) is None:
            if did not in self._loading:
                await self._begin_in_turn(did, asker, asker.turn if in_turn else NOBODY.turn)
            else:
                await self.load({did: NOBODY})
        return chain

    async def _begin_in_turn(self, did: str, asker: Asker, place: Callable[[float], float]) -> None:
        """Start a read of this DID when it is its turn, unless another has done so meanwhile."""
        over = await self._turns.begin(place)
        try:
            if did in self._loading or self.chain(did) is not None:
                over.cancel()
                return
            self._begin({did: asker}, asker.payer)
            # The turn lasts as long as the read, even if nobody waits for it any more.
            self._loading[did].done.add_done_callback(lambda _: over.cancel())
        except BaseException:
            over.cancel()
            raise

    async def load(self, askers: Mapping[str, Asker]) -> None:
        """Read the chains and manifests of these DIDs, each for its asker, in as few reads as possible.

        The asker of a DID that nobody was reading yet pays for it, even if it no longer waits: for the
        database together with the others, and for the processor time that a thread spent on its packets. A
        long chain takes as long as two thousand publishes.

        Waits for all of them, and raises the error of the first that failed, `StoreError` or another.
        """
        fresh = [did for did in askers if did not in self._loading]
        for start in range(0, len(fresh), _AUTHORS_PER_READ):
            some = {did: askers[did] for did in fresh[start : start + _AUTHORS_PER_READ]}
            payers = [asker.payer for asker in some.values() if asker.payer is not None]
            self._begin(some, Together(payers) if payers else None)
        waiting = [self._loading[did].done for did in askers]
        if not waiting:
            return
        await asyncio.wait(waiting)
        try:
            for done in waiting:
                done.result()
        finally:
            del done, waiting  # see `_Loading.fail`

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Evict nothing meanwhile, so that everything loaded together can be used together.

        For one holder at a time, and for a short time: otherwise nothing would ever be evicted.
        """
        with self._chains.held(), self._manifests.held():
            yield

    def _begin(self, askers: Mapping[str, Asker], payer: Payer | None) -> None:
        """Start one read of these DIDs. All who wait for it are notified, whatever the outcome."""
        loading = {did: _Loading(asker) for did, asker in askers.items()}
        task = asyncio.create_task(self._read(loading, payer), name="keys")
        self._loading |= loading
        self._reads.add(task)
        task.add_done_callback(functools.partial(self._read_ended, loading))

    def _read_ended(self, loading: dict[str, _Loading], task: asyncio.Task[None]) -> None:
        self._reads.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None and not isinstance(error, StoreError):
            self._faults.caught("identity", error)
        for did, one in loading.items():
            self._forget(did, one)
            if error is None:
                one.done.cancel()  # without effect on those that are done
            else:
                one.fail(error)

    async def close(self) -> None:
        """End the reads under way; waiting callers are cancelled."""
        self._turns.close()
        for task in self._reads:
            task.cancel()
        await asyncio.gather(self._authors.close(), *self._reads, return_exceptions=True)

    def observe(self, entries: Sequence[LogEntry]) -> None:
        """Take the log's next entries, in sequence and without a gap; called by the feed. Never raises."""
        for entry in entries:
            new = entry.packet
            if new.content_type not in DECISIVE_TYPES:
                continue
            try:
                self._observe(entry)
            except Exception as error:
                self._faults.caught("identity", error)
                # The knowledge about this author may be wrong now: read it anew before it is used again.
                self._chains.drop(new.author_id)
                self._manifests.drop(new.author_id)
                if (loading := self._loading.pop(new.author_id, None)) is not None:
                    loading.fail(error)
                self._authors.add(new.author_id, new.content_type)
            self.generation += 1
            self._tell(new.author_id, new.packet_id)

    def forget_manifests(self) -> None:
        """Drop all manifests: some may have been erased, and only those still in the log count."""
        self._manifests.clear()
        for one in self._loading.values():
            one.is_late = True
            one.observed = [
                (packet, at) for packet, at in one.observed if packet.content_type != CLIENT_MANIFEST
            ]
        self.generation += 1
        self._changes.clear()
        self._forgotten = self.generation  # any verdict may rest on one of the manifests

    def _remember(self, did: str) -> None:
        self._changes.pop(did, None)
        self._changes[did] = self.generation
        if len(self._changes) > _REMEMBERED_CHANGES:
            self._forgotten = self._changes.pop(next(iter(self._changes)))

    def _observe(self, entry: LogEntry) -> None:
        if failpoints.ARMED:
            failpoints.hit("identity.observe")
        packet = entry.parsed or _parsed(entry.packet.body)
        if packet is None:
            return
        packet = outlined(packet)
        if packet.content_type == CLIENT_MANIFEST:
            self._observe_manifest(packet, entry.told_at)
        else:
            self._observe_event(packet, entry.told_at)

    def _tell(self, author: str, digest: bytes) -> None:
        try:
            self._remember(author)
        except Exception as error:
            self._forgotten = self.generation  # now every DID counts as changed
            self._faults.caught("identity", error)
        try:
            self._on_change(author, digest)
        except Exception as error:
            self._faults.caught("identity", error)

    def _observe_event(self, packet: Packet, received_at: int) -> None:
        did = packet.author_id
        chain = self.chain(did)  # before the DID counts as special: a first event needs no read
        self._authors.add(did, packet.content_type)
        if (loading := self._loading.get(did)) is not None:
            loading.observed.append((packet, received_at))
        if chain is not None:
            # Weighing the whole chain for each event would take longer than applying the event.
            self._chains.put(did, _applied(chain, packet, received_at), more=weight_of(packet))

    def _observe_manifest(self, packet: Packet, received_at: int) -> None:
        did = packet.author_id
        is_first = self._authors.is_no_client(did)
        self._authors.add(did, packet.content_type)
        if (loading := self._loading.get(did)) is not None:
            loading.observed.append((packet, received_at))
        if is_first or did in self._manifests:
            self._keep_manifest(packet, received_at)

    async def _read(self, loading: dict[str, _Loading], payer: Payer | None) -> None:
        """Read the packets of several DIDs. An error raised here goes to all who wait for one of them."""
        if failpoints.ARMED:
            await failpoints.reached("identity.read")
        rows = await self._log.packets_of(list(loading), DECISIVE_TYPES, payer=payer)
        # Reading a long chain takes as long as a hundred signatures, so it does not run on the loop.
        understood = await asyncio.to_thread(self._understand, list(loading), rows)
        for did, one in loading.items():
            self._forget(did, one)
            if one.done.done():  # it failed meanwhile
                continue
            found, seconds = understood[did]
            try:
                one.asker.checked_for(seconds)
                if isinstance(found, Exception):
                    raise found
                self._loaded(did, found, one)
            except Exception as error:  # concerns only this DID; the others are read
                self._faults.caught("identity", error)
                one.fail(error)
            else:
                one.done.set_result(None)

    def _forget(self, did: str, one: _Loading) -> None:
        """Forget a read that has ended. A later read of the same DID goes on."""
        if self._loading.get(did) is one:
            del self._loading[did]

    def _understand(
        self, dids: Sequence[str], rows: Sequence[StoredPacket]
    ) -> dict[str, tuple[_Understood | Exception, float]]:
        """What these rows say about each DID, or the error that prevented it, and the processor time that it
        took. Runs in a thread."""
        packets: dict[str, list[tuple[Packet, int]]] = {did: [] for did in dids}
        took = dict.fromkeys(dids, 0.0)
        for row in rows:
            began = time.thread_time()
            packet = _parsed(row.body)
            if packet is not None:
                packets[packet.author_id].append((outlined(packet), row.received_at))
                took[packet.author_id] += time.thread_time() - began
        understood: dict[str, tuple[_Understood | Exception, float]] = {}
        for did, packets_of_did in packets.items():
            began, found = time.thread_time(), self._tried(did, packets_of_did)
            understood[did] = found, took[did] + time.thread_time() - began
        return understood

    def _tried(self, did: str, packets: Sequence[tuple[Packet, int]]) -> _Understood | Exception:
        try:
            return self._understand_one(did, packets)
        except Exception as error:
            return error

    def _understand_one(self, did: str, packets: Sequence[tuple[Packet, int]]) -> _Understood:
        manifest = _NO_MANIFEST
        events = []
        for packet, received_at in packets:
            if packet.content_type == CLIENT_MANIFEST:
                manifest = _newer(manifest, _Manifest(received_at, packet))
            else:
                events.append((packet, received_at))
        documents, static_key = self._bootstrap.documents.get(did, ()), self._bootstrap.keys.get(did)
        chain = KeyChain.replay(did, events, documents=documents, static_key=static_key, rules=self.rules)
        return _Understood(frozenset(packet.packet_id for packet, _ in packets), chain, manifest)

    def _loaded(self, did: str, stored: _Understood, one: _Loading) -> None:
        chain, manifest = stored.chain, stored.manifest
        for packet, received_at in one.observed:
            if packet.packet_id in stored.ids:
                continue
            if packet.content_type == CLIENT_MANIFEST:
                manifest = _newer(manifest, _Manifest(received_at, packet))
            else:
                chain = _applied(chain, packet, received_at)
        if not one.is_late:  # even if there is no manifest, or it would be looked up again and again
            self._manifests.put(did, _newer(self._manifests.get(did) or _NO_MANIFEST, manifest))
        if chain.events:
            self._authors.add(did, chain.events[-1][0].content_type)
        if not self.is_plain(did):
            self._chains.put(did, chain)

    def _keep_manifest(self, packet: Packet, received_at: int) -> None:
        kept = self._manifests.get(packet.author_id) or _NO_MANIFEST
        self._manifests.put(packet.author_id, _newer(kept, _Manifest(received_at, packet)))


_NO_MANIFEST: Final = _Manifest(-1, None)


def _newer(one: _Manifest, other: _Manifest) -> _Manifest:
    """R-236: the latest manifest counts; of two in the same second, the one with the smaller id."""
    if one.packet is None or other.packet is None:
        return other if one.packet is None else one
    is_newer = (-other.received_at, other.packet.packet_id) < (-one.received_at, one.packet.packet_id)
    return other if is_newer else one


def _weight_of_chain(chain: KeyChain) -> int:
    return OBJECT_BYTES + sum(weight_of(packet) for packet, _ in chain.events)


def _weight_of_manifest(manifest: _Manifest) -> int:
    return OBJECT_BYTES if manifest.packet is None else weight_of(manifest.packet)


def _parsed(body: bytes) -> Packet | None:
    """A packet of the log. A body that is not a packet proves nothing, and must not stop the feed."""
    try:
        return Packet.read(body)
    except InvalidPacket as error:
        _log.error("log_holds_no_packet", code=error.code, detail=error.detail)
        return None


def _applied(chain: KeyChain, packet: Packet, received_at: int) -> KeyChain:
    """The chain with one more event. An invalid event changes nothing: the software of another relay, or an
    import, may have let it into the log."""
    try:
        return chain.apply(packet, received_at)
    except InvalidPacket as error:
        _log.warning("identity_packet_ignored", packet_id=packet.packet_id, code=error.code)
        return chain
