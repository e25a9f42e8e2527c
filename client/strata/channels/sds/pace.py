"""How many take part in a channel, as far as syncs must know, and how long each one waits (decision 0051).

Each participant draws its delay by itself, and the shortest delay of all counts. So the more there are, the
longer each must wait, or syncs come ever more often. Two things tell how many there are: the senders that
were heard lately, and the syncs themselves. Of a thousand silent participants one has heard nobody, but syncs
that come too often show that there are many.

`scale` is the factor of the delay. It rises with each sync that came early and that nobody needed, and falls
with each that came late. Silence makes it fall as well: after each interval without a sync every participant
counts half as many, so a room that has emptied is not silent for long.
"""

# Core: no I/O, no clock, no randomness (held by tests/test_layout.py).

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable

__all__ = ["Pace"]

_RATE = 0.1
"""How far one sync moves the scale."""
_MIN_SCALE, _MAX_SCALE = 0.8, 4_096.0
"""Below one the scale says nothing yet: one early sync is chance."""
_HEARD_FOR_MS = 600_000
"""A sender counts for so long after its last message."""
_MAX_HEARD = 2_048


class Pace:
    """The delays of one participant. Times are steady milliseconds."""

    def __init__(self, interval: int, random: Callable[[], float]) -> None:
        self._interval = interval
        self._random = random
        self._heard: OrderedDict[str, tuple[int, int]] = OrderedDict()
        """When each other was heard last, and the Lamport time of that; longest ago first."""
        self._scale = _MIN_SCALE
        self._quiet_since: int | None = None

    def heard(self, sender_id: str, now: int, lamport: int) -> bool:
        """Another participant sent something; False for a copy, or for what came after later words."""
        _, before = self._heard.get(sender_id, (0, -1))
        self._heard[sender_id] = (now, max(before, lamport))
        self._heard.move_to_end(sender_id)
        while len(self._heard) > _MAX_HEARD or now - next(iter(self._heard.values()))[0] > _HEARD_FOR_MS:
            self._heard.popitem(last=False)
        return lamport > before

    def passed(self, now: int, *, needless: bool, own: bool = False) -> None:
        """A message went through the channel, a sync that nobody needed or something else."""
        if needless and self._interval and self._quiet_since is not None:
            self._adapt(now - self._quiet_since, own=own)
        self._quiet_since = now

    def _adapt(self, gap: int, *, own: bool) -> None:
        wanted = self._interval / 2
        step = 1 - min(gap, self._interval) / wanted
        # Whoever syncs more than its share waits longer, and the others less: else a newcomer who knows
        # nobody would speak for all, for ever.
        step += 1.0 if own else -1 / self.scale()
        scale = self._scale * math.exp(_RATE * step)
        if gap > self._interval:
            scale *= 0.5 ** (gap / self._interval - 1)
        self._scale = min(max(scale, _MIN_SCALE), _MAX_SCALE)

    def scale(self) -> float:
        """By how much the delays of a lone pair are stretched."""
        return max(1.0, self._scale, len(self._heard) / 2)

    def delay(self, factor: float) -> float:
        """A delay for the next sync; `random() × interval × factor` in a small room (C-135)."""
        scale, silence = self.scale(), 0.0
        while True:
            delay = self._random() * self._interval * factor * scale
            if delay <= self._interval * factor or scale <= 1:
                return silence + delay
            silence += self._interval * factor
            scale = max(scale / 2, 1.0)

    def within(self, grace: float, chance: float) -> float:
        """A delay up to `grace`, for a sync that one of many is to send: the more, the later nearly all are.

        Then the first few spare the others, however many there are. `chance` is a random number.
        """
        steepness = math.log(2 * self.scale() - 1)
        if steepness:
            chance = math.log(chance * math.expm1(steepness) + 1) / steepness
        return grace * (1 + chance) / 2
