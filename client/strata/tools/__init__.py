"""Programs around the library: the command line.

This is the outermost ring: it may import all the others, and none of them imports it.
"""

from __future__ import annotations

__all__: list[str] = []
