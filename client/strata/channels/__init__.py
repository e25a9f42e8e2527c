"""Reliable channels: every message to every participant, once, in causal order, over relays.

`reliable` is the channel and `connecting` how a program comes to one. Below: `sds` (order, acknowledgement,
repair), `segmentation`, `rate_limit`, `encryption`, `persistence`, and the `messaging` node that carries it
all. Imports `strata.protocol` and `strata.relays`.
"""

from __future__ import annotations

__all__: list[str] = []
