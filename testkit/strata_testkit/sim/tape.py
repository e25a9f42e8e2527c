"""A long conversation recorded before the world began, for worlds in which somebody was away.

Making a message costs as much as receiving one, and each world would have to make a hundred thousand of them.
So all worlds of a process use the same recording from its beginning, as far as they need it. Its speakers are
not participants of any world: they have said what they said, and are gone.

The recording is a conversation of several people. They do not always know the last messages when they speak,
so its histories branch, and a history of two entries leaves some messages that nobody names.
"""

from __future__ import annotations

import hashlib
import random
from dataclasses import dataclass
from functools import lru_cache

from strata.channels.messaging.values import NodeMessageReceived, ReceivedEnvelope
from strata.channels.sds import BloomParameters, HistoryEntry, SdsMessage
from strata.channels.sds.bloom import RollingFilter
from strata.channels.sds.messages import message_id
from strata.channels.segmentation.messages import Segment, encode_segment, message_hash

from strata_testkit.sim.network import EPOCH

__all__ = ["Tape", "TapeEntry", "tape"]

_SPEAKERS = 6
_MOST_UNSEEN = 3
"""The most of the last messages that a speaker may not know yet."""


@dataclass(frozen=True, slots=True)
class TapeEntry:
    """One message of the recording."""

    at: float
    """The virtual second at which it was said."""
    sender_id: str
    request_id: str
    payload: bytes
    message_id: str
    lamport: int
    follows: tuple[str, ...]
    event: NodeMessageReceived


class Tape:
    """A recording that begins at the virtual second `begins_at`, and is made as far as it is needed."""

    def __init__(self, channel_id: str, topic: str, parameters: BloomParameters, begins_at: float) -> None:
        self._channel_id = channel_id
        self._topic = topic
        self._filter = RollingFilter(parameters)
        self._in_filter = 0
        self._rng = random.Random("a recorded conversation")
        self._entries: list[TapeEntry] = []
        self._now = begins_at

    def first(self, count: int) -> list[TapeEntry]:
        """The first `count` messages of the recording."""
        while len(self._entries) < count:
            self._record()
        return self._entries[:count]

    def _record(self) -> None:
        rng, number = self._rng, len(self._entries)
        self._now += rng.uniform(0.1, 1.9)
        speaker = f"g{rng.randrange(_SPEAKERS)}"
        known = self._entries[: self._known_to(speaker)][-2:] if number else []
        while self._in_filter < number - _MOST_UNSEEN:
            self._filter.insert(self._entries[self._in_filter].message_id)
            self._in_filter += 1
        payload = b"recorded %d" % number
        request_id = f"{number:032x}"
        wall = EPOCH + self._now
        message = SdsMessage(
            speaker,
            message_id(speaker, int(wall * 1e9), payload),
            self._channel_id,
            int(wall * 1000),
            tuple(HistoryEntry(each.message_id, each.event.message_hash, each.sender_id) for each in known),
            self._filter.to_bytes(),
            content=encode_segment(
                Segment(
                    entire_message_hash=message_hash(payload),
                    data_segment_count=1,
                    payload=payload,
                    request_id=request_id,
                )
            ),
        )
        data = message.encode()
        envelope = ReceivedEnvelope(
            content_topic=self._topic, payload=data, author=speaker, timestamp=int(wall)
        )
        event = NodeMessageReceived(hashlib.sha256(data).digest(), envelope)
        follows = tuple(message.history_ids)
        self._entries.append(
            TapeEntry(
                self._now, speaker, request_id, payload, message.message_id, int(wall * 1000), follows, event
            )
        )

    def _known_to(self, speaker: str) -> int:
        """How many of the first messages the speaker knows now; its own are always among them."""
        number = len(self._entries)
        unseen = self._rng.choice((0, 0, 0, 0, 1, 2, _MOST_UNSEEN))
        while unseen and any(each.sender_id == speaker for each in self._entries[number - unseen :]):
            unseen -= 1
        return max(0, number - unseen)


@lru_cache(maxsize=2)
def tape(channel_id: str, topic: str, bloom_filter_size: int, error_rate: float, begins_at: float) -> Tape:
    """The recording for a channel, the same one for every world of this process."""
    return Tape(channel_id, topic, BloomParameters(bloom_filter_size, error_rate), begins_at)
