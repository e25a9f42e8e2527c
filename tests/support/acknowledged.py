"""When messages of a channel were acknowledged, and by whom: recomputed after every packet."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from strata_pipeline.transforms.acknowledgements import PacketRow

__all__ = ["Acknowledged", "acknowledged"]


class Acknowledged(NamedTuple):
    """What became of a content message."""

    first: PacketRow
    """The first packet that carried it."""
    at: int | None
    """When another participant first had it; None if never."""
    by: set[str]
    """The others that had it in the end."""


def acknowledged(rows: Sequence[PacketRow]) -> dict[str, Acknowledged]:
    """Messages by id, from the packets of one channel in log order.

    A participant has the messages that its packets name, and all that these follow as far as the log has
    shown by then.
    """
    found: dict[str, Acknowledged] = {}
    carried: dict[str, PacketRow] = {}
    named: dict[str, set[str]] = {}
    for row in rows:
        if row.content_id is not None:
            carried.setdefault(row.content_id, row)
        named.setdefault(row.sender_id, set()).update(row.history)
        has = {who: _all_that_follows(names, carried) for who, names in named.items()}
        for name, first in carried.items():
            others = {who for who, there in has.items() if name in there and who != first.sender_id}
            at = found[name].at if name in found else None
            if at is None and others:
                at = max(row.received_at, first.received_at)
            found[name] = Acknowledged(first, at, others)
    return found


def _all_that_follows(names: Iterable[str], carried: Mapping[str, PacketRow]) -> set[str]:
    there: set[str] = set()
    waiting = list(names)
    while waiting:
        if (name := waiting.pop()) not in there:
            there.add(name)
            waiting += carried[name].history if name in carried else ()
    return there
