"""Relays among relays (RFC-0007): which ones this relay reads from, and what it makes of what they send."""
