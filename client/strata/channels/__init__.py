"""Reliable channels: every message to every participant, once, in causal order, over relays.

`reliable` is the channel, and `connecting` is how a program opens one. Below them are `sds` (order,
acknowledgement, repair), `segmentation`, `rate_limit`, `encryption`, `persistence`, and the `messaging` node
that carries everything. Imports `strata.protocol` and `strata.relays`.
"""

from __future__ import annotations

__all__: list[str] = []
