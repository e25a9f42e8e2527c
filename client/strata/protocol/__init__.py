"""The rules that both ends must agree on: packets, identities and their keys, the wire, errors.

The innermost ring: it imports no other ring, and relayd and the pipeline rest on it as the client does.
"""

from __future__ import annotations

__all__: list[str] = []
