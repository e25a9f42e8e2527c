"""Messages of the topic that the hook cannot open: by a wrong key, or from a stranger. An asyncio shell.

Nobody can tell the two apart by the bytes. So the mark of what was read stays before the first of them until
a message of somebody else is opened. Then some of them are tried again. If one opens now, the key was put
right, and everything since is read again. If none does, they were none of this channel, and that is all.
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
    """What could not be opened since the last message of somebody else that could."""

    def __init__(
        self,
        channel_id: str,
        catching_up: CatchingUp,
        *,
        opens: Callable[[bytes], Awaitable[bool]],
        changed: Callable[[], None],
    ) -> None:
        """`opens` tries a payload again. `changed` is called when what was read is to be read again."""
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
        """Whether there are messages, and none of them could be opened so far."""
        return self.count > 0 and not self._has_opened

    def note(self, payload: bytes, now_ms: int) -> MessagesUndecryptable | None:
        """A message cannot be opened. Returns the event to tell, if it is time for one."""
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
        """A message of somebody else has been opened."""
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
