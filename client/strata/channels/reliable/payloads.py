"""Payloads as the transport carries them: encrypted, encoded, with a proof (C-240, C-244, C-236).

A hook may take its time, so the transmission at the head of each queue gets its payload ahead of its turn, as
soon as the store has it; the hub takes nothing from a channel that is not ready. An asyncio shell.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from strata.channels.awaiting import end_of
from strata.channels.encryption import DecryptionFailed, EncryptionFailed, EncryptionHook
from strata.channels.rate_limit.proof import ProofFailed, ProofProvider, obtain_proof
from strata.channels.rate_limit.values import Transmission
from strata.channels.reliable.codec import Decoder, Encoder
from strata.channels.reliable.engine import ChannelEngine
from strata.channels.reliable.errors import EncodingFailed

__all__ = ["CodecPair", "Payload", "Payloads"]

_MAX_MADE = 8
_MAX_LOOKS = 16
"""The most times the heads are checked in one go while transmissions turn out to be unnecessary."""


class CodecPair:
    """An encoder and its decoder; without them payloads stay as they are."""

    def __init__(self, encoder: Encoder | None, decoder: Decoder | None) -> None:
        """Raises `ValueError` if only one of the two is given."""
        if (encoder is None) != (decoder is None):
            raise ValueError("an encoder needs its decoder, and the other way round")
        self._encoder = encoder
        self._decoder = decoder
        self.overhead = int(getattr(encoder, "overhead", 0))

    @property
    def content_topic(self) -> str | None:
        """The topic that the encoder names."""
        return None if self._encoder is None else self._encoder.content_topic

    def encode(self, payload: bytes) -> bytes:
        """Return the bytes to send. Raises `EncodingFailed` if the encoder raises anything."""
        if self._encoder is None:
            return payload
        try:
            return self._encoder.encode(payload)
        except Exception as error:
            raise EncodingFailed from error

    def decode(self, payload: bytes) -> bytes | None:
        """Return the bytes inside, or None if there are none. Never raises."""
        if self._decoder is None:
            return payload
        try:
            return self._decoder.decode(payload)
        except Exception:
            return None


class Payload:
    """Bytes as the transport takes them, and the proof that it may require."""

    __slots__ = ("data", "proof")

    def __init__(self, data: bytes, proof: bytes | None = None) -> None:
        self.data = data
        self.proof = proof


class Payloads:
    """Makes the payloads of one channel, and reads those it receives."""

    def __init__(
        self,
        engine: ChannelEngine,
        *,
        hook: EncryptionHook | None,
        codec: CodecPair,
        proof_provider: ProofProvider | None,
        now_ms: Callable[[], int],
        is_stored: Callable[[Transmission], bool],
        flush: Callable[[], None],
        on_ready: Callable[[], None],
        on_fault: Callable[[BaseException], None],
    ) -> None:
        """`is_stored` says whether the step that made a transmission is durable. `flush` stores the engine's
        changes. `on_ready` is called when a hook has done its work, `on_fault` when its task failed."""
        self.has_hook = hook is not None
        self.undecodable = 0
        self.undecryptable = 0
        self._engine = engine
        self._hook = hook
        self._codec = codec
        self._provider = proof_provider
        self._now_ms = now_ms
        self._is_stored = is_stored
        self._flush = flush
        self._on_ready = on_ready
        self._on_fault = on_fault
        self._made: dict[str, Payload] = {}
        self._generation = 0
        self._task: asyncio.Task[None] | None = None

    # Sending.

    def is_ready(self) -> bool:
        """Whether each transmission that may be next has its payload; starts to make a missing payload."""
        outbox = self._engine.outbox
        for _ in range(_MAX_LOOKS):
            heads = outbox.heads()
            waiting = [each for each in heads if not self._is_made(each)]
            if outbox.heads() == heads:  # else some turned out to be unnecessary
                return bool(heads) and not waiting
        # If the encoder refused everything, the event loop would be blocked until the queue was empty.
        asyncio.get_running_loop().call_soon(self._on_ready)
        return False

    def take(self, transmission: Transmission) -> Payload | None:
        """Return the payload that was made for a transmission, and remove it."""
        return self._made.pop(transmission.message_id, None)

    async def make(self, data: bytes) -> Payload:
        """Make the payload of an SDS message. Raises `EncryptionFailed`, `EncodingFailed`, `ProofFailed`."""
        encoded = self._codec.encode(data if self._hook is None else await self._hook.encrypt(data))
        return Payload(encoded, await obtain_proof(self._provider, encoded))

    def renew(self) -> None:
        """Discard payloads that are made or being made, because they may name a refused message."""
        self._made.clear()
        self._generation += 1

    def tasks(self) -> list[asyncio.Task[None]]:
        """Return the running tasks to a channel that stops, which ends them."""
        if self._task is None:
            return []
        self._task.remove_done_callback(self._done)
        task, self._task = self._task, None
        return [task]

    def _is_made(self, head: Transmission) -> bool:
        if not self._is_stored(head):
            return False
        if head.message_id in self._made:
            return True
        data = self._engine.sending.data(head)
        if data is None:
            self._flush()
            return False
        if self._hook is None and self._provider is None:
            try:
                self._keep(head, Payload(self._codec.encode(data)))
            except EncodingFailed as error:
                self._refuse(head, error)
                return False
            return True
        if self._task is None:
            name = f"strata-hook {self._engine.sds.channel_id}"
            self._task = asyncio.create_task(self._work(head, data), name=name)
            self._task.add_done_callback(self._done)
        return False

    async def _work(self, head: Transmission, data: bytes) -> None:
        generation = self._generation
        try:
            payload = await self.make(data)
            if generation == self._generation:
                self._keep(head, payload)
        except (EncryptionFailed, ProofFailed, EncodingFailed) as error:
            self._refuse(head, error)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._task = None
        error = end_of(task)
        if error is None:
            self._on_ready()
        else:
            self._on_fault(error)

    def _keep(self, head: Transmission, payload: Payload) -> None:
        if len(self._made) >= _MAX_MADE:  # payloads of withdrawn transmissions are never taken
            self._made.clear()
        self._made[head.message_id] = payload

    def _refuse(self, head: Transmission, error: EncryptionFailed | ProofFailed | EncodingFailed) -> None:
        self._engine.sending.refused(head, self._now_ms(), str(error), type(error).__name__)
        self.renew()
        self._flush()

    # Receiving.

    async def open(self, payload: bytes) -> bytes | None:
        """Return the SDS message in a received payload; None, counted, if the decoder does not accept it.

        Raises `DecryptionFailed`, counted, if the hook cannot decrypt it.
        """
        encrypted = self._codec.decode(payload)
        if encrypted is None:
            self.undecodable += 1
            return None
        if self._hook is None:
            return encrypted
        try:
            return await self._hook.decrypt(encrypted)
        except DecryptionFailed:
            self.undecryptable += 1
            raise

    async def read(self, payload: bytes) -> bytes | None:
        """As `open`, but also returns None if the hook cannot decrypt the payload."""
        try:
            return await self.open(payload)
        except DecryptionFailed:
            return None

    async def opens(self, payload: bytes) -> bool:
        """Whether the hook can now decrypt a payload that it could not before. Counts nothing."""
        encrypted = self._codec.decode(payload)
        if encrypted is None or self._hook is None:
            return False
        try:
            await self._hook.decrypt(encrypted)
        except DecryptionFailed:
            return False
        return True
