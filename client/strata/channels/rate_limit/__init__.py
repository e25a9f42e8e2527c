"""Paces transmissions to keep to the limits of the transport (channel.md §11)."""

from __future__ import annotations

from strata.channels.rate_limit.limiter import RateLimiter
from strata.channels.rate_limit.proof import ProofFailed, ProofProvider, obtain_proof
from strata.channels.rate_limit.values import (
    DEFAULT_RATE_LIMIT_CONFIG,
    DefaultRateLimitConfig,
    EphemeralDropReason,
    Priority,
    RateLimitConfig,
    SendQueueFull,
    Transmission,
)

__all__ = [
    "DEFAULT_RATE_LIMIT_CONFIG",
    "DefaultRateLimitConfig",
    "EphemeralDropReason",
    "Priority",
    "ProofFailed",
    "ProofProvider",
    "RateLimitConfig",
    "RateLimiter",
    "SendQueueFull",
    "Transmission",
    "obtain_proof",
]
