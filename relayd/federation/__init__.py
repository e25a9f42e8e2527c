"""Relays among relays (RFC-0007): which relays this one reads from, and what it makes of what they send."""
