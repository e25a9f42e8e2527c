"""What a lake holds, wherever it lies: its chain of manifests, as `load` has read it, and what was erased."""

from __future__ import annotations

from strata.protocol.lake import Manifest, day_of

from strata_pipeline.lake.chain import Chain
from strata_pipeline.lake.erasures import Erasures
from strata_pipeline.lake.stores.records import Records

__all__ = ["LakeState"]


class LakeState:
    """A lake as its manifests tell of it."""

    def __init__(self, place: str, manifests: Records, erasures: Erasures) -> None:
        self.place = place
        """Where it is, for messages."""
        self.chain = Chain(manifests)
        """The chain, as `load` read it and a commit extends it."""
        self.erasures = erasures
        """What was erased since, as `load` read it."""

    @property
    def manifests(self) -> list[Manifest]:
        """All manifests of the chain: after years there are millions."""
        return self.chain.all()

    @property
    def reached(self) -> int:
        """The sequence up to which the lake holds the log."""
        return self.chain.end.up_to

    @property
    def tip(self) -> str:
        """The hash of the last manifest: it stands for the whole contents of the lake."""
        return self.chain.end.tip

    def load(self) -> None:
        """Read the chain, as far as opening a lake takes, and the erasures. Raises `LakeError`."""
        self.chain.load()
        self.erasures.load()

    def days(self) -> list[int]:
        """The days of which the lake has packets or quarantined rows."""
        return self.chain.days()

    def may_grow(self, day: int) -> bool:
        """Whether the chain may yet get batches of a day."""
        return day >= day_of(self.reached)

    def finished_days(self) -> list[int]:
        """The days that get no more batches: all but the last."""
        return [day for day in self.days() if not self.may_grow(day)]

    @property
    def is_half_copied(self) -> bool:
        """Whether records of erasures tell of a day that is not over: a copy has them before the batches."""
        return any(self.may_grow(record.day) for record in self.erasures.records)

    def mark_of(self, day: int) -> str:
        """What stands for the contents of a day: it has another mark when it has grown, or lost something."""
        summary = self.chain.summary_of(day)
        tip = summary.tip if summary is not None else self.chain.of_day(day)[-1].hash
        erased = [record.hash for record in self.erasures.records if record.day == day]
        return "-".join([tip, *erased[-1:]])

    def rows_of(self, day: int) -> int:
        """How many packets the lake holds of a day now."""
        if self.may_grow(day):  # records may tell of batches that are not here yet
            return sum(one.packets for one in self.erasures.told(self.chain.of_day(day)))
        return self.chain.rows_of(day) - self.erasures.erased_from(day)
