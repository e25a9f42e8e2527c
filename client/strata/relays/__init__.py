"""Talking to relays: `connection` keeps one connected, `pool` makes one of many.

Beside them: where relays are found (`bootstrap`, `uris`, `resolver`), how long to wait (`backoff`), and how
readers judge curation packets (`curation`). It imports `strata.protocol` alone.
"""

from __future__ import annotations

__all__: list[str] = []
