"""Bugs planted on purpose, to see whether the tests notice them."""
