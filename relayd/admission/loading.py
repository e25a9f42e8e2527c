"""Packets that wait for keys and manifests not in memory: these are read for many packets at once."""

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
"""The number of packets whose keys are in memory together, of any weight: each needs at most three chains."""


class Loading:
    """Loads what requests need. `go_on(request, refusal)`, which must not raise, is called when it is
    loaded, or with the refusal if it could not be read. `on_flush` is called after each batch."""

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
        """Load what this request needs. If this raises, nothing is loaded for it."""
        self._waiting.put(request)

    async def close(self) -> None:
        """Stop loading."""
        await self._waiting.close()

    async def _load(self, requests: list[PublishRequest]) -> None:
        """What was read for a packet stays until it is used, however large: otherwise two chains that do not
        fit together would be read alternately, forever."""
        refusal: InvalidPacket | None = None
        for first in range(0, len(requests), _LOADED_TOGETHER):
            some = requests[first : first + _LOADED_TOGETHER]
            with self._identities.held():
                if refusal is not UNAVAILABLE:  # else the others have waited as long already
                    refusal = await self._load_for(some)
                for request in some:
                    self._go_on(request, refusal)
            self._on_flush()

    async def _load_for(self, requests: Sequence[PublishRequest]) -> InvalidPacket | None:
        """Read all that these requests need. Returns the refusal if it could not be read, else None."""
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
