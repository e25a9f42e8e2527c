"""SDS-R: asking others for what is missing, and answering those who ask, without everybody at once.

All numbers follow from hashes of ids, so that participants agree without talking (C-155…C-158, A-145).
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
    """The first 8 bytes, big-endian, of SHA-256 over the texts joined (C-155)."""
    return int.from_bytes(hashlib.sha256("".join(texts).encode()).digest()[:8])


def request_offset(own_id: str, message_id: str, t_min: int, t_max: int) -> int:
    """Milliseconds from now to `T_req` (C-156)."""
    return hash64(own_id, message_id) % (t_max - t_min) + t_min


def response_offset(own_id: str, sender_id: str, message_id: str, t_max: int) -> int:
    """Milliseconds from now to `T_resp`: none for the original sender (C-157)."""
    return (hash64(own_id) ^ hash64(sender_id)) * hash64(message_id) % t_max


def response_groups(expected_participants: int) -> int:
    """How many groups share the work of answering (C-147, A-146)."""
    return expected_participants // _PARTICIPANTS_PER_GROUP + 1


def eligible(own_id: str, sender_id: str | None, message_id: str, groups: int) -> bool:
    """Whether a message of this sender is one's own to answer for (C-158, C-161)."""
    if groups == 1:
        return True
    if not sender_id:
        return False
    return hash64(own_id, message_id) % groups == hash64(sender_id, message_id) % groups


class RepairBuffers:
    """What to ask for, and what to answer. Times are steady milliseconds."""

    def __init__(self, own_id: str, config: SdsConfig) -> None:
        self._own_id = own_id
        self._config = config
        self._groups = response_groups(config.expected_participants)
        self.requests: Schedule[HistoryEntry] = Schedule()
        """Missing messages by `T_req` (C-143)."""
        self.responses: Schedule[None] = Schedule()
        """Requested messages by `T_resp` (C-144)."""
        self._answered: Schedule[None] = Schedule()
        self._left_to_others: Schedule[HistoryEntry] = Schedule()

    def within_reach(self, at: int, now: int) -> int:
        """A time of an earlier life, no later than it could have been set now: clocks are set back."""
        return min(at, now + self._config.repair_t_max_ms)

    def want(self, entry: HistoryEntry, now: int) -> bool:
        """Ask for a missing message when its `T_req` comes (C-152); whether that is news."""
        full = len(self.requests) >= self._config.max_repair_buffer
        if not self._config.enable_repair or full or self._is_asked(entry.message_id):
            return False
        self._schedule(entry, now)
        return True

    def take_requests(self, now: int) -> tuple[HistoryEntry, ...]:
        """The entries to put into a message, smallest `T_req` first; each gets a new one (C-148, C-150)."""
        due = self.requests.take_due(now, self._config.max_repair_requests)
        for _, entry in due:
            self._schedule(entry, now)
        return tuple([entry for _, entry in due])

    def asked_by_other(self, entry: HistoryEntry, now: int) -> bool:
        """Somebody else asks for a message: one need not oneself (C-153); whether one had meant to."""
        if not self.requests.discard(entry.message_id):
            return False
        self._left_to_others.put(entry.message_id, now + self._config.repair_t_max_ms, entry)
        return True

    def take_unanswered(self, now: int) -> list[HistoryEntry]:
        """What others asked for, and everybody could have answered by now: one may have to ask after all."""
        return [entry for _, entry in self._left_to_others.take_due(now)]

    def answer(self, message_id: str, sender_id: str | None, original_sender: str, now: int) -> bool:
        """Schedule the answer to a request for a logged message (C-154); whether that is news.

        A message just answered is not answered again before anybody may ask again.
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
        """Ids of the messages to send again now (C-159)."""
        due = [message_id for message_id, _ in self.responses.take_due(now)]
        for message_id in due:
            if len(self._answered) < self._config.max_repair_buffer:
                self._answered.put(message_id, now + self._config.repair_t_min_ms, None)
        return due

    def received(self, message_id: str) -> bool:
        """A message came: nobody need ask or answer for it (C-151); whether anybody would have."""
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
