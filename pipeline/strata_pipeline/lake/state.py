"""What a lake holds, on a disk or in a bucket: its chain of manifests and the records of its erasures."""

from __future__ import annotations

from strata.protocol.sequences import day_of

from strata_pipeline.lake.chain import Chain
from strata_pipeline.lake.erasures import Erasures
from strata_pipeline.lake.stores.records import Records
from strata_pipeline.lake.witnesses import Witnesses
from strata_pipeline.lake_format import Manifest

__all__ = ["LakeState"]


class LakeState:
    """A lake as its manifests describe it."""

    def __init__(self, place: str, manifests: Records, erasures: Erasures, witnesses: Witnesses) -> None:
        self.place = place
        """Where the lake is, for messages."""
        self.chain = Chain(manifests)
        """The chain, as `load` read it and commits have extended it."""
        self.erasures = erasures
        """The records of erasures, as `load` read them."""
        self.witnesses = witnesses
        """The files that say when other relays first received packets."""

    @property
    def manifests(self) -> list[Manifest]:
        """All manifests of the chain; after years there are millions."""
        return self.chain.all()

    @property
    def reached(self) -> int:
        """The sequence up to which the lake holds the log."""
        return self.chain.end.up_to

    @property
    def tip(self) -> str:
        """The hash of the last manifest, which stands for the whole contents of the lake."""
        return self.chain.end.tip

    def load(self) -> None:
        """Read the chain, as far as opening a lake requires, and the erasures. Raises `LakeError`."""
        self.chain.load()
        self.erasures.load()

    def days(self) -> list[int]:
        """The days for which the lake has packets or quarantined rows."""
        return self.chain.days()

    def may_grow(self, day: int) -> bool:
        """Whether the chain may still gain batches of a day."""
        return day >= day_of(self.reached)

    def finished_days(self) -> list[int]:
        """The days that gain no more batches: all but the last."""
        return [day for day in self.days() if not self.may_grow(day)]

    @property
    def is_half_copied(self) -> bool:
        """Whether there are records of erasures for a day that is not over: a copy puts them before the
        batches."""
        return any(self.may_grow(record.day) for record in self.erasures.records)

    def mark_of(self, day: int) -> str:
        """A mark that stands for the contents of a day and changes when the day grows or rows are erased."""
        summary = self.chain.summary_of(day)
        tip = summary.tip if summary is not None else self.chain.of_day(day)[-1].hash
        erased = [record.hash for record in self.erasures.of_day(day)]
        return "-".join([tip, *erased[-1:]])

    def rows_of(self, day: int) -> int:
        """The number of packets of a day that the lake holds now."""
        if self.may_grow(day):  # records may name batches that are not here yet
            return sum(one.packets for one in self.erasures.told(self.chain.of_day(day)))
        return self.chain.rows_of(day) - self.erasures.erased_from(day)
