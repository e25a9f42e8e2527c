"""The estimated size of a channel, and the delay of each participant's syncs (decision 0051).

Each participant draws its delay independently, and the shortest delay counts. So the more participants there
are, the longer each must wait; otherwise syncs would become ever more frequent. Two things show how many
there are: the senders that were heard recently, and the syncs themselves. A participant among a thousand
silent ones has heard nobody, but syncs that come too often show that there are many.

`scale` is the factor of the delay. It rises with each sync that came early and that nobody needed, and falls
with each that came late. Silence makes it fall too: after each interval without a sync every participant
halves its estimate, so a room that has emptied is not silent for long.
"""

# Core: no I/O, no clock, no randomness (held by tests/test_layout.py).

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable

__all__ = ["Pace"]

_RATE = 0.1
"""How much one sync changes the scale."""
_MIN_SCALE, _MAX_SCALE = 0.8, 4_096.0
"""A scale below one has no effect yet: a single early sync may be chance."""
_HEARD_FOR_MS = 600_000
"""How long a sender counts after its last message."""
_MAX_HEARD = 2_048


class Pace:
    """The delays of one participant. Times are steady milliseconds."""

    def __init__(self, interval: int, random: Callable[[], float]) -> None:
        self._interval = interval
        self._random = random
        self._heard: OrderedDict[str, tuple[int, int]] = OrderedDict()
        """When each other sender was last heard, and its latest Lamport time; longest ago first."""
        self._scale = _MIN_SCALE
        self._quiet_since: int | None = None

    def heard(self, sender_id: str, now: int, lamport: int) -> bool:
        """Note another participant's message; False for a copy, or if a later message came before."""
        _, before = self._heard.get(sender_id, (0, -1))
        self._heard[sender_id] = (now, max(before, lamport))
        self._heard.move_to_end(sender_id)
        while len(self._heard) > _MAX_HEARD or now - next(iter(self._heard.values()))[0] > _HEARD_FOR_MS:
            self._heard.popitem(last=False)
        return lamport > before

    def passed(self, now: int, *, needless: bool, own: bool = False) -> None:
        """Note a message on the channel: a sync that nobody needed, if `needless`, or another message."""
        if needless and self._interval and self._quiet_since is not None:
            self._adapt(now - self._quiet_since, own=own)
        self._quiet_since = now

    def _adapt(self, gap: int, *, own: bool) -> None:
        wanted = self._interval / 2
        step = 1 - min(gap, self._interval) / wanted
        # A participant that syncs more than its share waits longer, and the others less: otherwise a newcomer
        # that knows nobody would sync for all, for ever.
        step += 1.0 if own else -1 / self.scale()
        scale = self._scale * math.exp(_RATE * step)
        if gap > self._interval:
            scale *= 0.5 ** (gap / self._interval - 1)
        self._scale = min(max(scale, _MIN_SCALE), _MAX_SCALE)

    def scale(self) -> float:
        """The factor by which delays are longer than those of two participants alone."""
        return max(1.0, self._scale, len(self._heard) / 2)

    def delay(self, factor: float) -> float:
        """The delay of the next sync; `random() × interval × factor` in a small room (C-135)."""
        scale, silence = self.scale(), 0.0
        while True:
            delay = self._random() * self._interval * factor * scale
            if delay <= self._interval * factor or scale <= 1:
                return silence + delay
            silence += self._interval * factor
            scale = max(scale / 2, 1.0)

    def within(self, grace: float, chance: float) -> float:
        """A delay up to `grace`, for a sync that one of many should send: the more, the later most of them.

        Then the first few make those of the others unnecessary. `chance` is a random number in [0, 1).
        """
        steepness = math.log(2 * self.scale() - 1)
        if steepness:
            chance = math.log(chance * math.expm1(steepness) + 1) / steepness
        return grace * (1 + chance) / 2
