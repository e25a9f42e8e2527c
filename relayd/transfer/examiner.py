"""Judges the packets of an import as admission would have judged them when they were received.

An import trusts only the order and the times of a file's lines. Which key counted at that time follows from
the earlier identity packets, so they are applied along the way. A packet's claim about its origin is checked
against the roots of this relay; what another relay found, according to the file, is not even read.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import NamedTuple, Protocol, Self

from strata.protocol.errors import InvalidPacket
from strata.protocol.keys import KeyRules
from strata.protocol.packets import Packet
from strata.protocol.provenance import ProvenanceTrust

from relayd.admission.checks import judge, require_chain_room, require_room, to_store, trace
from relayd.admission.knowledge import Known, known_of, missing_for
from relayd.admission.limits import AdmissionLimits
from relayd.config import Settings
from relayd.identity.bootstrap import BootstrapContents, key_rules, read_bootstrap, trust_of
from relayd.identity.directory import Identities, LogOfIdentities
from relayd.store.payers import NOBODY
from relayd.store.types import LogEntry, NewPacket

__all__ = ["Examiner", "ImportCandidate"]


class _Log(Protocol):
    @property
    def identities(self) -> LogOfIdentities: ...

    async def head(self) -> int: ...


class ImportCandidate(NamedTuple):
    """A packet whose form and id are valid, and when it was received, in Unix seconds."""

    packet: Packet
    received_at: int
    witness: int | None = None
    """When the first relay received it, if a peer brought it: it is judged as of then (R-370)."""

    @property
    def judged_at(self) -> int:
        """The time whose keys count."""
        return self.received_at if self.witness is None else self.witness


class Examiner:
    """The judge of one import. Call `refresh` before anything else."""

    def __init__(
        self,
        store: _Log,
        *,
        bootstrap: BootstrapContents = BootstrapContents(),  # noqa: B008 - immutable
        rules: KeyRules = KeyRules(),  # noqa: B008 - immutable
        trust: ProvenanceTrust = ProvenanceTrust(),  # noqa: B008 - immutable
        limits: AdmissionLimits | None = None,
    ) -> None:
        self._store = store
        self._bootstrap = bootstrap
        self._rules = rules
        self._trust = trust
        self.limits = limits or AdmissionLimits.from_settings(Settings())
        """How large and how deep a packet may be: a file cannot bring in what a socket may not."""
        self._identities: Identities
        self.followed = 0
        """The sequence up to which identity packets have been applied (R-074)."""

    @classmethod
    def from_settings(cls, settings: Settings, store: _Log) -> Self:
        """Use the keys, roots and limits of a relay with these settings. Raises `ConfigurationError`."""
        bootstrap = read_bootstrap(settings.bootstrap_file)
        return cls(
            store,
            bootstrap=bootstrap,
            rules=key_rules(settings, bootstrap),
            trust=trust_of(settings, bootstrap),
            limits=AdmissionLimits.from_settings(settings),
        )

    async def refresh(self) -> None:
        """Start from the identity packets that the log holds now. Raises `StoreError`."""
        head = await self._store.head()
        self._identities = Identities(self._store.identities, self._bootstrap, self._rules)
        await self._identities.open()
        self.followed = head

    async def examine(self, candidates: Sequence[ImportCandidate]) -> list[NewPacket | InvalidPacket]:
        """The row to store for each candidate, or the refusal. Raises `StoreError`.

        Only the last may be of a decisive type. Cancelling it changes nothing.
        """
        known = [await self._knowledge(candidate) for candidate in candidates]
        # Signatures are most of the work, and a thread keeps the loop free for the database.
        return await asyncio.to_thread(
            lambda: [self._examined(*pair) for pair in zip(candidates, known, strict=True)]
        )

    def observe(self, entries: Sequence[LogEntry]) -> None:
        """Apply entries that follow in the log, with no decisive packets in between."""
        self._identities.observe(entries)
        self.followed = max(self.followed, entries[-1].sequence)

    async def _knowledge(self, candidate: ImportCandidate) -> Known:
        packet, at = candidate.packet, candidate.judged_at
        plain = Known(self._identities.generation)
        with self._identities.held():  # else chains without room for both would be read by turns forever
            while (known := known_of(packet, self._identities, at, plain)) is None:
                await self._identities.load(dict.fromkeys(missing_for(packet, self._identities), NOBODY))
        return known

    def _examined(self, candidate: ImportCandidate, known: Known) -> NewPacket | InvalidPacket:
        packet, at, witness = candidate.packet, candidate.judged_at, candidate.witness
        room = self.limits.max_identity_bytes
        try:
            require_room(packet, room)
            judge(packet, known, at, ingest=witness is None)
            require_chain_room(packet, known, room)
            downgrade = trace(packet, known, self._trust, at)
        except InvalidPacket as error:
            return error
        return to_store(packet, downgrade, witness=witness)
