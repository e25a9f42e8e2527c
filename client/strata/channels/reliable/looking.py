"""The state of a channel for inspection: `ReliableChannel.sync_status` and related methods."""

from __future__ import annotations

from dataclasses import replace

from strata.channels.reliable.engine import ChannelEngine
from strata.channels.reliable.handover import Handover
from strata.channels.reliable.payloads import Payloads
from strata.channels.reliable.store_queries import StoreQueries
from strata.channels.reliable.values import ChannelStatistics, MissingMessage, OutstandingMessage, SyncStatus
from strata.channels.sds import Participant

__all__ = ["causal_log", "statistics", "sync_status"]


def sync_status(
    engine: ChannelEngine, queries: StoreQueries, handover: Handover, now_ms: int, *, is_blind: bool
) -> SyncStatus:
    """The value of `ReliableChannel.sync_status`. `is_blind`: no message of others can be decrypted."""
    released = engine.sds.released()
    since = engine.sds.missing_since()
    return SyncStatus(
        outstanding=tuple(
            OutstandingMessage(
                request.request_id,
                request.message_id,
                len(request.chunks),
                sum(chunk.sent for chunk in request.chunks),
                len(request.acknowledged),
                request.undelivered,
            )
            for request in engine.requests
        ),
        missing=tuple(
            MissingMessage(
                each.message_id,
                each.sender_id,
                each.retrieval_hint,
                since[each.message_id],
                each.message_id in released,
            )
            for each in engine.sds.missing()
        ),
        queued=engine.outbox.queued,
        partial_messages=engine.reassembler.statistics.partial_messages,
        inbox=len(engine.inbox) + (handover.in_hand is not None),
        rate_limit_utilization=engine.outbox.utilisation(now_ms),
        caught_up=queries.caught_up and not is_blind,
        syncing=engine.catching_up.progress(now_ms) if queries.is_reading else None,
    )


def statistics(engine: ChannelEngine, queries: StoreQueries, payloads: Payloads) -> ChannelStatistics:
    """The value of `ReliableChannel.statistics`."""
    return ChannelStatistics(
        sds=replace(engine.sds.statistics),
        reassembly=replace(engine.reassembler.statistics),
        undecryptable=payloads.undecryptable,
        undecodable=payloads.undecodable,
        senders_forged=engine.senders_forged,
        ephemerals_invalid=engine.ephemerals.invalid,
        ephemerals_repeated=engine.ephemerals.repeated,
        ephemerals_not_taken=engine.inbox.ephemerals_dropped,
        retrievals=queries.retrievals,
        retrievals_failed=queries.retrievals_failed,
    )


def causal_log(sds: Participant) -> list[tuple[str, str, int, tuple[str, ...]]]:
    """The value of `ReliableChannel.causal_log`."""
    logged = (sds.message(entry.message_id) for entry in sds.log())
    return [
        (each.message_id, each.sender_id, each.lamport_timestamp or 0, tuple(each.history_ids))
        for each in logged
        if each is not None
    ]
