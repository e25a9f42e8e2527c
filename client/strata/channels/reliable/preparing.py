"""What a channel sends next, ready to go: stored, encrypted, with its proof (C-240, C-244, C-236).

Hooks may take their time, so what stands at the head of a channel's queues is prepared ahead of its turn; the
hub asks nothing of a channel that is not ready. An asyncio shell.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Protocol

from strata.channels.encryption import EncryptionFailed, EncryptionHook
from strata.channels.rate_limit.limiter import RateLimiter
from strata.channels.rate_limit.proof import ProofFailed, ProofProvider, obtain_proof
from strata.channels.rate_limit.values import Transmission
from strata.channels.reliable.codec import Codec
from strata.channels.reliable.engine import ChannelEngine
from strata.channels.reliable.errors import EncodingFailed

__all__ = ["Prepared", "Preparing"]

_MAX_PREPARED = 8


class Prepared:
    """Bytes as the transport takes them, and the proof it may ask for."""

    __slots__ = ("payload", "proof")

    def __init__(self, payload: bytes, proof: bytes | None = None) -> None:
        self.payload = payload
        self.proof = proof


class Shell(Protocol):
    """What preparing needs of its channel."""

    channel_id: str
    lane: str

    def flush(self) -> None: ...

    def now_ms(self) -> int: ...

    def is_stored(self, transmission: Transmission) -> bool:
        """Whether what registers it is durable."""
        ...


class Preparing:
    """The hooks of one channel on its way out, and what has come of them."""

    def __init__(
        self,
        shell: Shell,
        engine: ChannelEngine,
        limiter: RateLimiter,
        *,
        hook: EncryptionHook | None,
        proof_provider: ProofProvider | None,
        codec: Codec,
        on_ready: Callable[[], None],
    ) -> None:
        self._shell = shell
        self._engine = engine
        self._limiter = limiter
        self._hook = hook
        self._provider = proof_provider
        self._codec = codec
        self._on_ready = on_ready
        self._prepared: dict[str, Prepared] = {}
        self._task: asyncio.Task[None] | None = None

    def is_ready(self) -> bool:
        """Whether each of what may be next can go out at once; if not, that is begun."""
        lane = self._shell.lane
        while True:
            heads = self._limiter.heads(lane)
            waiting = [each for each in heads if not self._is_prepared(each)]
            if self._limiter.heads(lane) == heads:  # else some were found to be needless
                return bool(heads) and not waiting

    def take(self, transmission: Transmission) -> Prepared | None:
        """What was prepared for it."""
        return self._prepared.pop(transmission.message_id, None)

    async def encode(self, data: bytes) -> bytes:
        """An SDS message as the transport carries it. Raises `EncryptionFailed` and `EncodingFailed`."""
        return self._codec.encode(data if self._hook is None else await self._hook.encrypt(data))

    def tasks(self) -> list[asyncio.Task[None]]:
        """What is at work: the channel stops."""
        return [] if self._task is None else [self._task]

    def _is_prepared(self, head: Transmission) -> bool:
        if not self._shell.is_stored(head):
            return False
        if head.message_id in self._prepared:
            return True
        data = self._engine.data(head)
        if data is None:
            self._shell.flush()
            return False
        if self._hook is None and self._provider is None:
            try:
                self._keep(head, Prepared(self._codec.encode(data)))
            except EncodingFailed as error:
                self._refuse(head, error)
                return False
            return True
        if self._task is None:
            name = f"strata-hook {self._shell.channel_id}"
            self._task = asyncio.create_task(self._prepare(head, data), name=name)
            self._task.add_done_callback(self._done)
        return False

    async def _prepare(self, head: Transmission, data: bytes) -> None:
        try:
            payload = await self.encode(data)
            self._keep(head, Prepared(payload, await obtain_proof(self._provider, payload)))
        except (EncryptionFailed, ProofFailed, EncodingFailed) as error:
            self._refuse(head, error)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._task = None
        if not task.cancelled():
            task.result()  # a fault of ours must not pass unseen
            self._on_ready()

    def _keep(self, head: Transmission, prepared: Prepared) -> None:
        if len(self._prepared) >= _MAX_PREPARED:  # what was withdrawn meanwhile stays behind
            self._prepared.clear()
        self._prepared[head.message_id] = prepared

    def _refuse(self, head: Transmission, error: EncryptionFailed | ProofFailed | EncodingFailed) -> None:
        self._engine.refused(head, self._shell.now_ms(), str(error), type(error).__name__)
        self._shell.flush()
