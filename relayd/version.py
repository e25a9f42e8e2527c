"""The version of relayd, from the installed distribution."""

from __future__ import annotations

from importlib import metadata

__all__ = ["VERSION", "installed_version"]


def installed_version() -> str:
    """The version that a process started now would have."""
    try:
        return metadata.version("relayd")
    except metadata.PackageNotFoundError:  # run from a source tree that was never installed
        return "0+unknown"


VERSION = installed_version()
"""The version of this process."""
