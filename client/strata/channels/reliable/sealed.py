"""Messages that the hook cannot decrypt: the key is wrong, or they are a stranger's. An asyncio shell.

The bytes do not show which of the two it is. The mark of what was read therefore stays before the first such
message until a message of another participant is decrypted. Then some of them are tried again. If one can be
decrypted now, the key has been corrected, and everything since is read again. If none can, they do not belong
to this channel, and nothing more is done.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Awaitable, Callable

from strata.channels.reliable.catching_up import CatchingUp
from strata.channels.reliable.events import MessagesUndecryptable

__all__ = ["Sealed"]

_SAMPLES = 4
_MAX_SAMPLE_BYTES = 262_144
_TELL_AGAIN_MS = 60_000


class Sealed:
    """The messages that could not be decrypted since the last message of another participant that could."""

    def __init__(
        self,
        channel_id: str,
        catching_up: CatchingUp,
        *,
        opens: Callable[[bytes], Awaitable[bool]],
        changed: Callable[[], None],
    ) -> None:
        """`opens` tries a payload again. `changed` is called when messages must be read again."""
        self.count = 0
        self._channel_id = channel_id
        self._catching_up = catching_up
        self._opens = opens
        self._changed = changed
        self._has_opened = False
        self._since = 0
        self._told_at: int | None = None
        self._first: bytes | None = None
        self._last: deque[bytes] = deque(maxlen=_SAMPLES - 1)

    @property
    def is_blind(self) -> bool:
        """Whether there are messages, and none of them could be decrypted so far."""
        return self.count > 0 and not self._has_opened

    def note(self, payload: bytes, now_ms: int) -> MessagesUndecryptable | None:
        """A message cannot be decrypted. Returns the event to report, if one is due."""
        if not self.count:
            self._since = now_ms
            self._catching_up.hold()
        self.count += 1
        if len(payload) <= _MAX_SAMPLE_BYTES:
            if self._first is None:
                self._first = payload
            else:
                self._last.append(payload)
        if self._told_at is not None and 0 <= now_ms - self._told_at < _TELL_AGAIN_MS:
            return None
        self._told_at = now_ms
        return MessagesUndecryptable(channel_id=self._channel_id, count=self.count, since=self._since)

    async def opened(self) -> None:
        """A message of another participant has been decrypted."""
        self._has_opened = True
        if not self.count:
            return
        samples = [each for each in (self._first, *self._last) if each is not None]
        self.count, self._first = 0, None
        self._last.clear()
        for sample in samples:
            if await self._opens(sample):
                self._catching_up.read_again()
                self._changed()
                return
        self._catching_up.let_go()
