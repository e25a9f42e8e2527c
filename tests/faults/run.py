"""One run: load, faults, quiet, and the verdict of the judge."""

from __future__ import annotations

import asyncio
import json
import tempfile
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from tests.faults.ledger import Ledger
from tests.faults.load import Load
from tests.faults.scene import Scene
from tests.faults.schedule import KINDS, Fault, draw
from tests.support.relay_process import RelayFailed

__all__ = ["Report", "run"]

QUIET = 180.0
_METRICS = (
    "relayd_connections",
    "relayd_subscriptions",
    "relayd_subscriptions_behind",
    "relayd_publish_queue",
)
_OPERATIONS = ("publish", "event", "page walk", "get by id", "auth", "reader")


@dataclass
class Report:
    """What happened in a run, and which promises were broken."""

    seed: int
    seconds: float
    kinds: tuple[str, ...]
    fired: dict[str, int] = field(default_factory=dict)
    checked: dict[str, int] = field(default_factory=dict)
    refused: dict[str, int] = field(default_factory=dict)
    disk_hits: int = 0
    lost: int = 0
    """Acknowledged packets that no backup held."""
    broken: list[str] = field(default_factory=list)

    @property
    def is_good(self) -> bool:
        """Whether nothing was broken, every kind of fault took place and every kind of check was made."""
        return not self.broken and not self.idle

    @property
    def idle(self) -> list[str]:
        """Faults that never occurred, and checks that were never made: with any, a run proves too little."""
        operations = [name for name in _OPERATIONS if not self.checked.get(name)]
        return [*(kind for kind in self.kinds if not self.fired.get(kind)), *operations]

    def as_json(self) -> str:
        """The report in one line, for programs."""
        return json.dumps({**vars(self), "idle": self.idle, "good": self.is_good})


async def run(
    seed: int,
    seconds: float,
    *,
    kinds: tuple[str, ...] = tuple(KINDS),
    folder: Path | None = None,
    progress: Callable[[str], None] = lambda _: None,
) -> Report:
    """Run a relay for `seconds` under the faults of `seed`, let it become quiet, and judge.

    The relay's files are in `folder` and stay there; without a folder they are deleted.
    """
    if folder is None:
        with tempfile.TemporaryDirectory(prefix="relayd-faults-") as temporary:
            return await run(seed, seconds, kinds=kinds, folder=Path(temporary), progress=progress)
    tracks = draw(seed, seconds, kinds)
    count = sum(map(len, tracks.values()))
    ledger = Ledger()
    async with Scene(folder, ledger, seed=seed) as scene:

        def told(fault: Fault) -> None:
            progress(f"{sum(scene.fired.values()):4}/{count} {fault.kind:16} {len(ledger.acknowledged)} OK")

        load = Load(scene.network.url, scene.relay.http, ledger, seed=seed)
        load.start()
        try:
            await scene.run(tracks.values(), seconds, told)
        except* RelayFailed as failed:
            ledger.breaks("the relay failed", failed.exceptions[0])
        except* Exception as failed:  # what was seen until then is reported all the same
            ledger.breaks("a fault could not be made", "".join(traceback.format_exception(failed)))
        if scene.relay.is_running():
            progress("quiet")
            await load.stop(QUIET)
        await _nothing_left(scene, ledger)
        hits = scene.disk.hits
    return Report(
        seed,
        seconds,
        kinds,
        dict(scene.fired),
        dict(ledger.checked),
        dict(ledger.refused),
        hits,
        ledger.lost,
        ledger.broken,
    )


async def _nothing_left(scene: Scene, ledger: Ledger) -> None:
    """All clients have gone: the relay must hold nothing for them, and must not have failed by itself."""
    if not scene.relay.is_running():
        ledger.breaks("the relay has ended", scene.relay.last_words(5))
        return
    left: dict[str, float] = {}
    for _ in range(100):
        left = {name: value for name in _METRICS if (value := await _metric(scene, name))}
        if not left and not scene.network.connections:
            break
        await asyncio.sleep(0.1)
    if left:
        ledger.breaks("the relay holds something for nobody", left)
    log = scene.relay.log.read_text(errors="replace").splitlines()
    for line in [line for line in log if "Traceback" in line][:3]:
        ledger.breaks("the log shows an accident", line[:2000])
    try:
        exit_code = await asyncio.to_thread(scene.relay.stop)
    except RelayFailed as failed:
        ledger.breaks("the relay failed", failed)
        return
    if exit_code:
        ledger.breaks("the relay did not stop cleanly", exit_code)


async def _metric(scene: Scene, name: str) -> float:
    return await asyncio.to_thread(scene.relay.metric, name)
