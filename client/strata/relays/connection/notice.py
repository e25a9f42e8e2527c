"""The notice about relays that a program can show its user (RFC-0004 §5.3)."""

from __future__ import annotations

__all__ = ["WHAT_RELAYS_SEE"]

WHAT_RELAYS_SEE = """\
A relay sees your network address, the filters you subscribe with, every packet's author, type, time and
size, when you publish and read, when you authenticate, and when you meet a limit. Encrypting the content of a
packet hides the content alone. Relays keep what they see as their operators choose; this system does not make
your metadata private.
"""
"""The notice (R-335), in English, for programs to show. It promises no privacy of metadata (R-334)."""
