"""Reed–Solomon parity: each parity segment can replace one lost data segment (C-212 … C-216).

Compatibility: the segmentation document names Leopard, which is two codes. The code over GF(2^8) is for at
most 256 shards, with their numbers rounded up to powers of two; the code over GF(2^16) is for more. The
library of the `parity` extra (reed-solomon-leopard, which wraps the Rust crate reed-solomon-simd) uses
GF(2^16) at every size. So this library and programs with that crate understand parity made here. Programs
with the C++ library do not: they code nearly all messages of this size over GF(2^8). They still understand
the data segments, which are the same, and a message with all of them needs no parity. A recovered message is
checked against its hash, so foreign parity can fail but cannot falsify a message.

All shards have the same length, a multiple of 64 bytes: the length of the longest data segment, rounded up.
Data segments are padded with zeros only for the arithmetic, and travel at their real length (C-214).
"""

# Core: no I/O, no clock, no randomness (held by tests/test_layout.py).

from __future__ import annotations

import functools
import importlib
from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import Protocol

from strata.protocol.errors import StrataError

__all__ = ["SHARD_MULTIPLE", "ParityCodec", "ParityUnavailable", "load_codec", "require_codec", "shard_bytes"]

SHARD_MULTIPLE = 64
"""Leopard works on multiples of this number of bytes (A-150)."""

_MODULE = "reed_solomon_leopard"


class ParityUnavailable(StrataError):
    """Parity is enabled, but the library that computes it is not installed."""

    def __str__(self) -> str:
        return (
            "Reed–Solomon parity needs an optional library; install it with: pip install 'strata-sdk[parity]'"
        )


class ParityCodec(Protocol):
    """A Reed–Solomon code over shards of equal length."""

    def encode(self, data: Sequence[bytes], parity_count: int) -> list[bytes]:
        """The parity shards of these data shards."""
        ...

    def recover(
        self, data_count: int, parity_count: int, data: Mapping[int, bytes], parity: Mapping[int, bytes]
    ) -> dict[int, bytes]:
        """The missing data shards by index, from at least `data_count` shards. `ValueError` on failure."""
        ...


class _Leopard:
    def __init__(self, module: ModuleType) -> None:
        self._module = module

    def encode(self, data: Sequence[bytes], parity_count: int) -> list[bytes]:
        return [bytes(shard) for shard in self._module.encode(list(data), parity_count)]

    def recover(
        self, data_count: int, parity_count: int, data: Mapping[int, bytes], parity: Mapping[int, bytes]
    ) -> dict[int, bytes]:
        restored = self._module.decode(data_count, parity_count, dict(data), dict(parity))
        return {index: bytes(shard) for index, shard in restored.items() if index not in data}


@functools.cache
def load_codec() -> ParityCodec | None:
    """The code of the `parity` extra; None if it is not installed."""
    try:
        return _Leopard(importlib.import_module(_MODULE))
    except ImportError:
        return None


def require_codec() -> ParityCodec:
    """The code of the `parity` extra. Raises `ParityUnavailable` if it is not installed (C-213)."""
    codec = load_codec()
    if codec is None:
        raise ParityUnavailable
    return codec


def shard_bytes(longest: int) -> int:
    """The length of the shards of a message whose longest data segment has this many bytes."""
    return -(-longest // SHARD_MULTIPLE) * SHARD_MULTIPLE
