"""An author whose key ends in an hour and is revoked after the relay's clock was wrong for a moment."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable

import strata
from strata.protocol.documents import method_id
from strata.protocol.errors import StrataError
from strata.protocol.ids import Identity
from strata.protocol.keys import add_content, revoke_content
from strata.protocol.packets import Packet, build
from websockets.exceptions import WebSocketException

from tests.faults.ledger import Ledger
from tests.support.bare_client import Message, open_client
from tests.support.made_packets import new_identity

__all__ = ["JUMPS", "SKEW", "Jumping"]

JUMPS = tuple(sign * seconds for seconds in (2 * 3600, 10 * 365 * 86_400) for sign in (1, -1))
SKEW = 300
_SLACK = 60
_HOUR = 3600
_PATIENCE = 20.0
_GONE = (OSError, EOFError, TimeoutError, WebSocketException, StrataError)
_nonces = itertools.count(1)


class _Key:
    """The second key of an author."""

    def __init__(self) -> None:
        self.author, self.key = new_identity(), new_identity()
        self.did = self.author.did
        self.name = method_id(self.did, "keys-2")

    def sign(self, message: bytes) -> bytes:
        return self.key.sign(message)


class Jumping:
    """What is published before, during and after one jump. Each step returns False if other faults prevented
    it; the relay's broken promises go to the ledger."""

    def __init__(self, url: Callable[[], str], ledger: Ledger) -> None:
        self._url = url
        self._ledger = ledger
        self._signer = _Key()
        self._restored = ledger.restored

    async def before(self) -> bool:
        """Add the key."""
        key = self._signer.key.public_key
        now = int(time.time())
        content = add_content(self._signer.name, key, valid_from=now - _SLACK, valid_until=now + _HOUR)
        return await self._is_stored(_packet(self._signer.author, content))

    async def meanwhile(self, seconds: int) -> bool:
        """Have a packet stored as of the clock that is wrong."""
        return await self._is_stored(_packet(new_identity(), {"type": "POST"}, at=seconds))

    async def after(self) -> bool:
        """Publish a packet that expires soon, read it, revoke its key, and publish with the key again."""
        brief = _packet(self._signer, {"type": "POST"}, expires_in=2 * SKEW)
        revoke = _packet(self._signer, revoke_content(self._signer.name, revoked_at=int(time.time()) - 1))
        told = await self._published(brief)
        if told is None or told["type"] != "OK":
            return self._refused(told)
        if not -_SLACK < told["received_at"] - time.time() < SKEW + _SLACK:
            self._breaks("a time far from the clock's was told", f"{told['received_at'] - time.time():.0f} s")
        if not await self._is_read(brief):
            return False
        if not await self._is_stored(revoke):
            return False
        behind = await self._published(_packet(self._signer, {"type": "POST"}))
        if behind is None:
            return False
        if behind["type"] == "OK":
            self._breaks("a revocation that was acknowledged had no effect", behind)
        elif behind["code"] != "key_revoked":  # by a worker that has not followed the log to the key itself
            return self._refused(behind)
        self._ledger.checked["jump of the clock"] += 1
        return not self._is_restored

    @property
    def _is_restored(self) -> bool:
        """Whether a backup was restored meanwhile, which may lack what was acknowledged here."""
        return self._ledger.restored != self._restored

    def _breaks(self, promise: str, *details: object) -> None:
        if not self._is_restored:
            self._ledger.breaks(promise, *details)

    def _refused(self, answer: Message | None) -> bool:
        """Of two jumps, ahead and behind, the second ends the holding of the time: a key that was added
        meanwhile is not valid at once. Then the jump counts when it is tried again, with another key."""
        if answer is not None:
            self._ledger.refused[f"after a jump: {answer['code']}"] += 1
        return False

    async def _is_stored(self, packet: Packet) -> bool:
        answer = await self._published(packet)
        return answer is not None and answer["type"] == "OK"

    async def _published(self, packet: Packet) -> Message | None:
        """The answer to a packet, published again until there is one that lasts; None without."""
        ends_at = asyncio.get_running_loop().time() + _PATIENCE
        while asyncio.get_running_loop().time() < ends_at:
            try:
                async with asyncio.timeout(_PATIENCE), open_client(self._url()) as client:
                    answer = await client.publish(packet)
            except _GONE:
                await asyncio.sleep(0.2)
                continue
            if answer.get("code") != "internal_error":
                return answer
            await asyncio.sleep(0.2)
        return None

    async def _is_read(self, packet: Packet) -> bool:
        try:
            async with asyncio.timeout(_PATIENCE), strata.connect(self._url()) as relay:
                read = relay.fetch(authors=[packet.author_id], types=["POST"])
                got = {delivery.packet.packet_id async for delivery in read}
        except _GONE:
            return False
        if packet.packet_id not in got:
            self._breaks("an acknowledged packet was dropped by a reader", packet.packet_id)
        return True


def _packet(
    signer: Identity | _Key, content: dict[str, object], *, at: int = 0, expires_in: int | None = None
) -> Packet:
    now = int(time.time()) + at
    return build(
        signer,
        content,
        timestamp=now,
        expires_at=None if expires_in is None else now + expires_in,
        nonce=f"jump {next(_nonces)}",
    )
