"""The packets in which a relay describes itself: a RELAY_DESCRIPTOR, and a CONFIG for its peers
(RFC-0007 §9, §10; decision 72).

All processes of a relay make the same packets, because their timestamp is the start of the current half
lifetime, or of a shorter interval: the second process to publish finds them known. Like the manifest, they
establish no trust.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from strata.protocol.errors import InvalidPacket
from strata.protocol.ids import Signer
from strata.protocol.packets import Packet, build

from relayd.admission.pipeline import Admission
from relayd.admission.request import Lane, PublishRequest
from relayd.config import Settings
from relayd.feed.profiles import PROFILES
from relayd.logs import get_logger
from relayd.store.payers import Unbilled
from relayd.version import VERSION

__all__ = ["Announcer", "announcements"]

_log = get_logger("relayd.announcing")

_RETRY_SECONDS = 60.0


def announcements(settings: Settings, signer: Signer, now: int) -> list[Packet]:
    """The packets to publish at this moment; none without `announce_seconds`."""
    lifetime = settings.announce_seconds
    if not lifetime:
        return []
    # Half a lifetime may be longer than the age that this relay accepts: then that age is the
    # interval.
    at = now - now % min(lifetime // 2, settings.max_packet_age_seconds)
    said = [_descriptor(settings, signer.did)]
    if settings.replication_peers:
        said.append(_policy(settings, signer.did))
    return [build(signer, content, timestamp=at, expires_at=at + lifetime) for content in said]


def _descriptor(settings: Settings, relay_id: str) -> dict[str, object]:
    """R-383 to R-387."""
    policy: dict[str, object] = {
        "accepts_public_packets": not settings.allowed_authors,
        "max_backfill_seconds": settings.max_backfill_seconds,
        "protected_accounts": "none",
    }
    if settings.retention_days:  # absent means forever, as in the manifest
        policy["default_retention_days"] = settings.retention_days
    return {
        "type": "RELAY_DESCRIPTOR",
        "descriptor_version": 1,
        "relay_id": relay_id,
        "ws_endpoint": settings.public_url,
        "policy": policy,
        "software": {"name": "relayd", "version": VERSION},
    }


def _policy(settings: Settings, relay_id: str) -> dict[str, object]:
    """R-382. Which relays this relay reads from, and which read from it, stays private."""
    return {
        "type": "CONFIG",
        "config_type": "REPLICATION_POLICY_V1",
        "relay_id": relay_id,
        "profiles": [
            {
                "name": name,
                "max_backfill_seconds": settings.max_backfill_seconds,
                "requires_auth": True,
                "requires_capability": "replicate",
            }
            for name in PROFILES
        ],
        "preferred_peers": [],
    }


class Announcer:
    """Publishes the relay's announcements here, as any author would, and again before they expire."""

    def __init__(
        self,
        settings: Callable[[], Settings],
        signer: Signer,
        admission: Admission,
        clock: Callable[[], int],
    ) -> None:
        self._settings = settings
        self._signer = signer
        self._admission = admission
        self._clock = clock
        self._lane = Lane(self, signer.did)
        self._answers: dict[PublishRequest, asyncio.Future[bool]] = {}
        self.payer = Unbilled()

    async def run(self) -> None:
        """Publish until cancelled. A relay that refuses its own packet logs that and continues."""
        said: set[str] = set()
        while True:
            current = announcements(self._settings(), self._signer, self._clock())
            for packet in current:
                if packet.packet_id not in said and await self._publish(packet):
                    said.add(packet.packet_id)
            said &= {packet.packet_id for packet in current}
            await asyncio.sleep(_RETRY_SECONDS)

    async def _publish(self, packet: Packet) -> bool:
        """Publish a packet. Returns whether it need not be tried again."""
        request = PublishRequest(packet.canonical, None, self._lane, time.monotonic())
        answer: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._answers[request] = answer
        try:
            self._admission.submit(request)
            return await answer
        finally:
            del self._answers[request]

    # Publisher: called by admission.

    def publish_accepted(
        self,
        request: PublishRequest,
        received_at: int,
        *,
        duplicate: bool,
        duplicate_of: bytes | None = None,
        queued: bool = False,
    ) -> None:
        """The packet is in the log."""
        self._settle(request, True)

    def publish_refused(self, request: PublishRequest, error: InvalidPacket) -> None:
        """One of this relay's own rules declines the packet, or the database is unavailable: try again
        later."""
        _log.warning("announcement_refused", problem=str(error))
        self._settle(request, False)

    def publish_unanswerable(self) -> None:
        """The outcome is unknown: try again later."""
        for request in list(self._answers):
            self._settle(request, False)

    def checked_for(self, seconds: float) -> None:
        """Charge nothing: the packets are the relay's own."""

    def turn(self, now: float) -> float:
        """The relay's own packets keep their place in order of arrival."""
        return now

    def room_again(self) -> None:
        """Nothing waits for room."""

    def _settle(self, request: PublishRequest, is_done: bool) -> None:
        answer = self._answers.get(request)
        if answer is not None and not answer.done():
            answer.set_result(is_done)
