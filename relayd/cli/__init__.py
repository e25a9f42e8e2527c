"""The `relayd` command, and what only its subcommands need."""

from relayd.cli.commands import app, main

__all__ = ["app", "main"]
