"""Programs around the library: the command line, the conformance checks, the simulator.

The outermost ring. It may import all others, and none imports it.
"""

from __future__ import annotations

__all__: list[str] = []
