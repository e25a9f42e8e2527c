"""SDS-R: requests for missing messages, and answers, without all participants sending at once.

All times follow from hashes of ids, so participants agree without communicating (C-155…C-158, A-145).
"""

# Core: no I/O, no clock, no randomness (held by tests/test_layout.py).

from __future__ import annotations

import hashlib

from strata.channels.sds.config import SdsConfig
from strata.channels.sds.messages import HistoryEntry
from strata.channels.sds.timing import Schedule

__all__ = ["RepairBuffers", "eligible", "hash64", "request_offset", "response_groups", "response_offset"]

_PARTICIPANTS_PER_GROUP = 128


def hash64(*texts: str) -> int:
    """The first 8 bytes, big-endian, of the SHA-256 of the concatenated texts (C-155)."""
    return int.from_bytes(hashlib.sha256("".join(texts).encode()).digest()[:8])


def request_offset(own_id: str, message_id: str, t_min: int, t_max: int) -> int:
    """The milliseconds from now to `T_req` (C-156)."""
    return hash64(own_id, message_id) % (t_max - t_min) + t_min


def response_offset(own_id: str, sender_id: str, message_id: str, t_max: int) -> int:
    """The milliseconds from now to `T_resp`: 0 for the original sender (C-157)."""
    return (hash64(own_id) ^ hash64(sender_id)) * hash64(message_id) % t_max


def response_groups(expected_participants: int) -> int:
    """The number of groups that share the work of answering (C-147, A-146)."""
    return expected_participants // _PARTICIPANTS_PER_GROUP + 1


def eligible(own_id: str, sender_id: str | None, message_id: str, groups: int) -> bool:
    """Whether this participant may answer for a message of this sender (C-158, C-161)."""
    if groups == 1:
        return True
    if not sender_id:
        return False
    return hash64(own_id, message_id) % groups == hash64(sender_id, message_id) % groups


class RepairBuffers:
    """Messages to request, and messages to send again. Times are steady milliseconds."""

    def __init__(self, own_id: str, config: SdsConfig) -> None:
        self._own_id = own_id
        self._config = config
        self._groups = response_groups(config.expected_participants)
        self.requests: Schedule[HistoryEntry] = Schedule()
        """Missing messages by `T_req` (C-143)."""
        self.responses: Schedule[None] = Schedule()
        """Requested messages by `T_resp` (C-144)."""
        self._answered: Schedule[None] = Schedule()
        self._left_to_others: Schedule[None] = Schedule()

    @property
    def is_full(self) -> bool:
        """Whether no further request can be scheduled; always true without repair."""
        config = self._config
        return not config.enable_repair or len(self.requests) >= config.max_repair_buffer

    def within_reach(self, at: int, now: int) -> int:
        """A time of an earlier run, or the latest one possible now: the clock may have been set back."""
        return min(at, now + self._config.repair_t_max_ms)

    def want(self, entry: HistoryEntry, now: int) -> bool:
        """Schedule a request for a missing message at `T_req` (C-152); False if this changes nothing."""
        if self.is_full or self._is_asked(entry.message_id):
            return False
        self._schedule(entry, now)
        return True

    def take_requests(self, now: int) -> tuple[HistoryEntry, ...]:
        """The entries to put into a message, smallest `T_req` first; each gets a new one (C-148, C-150)."""
        due = self.requests.take_due(now, self._config.max_repair_requests)
        for _, entry in due:
            self._schedule(entry, now)
        return tuple([entry for _, entry in due])

    def asked_by_other(self, message_id: str, now: int) -> bool:
        """Drop our request for a message that another requests (C-153); False if there was none."""
        if not self.requests.discard(message_id):
            return False
        self._left_to_others.put(message_id, now + self._config.repair_t_max_ms, None)
        return True

    def take_unanswered(self, now: int) -> list[str]:
        """Take the requests left to others that could have been answered by now: they may be due again."""
        return [message_id for message_id, _ in self._left_to_others.take_due(now)]

    def answer(self, message_id: str, sender_id: str | None, original_sender: str, now: int) -> bool:
        """Schedule the answer to a request for a message (C-154); False if this changes nothing.

        A message that was just sent again is not sent again before any participant may request it again.
        """
        config = self._config
        self._answered.take_due(now)
        if (
            not config.enable_repair
            or message_id in self.responses
            or message_id in self._answered
            or len(self.responses) >= config.max_repair_buffer
            or not eligible(self._own_id, sender_id, message_id, self._groups)
        ):
            return False
        offset = response_offset(self._own_id, original_sender, message_id, config.repair_t_max_ms)
        self.responses.put(message_id, now + offset, None)
        return True

    def take_responses(self, now: int) -> list[str]:
        """Remove and return the ids of the messages to send again now (C-159)."""
        due = [message_id for message_id, _ in self.responses.take_due(now)]
        for message_id in due:
            if len(self._answered) < self._config.max_repair_buffer:
                self._answered.put(message_id, now + self._config.repair_t_min_ms, None)
        return due

    def received(self, message_id: str) -> bool:
        """Drop the request and the answer of a message that came (C-151); False if there was neither."""
        self._left_to_others.discard(message_id)
        asking = self.requests.discard(message_id)
        return self.responses.discard(message_id) or asking

    def _is_asked(self, message_id: str) -> bool:
        return message_id in self.requests or message_id in self._left_to_others

    def _schedule(self, entry: HistoryEntry, now: int) -> None:
        config = self._config
        offset = request_offset(
            self._own_id, entry.message_id, config.repair_t_min_ms, config.repair_t_max_ms
        )
        self.requests.put(entry.message_id, now + offset, entry)
