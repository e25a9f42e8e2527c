"""Whether a log is the one that a lake was archived from."""

from __future__ import annotations

from typing import TYPE_CHECKING

from strata_pipeline.errors import LogError
from strata_pipeline.lake.batches import Batch
from strata_pipeline.lake.places import AnyLake
from strata_pipeline.log.database import id_at, log_state, sequence_of

if TYPE_CHECKING:
    from adbc_driver_postgresql import dbapi as adbc

__all__ = ["check_same_log"]


def check_same_log(lake: AnyLake, connection: adbc.Connection) -> None:
    """Raise `LogError` if a log is not that of a lake: the last packet distinguishes them.

    The lake's last row may be a damaged one, with an id that no log knows. The log has it at its place; if
    the log was repaired since, the last sound packet of the lake is compared instead.
    """
    last = next(lake.chain.backwards(), None)
    if last is None:
        return
    place = last.up_to, bytes.fromhex(last.last_packet_id)
    if id_at(connection, place[0]) == place[1]:
        return
    if last.quarantined:
        sound = _last_packet(lake)
        if sound is None or id_at(connection, sound[0]) == sound[1]:
            return
        place = sound
    sequence, packet_id = place[0], place[1].hex()
    found = sequence_of(connection, place[1])
    if found is not None and found != sequence:
        raise LogError(
            f"packet 0x{packet_id} is the lake's last at {sequence}, and at {found} in this log: "
            "this is the log of another relay, and belongs to another lake"
        )
    if found is None and log_state(connection).removed_to <= sequence:
        raise LogError(
            f"the log does not know the lake's last packet, 0x{packet_id}: this is the log of "
            "another relay, and belongs to another lake"
        )


def _last_packet(lake: AnyLake) -> tuple[int, bytes] | None:
    """The place and id of the last row that was not quarantined; None in a lake without such rows."""
    for manifest in lake.chain.backwards():
        if manifest.packets:
            with lake.at_hand([manifest]) as layout:
                rows = Batch.read(layout, manifest).packets
            return rows["sequence"][-1].as_py(), rows["packet_id"][-1].as_py()
    return None
