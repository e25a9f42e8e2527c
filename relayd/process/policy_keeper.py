"""The policy in force in one process: settings, bans and abuse reports, applied as soon as one changes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from relayd.config import Settings
from relayd.logs import get_logger, problem_of
from relayd.moderation import Bans
from relayd.policy import BanFollower, Policy, apply_policy
from relayd.relay import RunningRelay
from relayd.sessions.registry import OpenSocket
from relayd.store.types import AbuseEntry, StoreError

__all__ = ["PolicyKeeper"]

_log = get_logger("relayd.server")


class PolicyKeeper:
    """Follows bans and abuse reports in the database; `settings` returns the current settings."""

    def __init__(self, relay: RunningRelay, settings: Callable[[], Settings]) -> None:
        self._relay = relay
        self._settings = settings
        self._abuse: list[AbuseEntry] = []
        self.rulings = BanFollower(
            relay.store.moderation,
            clock=relay.clock,
            on_change=self._ruled,
            on_close=self._close,
            faults=relay.faults,
        )

    @property
    def bans(self) -> Bans:
        """The bans in force."""
        return self.rulings.bans

    def apply(self) -> None:
        """Have everything open, and everything that arrives from now on, judged by the current knowledge."""
        apply_policy(self._relay, Policy.from_settings(self._settings(), self._abuse, self.bans))

    async def refresh(self) -> None:
        """Read the abuse table from time to time; while it cannot be read, the last reading holds."""
        while True:
            try:
                self._abuse = await self._relay.store.abuse(self._relay.clock())
            except StoreError as error:
                _log.warning("abuse_table_unread", problem=problem_of(error))
            except Exception as error:
                self._relay.faults.caught("background", error)
            else:
                self.apply()
            await asyncio.sleep(self._settings().abuse_refresh_interval)

    def _close(self, sessions: list[str]) -> None:
        registry, process, wanted = self._relay.registry, self._relay.store.roll.process, frozenset(sessions)

        def close(socket: OpenSocket) -> None:
            session = socket.described(process)
            if session is not None and session.id in wanted:
                socket.expel()

        registry.each(list(registry.sockets), close)

    def _ruled(self, erased: bool) -> None:
        if erased:
            self._relay.fanout.forget_recent()
            self._relay.tail.read_again()
            self._relay.identities.forget_manifests()
            self._relay.registry.withdraw()
        self.apply()
