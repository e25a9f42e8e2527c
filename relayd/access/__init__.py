"""Admission to the relay: addresses, identities, capabilities and limits."""
