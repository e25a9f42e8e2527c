"""Packets that wait for keys and manifests which are not in memory: read for many of them in one go."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from strata.protocol.errors import InvalidPacket

from relayd.admission.gathering import Gathering
from relayd.admission.knowledge import missing_for
from relayd.admission.refusals import FAULT, UNAVAILABLE
from relayd.admission.request import PublishRequest
from relayd.faults import Faults
from relayd.identity.directory import Identities
from relayd.store.types import StoreError

__all__ = ["Loading"]

_LOADED_TOGETHER: Final = 64
"""Packets whose keys are in memory together, whatever these weigh: each needs three chains at most."""


class Loading:
    """Loads what requests need. `go_on(request, refusal)`, which must not raise, hears when it is there, or
    why those are refused for whom it is not. `on_flush` is called after each batch."""

    def __init__(
        self,
        identities: Identities,
        *,
        go_on: Callable[[PublishRequest, InvalidPacket | None], None],
        lost: Callable[[PublishRequest, BaseException], None],
        on_flush: Callable[[], None],
        faults: Faults,
    ) -> None:
        self._identities = identities
        self._go_on = go_on
        self._lost = lost
        self._on_flush = on_flush
        self._faults = faults
        self._waiting = Gathering("keys", self._load, lost)

    def put(self, request: PublishRequest) -> None:
        """Load what this one needs. If this raises, nothing is loaded for it."""
        self._waiting.put(request)

    async def close(self) -> None:
        """Load nothing further."""
        await self._waiting.close()

    async def _load(self, requests: list[PublishRequest]) -> None:
        """What was read for a packet is there until it is used, however large it is: two chains without room
        for both would else be read in turns, for ever."""
        refusal: InvalidPacket | None = None
        for first in range(0, len(requests), _LOADED_TOGETHER):
            some = requests[first : first + _LOADED_TOGETHER]
            with self._identities.held():
                if refusal is not UNAVAILABLE:  # the others have waited for that as long
                    refusal = await self._load_for(some)
                for request in some:
                    self._go_on(request, refusal)
            self._on_flush()

    async def _load_for(self, requests: Sequence[PublishRequest]) -> InvalidPacket | None:
        """Read all that these need. Why those are refused for whom it could not be read, if it could not."""
        dids: dict[str, None] = {}
        for request in requests:
            if request.is_ended:
                continue
            try:
                dids.update(dict.fromkeys(missing_for(request.packet, self._identities)))
            except Exception as error:
                self._lost(request, error)
        try:
            await self._identities.load(dids)
        except StoreError:
            return UNAVAILABLE
        except Exception as error:
            self._faults.caught("identity", error)
            return FAULT
        return None
