"""Whether the relay is still there, and whether the program looked: no I/O, no clock.

Silence means something only while the program looks. It looks at every step, and asks for one at least every
`LOOK_SECONDS`. A step that comes much later than that ends a *pause*: the program was stopped, or busy with
something else, and what the relay has sent lies in the socket. The owner then moves every deadline that
judges the relay by the length of the pause, before anything is judged. While a machine sleeps the monotonic
clock may stand still, so a wall clock that has gone further is a sign of a pause too.

An idle connection is pinged every `ping_interval` and given up after `ping_timeout` (R-130). After a long
pause, and if a request has been waiting for some seconds in which nothing came at all, the ping goes out at
once, and its answer is expected soon. Other bytes only give it time: they may have come before the pause.
"""

# Core: no I/O, no clock, no randomness (held by tests/test_layout.py).

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Final

from strata.relays.connection.options import Options
from strata.relays.peer_timeout import LATE_SECONDS, LOOK_SECONDS, READ_SECONDS

__all__ = ["AWAY_SECONDS", "PROBE_SECONDS", "SILENT_SECONDS", "RelayLiveness"]

AWAY_SECONDS: Final = 5.0
"""A pause of this length is a reason to doubt that the connection still exists."""
SILENT_SECONDS: Final = 2.0
"""For so long nothing came while a request waited: another reason."""
PROBE_SECONDS: Final = 3.0
"""How long the answer to a ping may take that goes out because of a doubt."""
_SLOWEST_BYTES: Final = 65_536
"""Bytes per second of the slowest line on which requests ahead of a ping do not count as silence."""
_SLOWEST_BYTES_OF_ONE: Final = 8192
"""The same for the largest request: nothing comes until all of it is there."""
_LONGEST_SENDING: Final = 30.0
"""The most seconds that the largest request has for its way: what a publish has by default."""


class RelayLiveness:
    """Judges one relay over all connections. While there is none, only pauses are noted.

    Before each step the owner calls `heard`, with the time at which bytes last came, and `look`. It sends a
    ping when it `wants_ping`, calls `pinged` once that was sent and `answered` when the pong to the last ping
    has come, and drops a connection that `is_gone`.
    """

    def __init__(self, options: Options) -> None:
        self.wake_at = math.inf
        """When to call `handle_timer`; infinity before the first `look`."""
        self.wants_ping = self.is_gone = False
        self._interval = math.inf if options.ping_interval is None else options.ping_interval
        self._timeout = math.inf if options.ping_timeout is None else options.ping_timeout
        self._patience = PROBE_SECONDS
        self._connected = self._has_ended = False
        self._looked_at: float | None = None
        self._unix_at = 0.0
        self._resumed_at = -math.inf
        self._heard_at = self._quiet_at = -math.inf
        self._ping_at = self._ends_at = math.inf
        self._ping_timeout = math.inf
        """How long nothing may come after the ping that is under way."""
        self._is_probing = False

    def look(self, now: float, unix_now: float) -> tuple[float, bool]:
        """Note that the program looks. After a pause, returns by how much to move the deadlines, and whether
        the program was away for long."""
        if self._has_ended:
            return 0.0, False
        last, unix_last = self._looked_at, self._unix_at
        self._looked_at, self._unix_at = now, unix_now
        if last is None:
            self.wake_at = now
            return 0.0, False
        passed = now - last
        is_away = max(passed, unix_now - unix_last) >= AWAY_SECONDS + LOOK_SECONDS
        if is_away:
            self._patience = PROBE_SECONDS
            self.probe()
        if passed <= LOOK_SECONDS + LATE_SECONDS:
            return 0.0, is_away
        # A program that pauses again as soon as it goes on must not put a deadline off for ever.
        calm = min((last - self._resumed_at) / LOOK_SECONDS, 1.0)
        by = passed - LOOK_SECONDS + calm * (LOOK_SECONDS + READ_SECONDS)
        self._resumed_at = now
        self._ends_at += by
        self._quiet_at += by
        return by, is_away

    def end(self) -> None:
        """Ask for no further look."""
        self.connection_lost()
        self._has_ended = True
        self.wake_at = math.inf

    def connection_made(self, now: float) -> None:
        """Note a new connection."""
        self._connected = True
        self._heard_at = self._quiet_at = now
        self._ping_at = now + self._interval
        if self._looked_at is not None:
            self.wake_at = min(self.wake_at, self._ping_at)

    def connection_lost(self) -> None:
        """Note the end of the connection."""
        self._connected = self.wants_ping = self.is_gone = self._is_probing = False
        self._ping_at = self._ends_at = math.inf

    def heard(self, at: float) -> None:
        """Note that bytes came from the relay at this time, now or before."""
        if at > self._heard_at:
            self._heard_at = at
            if self._ends_at != math.inf:
                self._ends_at = max(self._ends_at, at + self._ping_timeout)

    def answered(self) -> None:
        """Note that the relay has answered the last ping."""
        self._is_probing = False
        self._ends_at = math.inf
        self._patience = PROBE_SECONDS

    def probe(self) -> None:
        """Doubt the connection: ping at once, and expect an answer soon."""
        if self._connected and not self._is_probing:
            self._is_probing = self.wants_ping = True
            self._ends_at = math.inf

    def pinged(self, now: float, ahead: Sequence[int]) -> None:
        """Note that the ping has been sent, after requests of these sizes that have no answer yet."""
        self.wants_ping = False
        if self._connected:
            largest = min(max(ahead, default=0) / _SLOWEST_BYTES_OF_ONE, _LONGEST_SENDING)
            patience = self._patience + max(sum(ahead) / _SLOWEST_BYTES, largest)
            self._ping_timeout = min(patience, self._timeout) if self._is_probing else self._timeout
            self._ends_at = now + self._ping_timeout
            self.wake_at = min(self.wake_at, self._ends_at)

    def handle_timer(self, now: float, *, awaits: Callable[[], bool], listens: bool) -> None:
        """Ping, or give the connection up, if that is due. `awaits` tells whether a request waits for an
        answer, `listens` whether bytes from the relay would be read."""
        if now < self.wake_at:
            return
        if not listens:
            self._quiet_at, self._ends_at = now, max(self._ends_at, now + LOOK_SECONDS)
        if now >= self._ends_at:
            self._ends_at = math.inf
            self.is_gone = True
            self._patience *= 2  # it may be too busy to read a ping: do not come back ever so often
        elif now >= self._ping_at:
            self._ping_at = now + self._interval
            self.wants_ping |= self._ends_at == math.inf
        if not awaits():
            self._quiet_at = now
        elif now - max(self._quiet_at, self._heard_at) >= SILENT_SECONDS:
            self.probe()
        self.wake_at = min(now + LOOK_SECONDS, self._ends_at, self._ping_at)
