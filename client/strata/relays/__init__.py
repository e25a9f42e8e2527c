"""Talking to relays: `connection` keeps one relay connected, `pool` makes many relays look like one.

Other modules find relays (`bootstrap`, `uris`, `resolver`), compute waits (`backoff`), gather questions about
authors' keys (`author_questions`), and judge curation packets for readers (`curation`). The package imports
only `strata.protocol`.
"""

from __future__ import annotations

__all__: list[str] = []
