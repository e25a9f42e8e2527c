"""Other ways to send messages from one Python process to another, each used as its own guides recommend.

pyzmq is used with blocking sockets, which are several times as fast as those for asyncio. There is an
acknowledgement for each batch of messages, of the size of our batches, or for each message if they are sent
one by one.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from struct import Struct
from typing import Any

import grpc
import grpc.aio
import uvloop
import zmq

from benches.tx_rx_runs import AsyncLink, BlockingLink, Contestant, Job, Sent

__all__ = ["DealerRouter", "Grpc", "PushPull"]

_COUNT = Struct(">Q")
_QUESTION = b"?"
_NO_COPY = 64 * 1024
"""From this size on, pyzmq is told not to copy; below it, its guide says, that costs more than it saves."""


def _ack_every(job: Job) -> int:
    return 1 if job.one_by_one else job.batch


# ZeroMQ


def _bound(context: zmq.Context[zmq.Socket[bytes]], kind: int, job: Job, name: str) -> zmq.Socket[bytes]:
    bound = context.socket(kind)
    bound.bind("tcp://127.0.0.1:*" if job.transport == "tcp" else f"ipc://{job.socket_path}{name}")
    return bound


def _endpoint(bound: zmq.Socket[bytes]) -> str:
    return bound.get_string(zmq.LAST_ENDPOINT)


class PushPull(Contestant):
    """PUSH to PULL, with a second pair for the way back.

    Nothing is acknowledged while messages stream: only the high-water marks hold the sender back. The sender
    asks how many messages have arrived only after the last one.
    """

    def receive(self, ready: Callable[[str], None]) -> tuple[int, int]:
        job, copy = self.job, self.job.size < _NO_COPY
        with zmq.Context() as context, _bound(context, zmq.PULL, job, "") as pull:
            with _bound(context, zmq.PUSH, job, "-acks") as acks:
                ready(f"{_endpoint(pull)} {_endpoint(acks)}")
                count = size = 0
                while length := len(message := pull.recv(copy=copy)):
                    if length > 1:
                        count += 1
                        size += length
                    if length == 1 or job.one_by_one:
                        acks.send(_COUNT.pack(count))
                del message
                return count, size

    def send(self, where: str) -> Sent:
        there, back = where.split()
        with zmq.Context() as context, context.socket(zmq.PUSH) as push, context.socket(zmq.PULL) as acks:
            push.connect(there)
            acks.connect(back)
            sent = _PushLink(push, acks, self.job).carry_out(self.job)
            push.send(b"")
            return sent


class _PushLink(BlockingLink):
    def __init__(self, push: zmq.Socket[bytes], acks: zmq.Socket[bytes], job: Job) -> None:
        self._push, self._acks, self._job = push, acks, job
        self._payload = job.payload
        self._sent = self._acknowledged = 0

    def write(self, count: int) -> None:
        send, payload, copy = self._push.send, self._payload, len(self._payload) < _NO_COPY
        for _ in range(count):
            send(payload, 0, copy)
        self._sent += count

    def drain(self, most: int) -> None:
        if most == 0:
            if not self._job.one_by_one:
                self._push.send(_QUESTION)
            while self._acknowledged < self._sent:
                (self._acknowledged,) = _COUNT.unpack(self._acks.recv())


class DealerRouter(Contestant):
    """DEALER to ROUTER, which acknowledges on the same connection."""

    def receive(self, ready: Callable[[str], None]) -> tuple[int, int]:
        job, copy, every = self.job, self.job.size < _NO_COPY, _ack_every(self.job)
        with zmq.Context() as context, _bound(context, zmq.ROUTER, job, "") as router:
            # Otherwise the ROUTER drops acknowledgements that it cannot send at once.
            router.setsockopt(zmq.ROUTER_MANDATORY, 1)
            ready(_endpoint(router))
            count = size = 0
            receive = router.recv
            while True:
                sender = receive()
                length = len(receive(copy=copy))
                if not length:
                    return count, size
                count += 1
                size += length
                if count % every == 0:
                    router.send_multipart([sender, _COUNT.pack(count)])

    def send(self, where: str) -> Sent:
        with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
            dealer.connect(where)
            sent = _DealerLink(dealer, self.job.payload).carry_out(self.job)
            dealer.send(b"")
            return sent


class _DealerLink(BlockingLink):
    def __init__(self, dealer: zmq.Socket[bytes], payload: bytes) -> None:
        self._dealer = dealer
        self._payload = payload
        self._sent = self._acknowledged = 0

    def write(self, count: int) -> None:
        send, payload, copy = self._dealer.send, self._payload, len(self._payload) < _NO_COPY
        for _ in range(count):
            send(payload, 0, copy)
        self._sent += count

    def drain(self, most: int) -> None:
        while self._sent - self._acknowledged > most:
            (self._acknowledged,) = _COUNT.unpack(self._dealer.recv())


# gRPC

_SERVICE, _METHOD = "relayd.bench.TxRx", "Carry"
_UNLIMITED = (("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1))


class Grpc(Contestant):
    """A stream in both directions: messages one way, acknowledgements the other; bytes, no generated code."""

    def receive(self, ready: Callable[[str], None]) -> tuple[int, int]:
        return uvloop.run(self._receive(ready))

    def send(self, where: str) -> Sent:
        return uvloop.run(self._send(where))

    async def _receive(self, ready: Callable[[str], None]) -> tuple[int, int]:
        job, every = self.job, _ack_every(self.job)
        done: asyncio.Future[tuple[int, int]] = asyncio.get_running_loop().create_future()

        async def carry(messages: AsyncIterator[bytes], context: Any) -> None:
            count = size = 0
            async for message in messages:
                count += 1
                size += len(message)
                if count % every == 0:
                    await context.write(_COUNT.pack(count))
            done.set_result((count, size))

        server = grpc.aio.server(options=_UNLIMITED)
        method = grpc.stream_stream_rpc_method_handler(carry)
        server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler(_SERVICE, {_METHOD: method})])
        where = f"unix:{job.socket_path}" if job.transport == "unix" else "127.0.0.1:0"
        port = server.add_insecure_port(where)
        await server.start()
        ready(where if job.transport == "unix" else f"127.0.0.1:{port}")
        try:
            return await done
        finally:
            await server.stop(grace=5.0)

    async def _send(self, where: str) -> Sent:
        async with grpc.aio.insecure_channel(where, options=_UNLIMITED) as channel:
            call = channel.stream_stream(f"/{_SERVICE}/{_METHOD}")()
            sent = await _GrpcLink(call, self.job.payload).carry_out(self.job)
            await call.done_writing()
            assert await call.read() is grpc.aio.EOF
            return sent


class _GrpcLink(AsyncLink):
    def __init__(self, call: Any, payload: bytes) -> None:
        self._call = call
        self._payload = payload
        self._sent = self._acknowledged = 0

    async def write(self, count: int) -> None:
        write, payload = self._call.write, self._payload
        for _ in range(count):
            await write(payload)
        self._sent += count

    async def drain(self, most: int) -> None:
        while self._sent - self._acknowledged > most:
            (self._acknowledged,) = _COUNT.unpack(await self._call.read())
