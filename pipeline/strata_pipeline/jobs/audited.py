"""What an audit has found."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from strata_pipeline.lake.faults import About, Fault

__all__ = ["LISTED", "Audited", "Finding", "add_faults", "from_fault"]

LISTED = 1000
"""At most this many findings of a kind are listed."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One fault that an audit found."""

    about: About
    """`batch`, `row`, `packet`, `erasure`, `log`, `folder`, or `file`."""
    reason: str
    sequence: int | None = None
    packet_id: str | None = None
    detail: str | None = None
    file: str | None = None
    row: int | None = None
    """The number of the row in its file, from 0."""


@dataclass(slots=True)
class Audited:
    """The result of an audit."""

    batches: int = 0
    packets: int = 0
    quarantined: int = 0
    erased: int = 0
    """Rows that were erased from the lake since they were archived; they count as quarantined."""
    erased_by: dict[str, int] = field(default_factory=dict)
    """How many tombstones of these each relay has signed, by its DID."""
    left_behind: int = 0
    """In a bucket: objects that interrupted writers have left, or that were replaced and not deleted yet; no
    part of the lake, and no fault."""
    after: int = 0
    """The sequence behind which this audit has read; 0 for a whole one."""
    reached: int = 0
    tip: str = ""
    """The hash of the lake's last manifest: where all of it holds, the next audit can begin there."""
    compared_up_to: int | None = None
    """The sequence up to which lake and log were compared; None without a log."""
    behind: int = 0
    """Packets that the log had beyond the lake when the audit began."""
    counts: dict[str, int] = field(default_factory=dict)
    """The number of findings by `about: reason`."""
    findings: list[Finding] = field(default_factory=list)

    @property
    def holds(self) -> bool:
        """Whether there is no finding."""
        return not self.counts

    def found(self, counts: Counter[str], listed: list[Finding]) -> None:
        """Add findings; of those in `listed` as many as may be listed of their kind."""
        free = {name: LISTED - self.counts.get(name, 0) for name in counts}
        for name, count in counts.items():
            self.counts[name] = self.counts.get(name, 0) + count
        for one in listed:
            free[f"{one.about}: {one.reason}"] -= 1
            if free[f"{one.about}: {one.reason}"] >= 0:
                self.findings.append(one)


def add_faults(faults: list[Fault], audited: Audited) -> None:
    """Add faults of files, folders and rows, and count them."""
    found = [from_fault(fault) for fault in faults]
    audited.found(Counter(f"{one.about}: {one.reason}" for one in found), found)


def from_fault(fault: Fault) -> Finding:
    """A fault as an audit tells it."""
    told = None if fault.packet_id is None else f"0x{fault.packet_id.hex()}"
    return Finding(fault.about, fault.reason, fault.sequence, told, fault.detail, fault.file, fault.row)
