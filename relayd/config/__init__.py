"""The settings: their table, the sources of their values, and their checks."""

from __future__ import annotations

from relayd.config.loading import ConfigurationError, Reloaded, load, read_only_once, reloaded
from relayd.config.settings import (
    ENV_PREFIX,
    HARD_MAX_PACKET_BYTES,
    Setting,
    Settings,
    SettingSources,
    setting_table,
)

__all__ = [
    "ENV_PREFIX",
    "HARD_MAX_PACKET_BYTES",
    "ConfigurationError",
    "Reloaded",
    "Setting",
    "SettingSources",
    "Settings",
    "load",
    "read_only_once",
    "reloaded",
    "setting_table",
]
