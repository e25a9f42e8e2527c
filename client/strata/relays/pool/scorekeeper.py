"""A pool's scores of its relays, kept across sessions: `reputation`, its file, and the latest scores."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from pathlib import Path

from strata.relays.conduct import WINDOW_SECONDS, Aspect, Saved, Score, Standing
from strata.relays.connection.dialing import shown
from strata.relays.pool.reputation import Observation, Reputation
from strata.relays.pool.score_file import ScoreFile, ScoreLog
from strata.relays.pool.values import RelayView

__all__ = ["Scorekeeper"]

_log = logging.getLogger("strata.pool")


class Scorekeeper:
    """Records every observation, judges on request, and writes both to the file, if there is one."""

    def __init__(self, wall: Callable[[], float]) -> None:
        self._wall = wall
        self._reputation = Reputation()
        self._scores: dict[str, Score] = {}
        """Scores since the last `judge`, cached because they are read more often than they change."""
        self._log: ScoreLog | None = None

    async def load(self, path: Path, urls: Callable[[], Iterable[str]]) -> list[str]:
        """Load a file (R-340) and return the relays it knows. `urls` returns the relays to write.

        Raises `OSError` for a file that cannot be used.
        """

        def read() -> tuple[ScoreFile, list[tuple[str, Saved]], list[Observation]]:
            file = ScoreFile(path)
            try:
                since = self._wall() - WINDOW_SECONDS
                return file, [(one.url, one.saved) for one in file.relays()], file.observations(since)
            except BaseException:
                file.close()
                raise

        def scores() -> list[tuple[str, Saved, Score]]:
            now = self._wall()
            return [(url, self._reputation.saved(url), self._reputation.score(url, now)) for url in urls()]

        file, known, observations = await asyncio.to_thread(read)
        of_relay: dict[str, list[Observation]] = {}
        for observation in observations:
            of_relay.setdefault(observation.url, []).append(observation)
        for url, saved in known:
            self._reputation.restore(url, saved, of_relay.pop(url, ()))
        for others in of_relay.values():  # relays without a row in `relay_scores`
            for observation in others:
                self._reputation.record(observation)
        self._log = ScoreLog(file, scores=scores, wall=self._wall)
        return [url for url, _ in known]

    async def run(self) -> None:
        """Write periodically until cancelled, if there is a file."""
        if self._log is not None:
            await self._log.run()

    def close(self) -> None:
        """Close the file unless `run` has begun, which closes it itself. Idempotent."""
        if self._log is not None:
            self._log.close()

    @property
    def lost(self) -> int:
        """The number of observations that could not be written."""
        return 0 if self._log is None else self._log.lost

    def observe(self, url: str, kind: Aspect, good: int, bad: int, value: float | None) -> None:
        """Record an observation of a relay."""
        observation = Observation(url, self._wall(), kind, good, bad, value)
        self._reputation.record(observation)
        if self._log is not None:
            self._log.put(observation)

    def judge(self, urls: Iterable[str]) -> int:
        """Update the standing of every relay; return how many were blacklisted."""
        self._scores.clear()
        blacklisted = 0
        for url in urls:
            standing = self._reputation.judge(url, self._wall())
            if standing is None:
                continue
            _log.info("%s is %s now", shown(url), standing.value)
            blacklisted += standing is Standing.BLACKLISTED
            if self._log is not None:
                self._log.hurry()
        return blacklisted

    def standing(self, url: str) -> Standing:
        """The standing as last judged."""
        return self._reputation.standing(url)

    def score(self, url: str) -> float:
        """The score as of the last `judge`."""
        score = self._scores.get(url)
        if score is None:
            score = self._scores[url] = self._reputation.score(url, self._wall())
        return score.value

    def forget(self, url: str) -> None:
        """Forget everything known about a relay, in the file too."""
        self._reputation.forget(url)
        self._scores.pop(url, None)
        if self._log is not None:
            self._log.forget(url)

    def view(self, url: str, *, connected: bool) -> RelayView:
        """What is known about a relay now."""
        score, saved = self._reputation.score(url, self._wall()), self._reputation.saved(url)
        return RelayView(
            url,
            saved.standing,
            score.value,
            connected,
            score.latency,
            score.throughput,
            score.uptime,
            saved.last_seen_at,
            saved.blacklisted_until if saved.standing is Standing.BLACKLISTED else None,
        )
