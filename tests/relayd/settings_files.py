"""Settings for tests: faults as sentences, and values in the form of the environment and TOML."""

from __future__ import annotations

import pytest

from relayd.config import ConfigurationError, load

__all__ = ["SECRET", "as_text", "as_tuple", "problems"]

SECRET = "ab" * 32


def problems(*args, **kwargs) -> list[str]:
    """Everything that `load` finds wrong."""
    with pytest.raises(ConfigurationError) as caught:
        load(*args, **kwargs)
    return list(caught.value.problems)


def as_tuple(value: object) -> object:
    return tuple(value) if isinstance(value, list) else value


def as_text(value: object) -> str:
    return (
        ",".join(value)
        if isinstance(value, list | tuple)
        else str(value).lower()
        if value in (True, False)
        else str(value)
    )
