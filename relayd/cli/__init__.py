"""The `relayd` command, and the modules that only its subcommands need."""

from relayd.cli.commands import app, main

__all__ = ["app", "main"]
