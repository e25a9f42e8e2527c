"""The result of an audit."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from strata_pipeline.lake.faults import About, Fault

__all__ = ["LISTED", "Audited", "Finding", "add_faults", "from_fault"]

LISTED = 1000
"""The most findings of one kind that are listed."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One fault that an audit found."""

    about: About
    """`batch`, `row`, `packet`, `erasure`, `witness`, `log`, `folder`, or `file`."""
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
    """The number of rows that were erased since they were archived; they count as quarantined."""
    erased_by: dict[str, int] = field(default_factory=dict)
    """The number of tombstones of these rows that each relay has signed, by its DID."""
    left_behind: int = 0
    """In a bucket: the number of objects that interrupted writers have left, or that were replaced and not
    deleted yet. They are not part of the lake, and not faults."""
    after: int = 0
    """The sequence after which this audit has read; 0 for a complete audit."""
    reached: int = 0
    tip: str = ""
    """The hash of the lake's last manifest: if there is no finding, the next audit can begin there."""
    compared_up_to: int | None = None
    """The sequence up to which lake and log were compared; None without a log."""
    behind: int = 0
    """The number of packets that the log had beyond the lake when the two were compared."""
    counts: dict[str, int] = field(default_factory=dict)
    """The number of findings by `about: reason`."""
    findings: list[Finding] = field(default_factory=list)

    @property
    def holds(self) -> bool:
        """Whether there are no findings."""
        return not self.counts

    def found(self, counts: Counter[str], listed: list[Finding]) -> None:
        """Add the counts of findings, and those in `listed` up to the limit of their kind."""
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
    """A fault as a finding of an audit."""
    told = None if fault.packet_id is None else f"0x{fault.packet_id.hex()}"
    return Finding(fault.about, fault.reason, fault.sequence, told, fault.detail, fault.file, fault.row)
