"""Whose key counts now, and what the operator states about identities and origins."""
