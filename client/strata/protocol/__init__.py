"""The rules that both ends must agree on: packets, identities and their keys, the wire, errors.

The innermost ring: it imports no other ring, and the client, relayd and the pipeline all depend on it.
"""

from __future__ import annotations

__all__: list[str] = []
