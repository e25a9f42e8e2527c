"""Camel-case names, as in the documents, for fields and parameters in snake case.

Both spellings set and read the same field: `SdsConfig(causalHistorySize=2).causal_history_size`.
"""

# Core: no I/O, no clock, no randomness (held by tests/test_layout.py).

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields
from operator import attrgetter
from typing import Any, TypeVar

__all__ = ["camel_case", "further_names", "in_camel_case", "snake_case", "under_own_names"]

T = TypeVar("T")


def snake_case(name: str) -> str:
    """`causalHistorySize` as `causal_history_size`; a name in snake case is unchanged."""
    return re.sub(r"(?<=[A-Za-z0-9])([A-Z])", lambda found: "_" + found[1].lower(), name)


def camel_case(name: str) -> str:
    """`causal_history_size` as `causalHistorySize`."""
    first, *others = name.split("_")
    return first + "".join(each.capitalize() for each in others)


def in_camel_case(*, made: bool = True, **aliases: str) -> Callable[[type[T]], type[T]]:
    """Decorate a dataclass so that its fields also have camel-case names, and those of `aliases`.

    With `made` false these names can only be read, and the constructor does not take them. Giving one field
    under two names raises `TypeError`.
    """

    def decorate(cls: type[T]) -> type[T]:
        names = further_names((each.name for each in fields(cls)), aliases)  # type: ignore[arg-type]
        for alias, name in names.items():
            setattr(cls, alias, property(attrgetter(name), doc=f"`{name}` under another name."))
        if made:
            _accept(cls, names)
        return cls

    return decorate


def further_names(own: Iterable[str], aliases: Mapping[str, str]) -> dict[str, str]:
    """The further names of the `own` names, each mapped to the name it stands for."""
    names = {camel_case(name): name for name in own}
    for alias, name in aliases.items():
        names |= {alias: name, camel_case(alias): name}
    return {alias: name for alias, name in names.items() if alias != name}


def under_own_names(given: dict[str, T], names: Mapping[str, str]) -> dict[str, T]:
    """Keyword arguments under their own names. Raises `TypeError` if one is given under two names."""
    for alias in given.keys() & names.keys():
        name = names[alias]
        if name in given:
            raise TypeError(f"{name} is given twice, as {alias} too")
        given[name] = given.pop(alias)
    return given


def _accept(cls: type[Any], names: Mapping[str, str]) -> None:
    make = cls.__init__

    @functools.wraps(make)
    def init(self: Any, *args: Any, **given: Any) -> None:
        make(self, *args, **under_own_names(given, names))

    cls.__init__ = init
