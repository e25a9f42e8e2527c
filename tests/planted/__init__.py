"""Bugs that are planted on purpose, to see whether the tests notice them."""
