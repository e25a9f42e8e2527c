"""Packets of many values are parsed in a separate process, at a low priority.

Text that takes milliseconds to parse would hold the interpreter lock for most of that time, and the event
loop would wait for the lock again and again. So a thread sends the text to another process and waits, which
needs no lock. The requests of others also take precedence on the processor.

A process starts with the first expensive packet; there is one for each thread that sends a packet at the
same time. It keeps no state. If it dies, only the packet that it was parsing, if any, is lost, and the next
packet gets a new process. It ends when the relay does, however the relay ends, because its socket then has
no other end.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from typing import Final, NamedTuple

from strata.protocol.errors import InvalidPacket
from strata.protocol.packets import Packet

from relayd.logs import get_logger

__all__ = ["ApartParser", "Parsed", "ParserLost"]

_log = get_logger("relayd.admission")

_NICE: Final = 10
_PATIENCE: Final = 20.0
"""The most seconds for one packet, which takes milliseconds of a processor that may have others to serve."""
_ASKED: Final = struct.Struct("!I")
_ANSWERED: Final = struct.Struct("!Id")
"""The length of what follows, and the processor time that it took, in seconds."""
_BUFFER_BYTES: Final = 1 << 20
_PROGRAM: Final = (
    "import os, sys; os.nice({nice}); sys.path = {path!r}; from {module} import _serve; _serve(*{limits!r})"
)
"""Its imports take a third of a second of processor time, which must not delay others: hence `nice` first."""


class ParserLost(Exception):
    """The process that parsed a packet has ended or does not answer; the packet is neither good nor bad."""


class Parsed(NamedTuple):
    """The result for a text."""

    packet: Packet | InvalidPacket
    seconds: float
    """The processor time that it took, in seconds, besides that of the calling thread."""


class ApartParser:
    """`Packet.parse` with these limits, in other processes. May be used from any thread."""

    def __init__(self, *, max_bytes: int, max_depth: int, max_values: int) -> None:
        self._limits = (max_bytes, max_depth, max_values)
        self._lock = threading.Lock()
        self._busy: set[_Parser] = set()
        self._idle: list[_Parser] = []
        self._is_closed = False
        self._has_warned = False

    def parse(self, raw: bytes) -> Parsed:
        """Parse a packet and wait for the result. Raises `ParserLost`.

        If the system allows no new process, the packet is parsed in the calling thread.
        """
        parser = self._take()
        if parser is None:
            return Parsed(_parse(raw, *self._limits), 0.0)
        parsed: Parsed | None = None
        try:
            parsed = parser.parse(raw)
        except (OSError, EOFError) as error:
            raise ParserLost(f"a process that parses packets is lost: {error!r}") from error
        finally:
            self._give_back(parser, is_sound=parsed is not None)
        return parsed

    def close(self) -> None:
        """End the processes; a packet being parsed is lost."""
        with self._lock:
            self._is_closed = True
            for parser in self._busy:
                parser.end()  # its thread notices that it is gone
            for parser in self._idle:
                parser.close()
            self._idle.clear()

    def _take(self) -> _Parser | None:
        with self._lock:
            if self._is_closed:
                raise ParserLost("the relay ends")
            parser = self._waiting()
            if parser is None:
                try:
                    parser = _Parser(self._limits)
                except OSError as error:
                    self._warn(error)
                    return None
            self._busy.add(parser)
            return parser

    def _waiting(self) -> _Parser | None:
        """An idle process. One that was killed meanwhile is skipped: that is no packet's fault."""
        while self._idle:
            parser = self._idle.pop()
            if parser.is_alive:
                return parser
            parser.close()
        return None

    def _give_back(self, parser: _Parser, *, is_sound: bool) -> None:
        with self._lock:
            self._busy.discard(parser)
            if is_sound and not self._is_closed:
                self._idle.append(parser)
                return
        parser.close()

    def _warn(self, error: OSError) -> None:
        if not self._has_warned:
            self._has_warned = True
            _log.warning("no_process_apart", problem=str(error), consequence="dear packets delay others")


class _Parser:
    """The relay's end of one process."""

    def __init__(self, limits: tuple[int, int, int]) -> None:
        self._socket, theirs = socket.socketpair()
        with contextlib.ExitStack() as undo:
            undo.callback(self._socket.close)
            with theirs:
                for end in (self._socket, theirs):
                    end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER_BYTES)
                program = _PROGRAM.format(nice=_NICE, path=sys.path, module=__name__, limits=limits)
                # Ctrl-C in a terminal is meant for the relay, which goes on serving for a while.
                self._process = subprocess.Popen(
                    [sys.executable, "-c", program],
                    stdin=theirs.fileno(),
                    stdout=subprocess.DEVNULL,
                    process_group=0,
                )
            undo.pop_all()
        self._socket.settimeout(_PATIENCE)

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def parse(self, raw: bytes) -> Parsed:
        self._socket.sendall(_ASKED.pack(len(raw)) + raw)
        length, seconds = _ANSWERED.unpack(_receive(self._socket, _ANSWERED.size))
        # Written by this same program, from text that it had checked: plain values and no code.
        return Parsed(pickle.loads(_receive(self._socket, length)), seconds)

    def end(self) -> None:
        """End the process; a thread that waits for its answer stops waiting."""
        self._process.kill()
        self._process.wait()

    def close(self) -> None:
        self.end()
        self._socket.close()


def _receive(peer: socket.socket, length: int) -> bytearray:
    """Read exactly this many bytes. Raises `EOFError` if the other end is gone, and `OSError`."""
    data = bytearray(length)
    rest = memoryview(data)
    while rest:
        count = peer.recv_into(rest)
        if not count:
            raise EOFError
        rest = rest[count:]
    return data


def _parse(raw: bytes, max_bytes: int, max_depth: int, max_values: int) -> Packet | InvalidPacket:
    try:
        return Packet.parse(raw, max_bytes=max_bytes, max_depth=max_depth, max_values=max_values)
    except InvalidPacket as error:
        return error


def _serve(max_bytes: int, max_depth: int, max_values: int) -> None:
    """Run the other process: parse what it is sent until the relay is gone."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # a relay asked to end goes on serving until it has drained
    with socket.socket(fileno=os.dup(0)) as relay, contextlib.suppress(EOFError, ConnectionError):
        while True:
            (length,) = _ASKED.unpack(_receive(relay, _ASKED.size))
            begun = time.process_time()
            packet = _parse(bytes(_receive(relay, length)), max_bytes, max_depth, max_values)
            text = pickle.dumps(packet, pickle.HIGHEST_PROTOCOL)
            relay.sendall(_ANSWERED.pack(len(text), time.process_time() - begun) + text)
