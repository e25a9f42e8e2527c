"""The exit codes of all `relayd` commands (docs/guides/operations.md)."""

from typing import Final

__all__ = ["EXIT_CONFIGURATION", "EXIT_DATABASE", "EXIT_INCOMPLETE", "EXIT_OK", "EXIT_PORT"]

EXIT_OK: Final = 0
EXIT_INCOMPLETE: Final = 1
"""Done, except for the parts that the output names."""
EXIT_CONFIGURATION: Final = 2
EXIT_DATABASE: Final = 3
EXIT_PORT: Final = 4
