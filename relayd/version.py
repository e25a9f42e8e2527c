"""Which relayd this is, as the installed distribution says."""

from __future__ import annotations

from importlib import metadata

__all__ = ["VERSION"]


def _installed_version() -> str:
    try:
        return metadata.version("relayd")
    except metadata.PackageNotFoundError:  # run from a source tree that was never installed
        return "0+unknown"


VERSION = _installed_version()
