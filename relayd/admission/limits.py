"""The limits of what may be published."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from strata.protocol.packets import Packet

from relayd.config import Settings

__all__ = ["AdmissionLimits"]


@dataclass(frozen=True, slots=True)
class AdmissionLimits:
    """The limits; the names are those of the settings."""

    max_packet_bytes: int
    max_json_depth: int
    max_packet_age_seconds: int
    max_json_values: int = 32_768
    max_identity_bytes: int = 16_384
    publish_queue_bytes: int = 64 * 2**20

    @classmethod
    def from_settings(cls, settings: Settings) -> Self:
        """The limits of these settings."""
        return cls(
            max_packet_bytes=settings.max_packet_bytes,
            max_json_depth=settings.max_json_depth,
            max_json_values=settings.max_json_values,
            max_identity_bytes=settings.max_identity_bytes,
            max_packet_age_seconds=settings.max_packet_age_seconds,
            publish_queue_bytes=settings.publish_queue_bytes,
        )

    def parse(self, raw: bytes) -> Packet:
        """Read a packet that is neither too large nor too deep. Raises `InvalidPacket`."""
        return Packet.parse(
            raw,
            max_bytes=self.max_packet_bytes,
            max_depth=self.max_json_depth,
            max_values=self.max_json_values,
        )
