"""The names of the documents, in camel case, for types whose fields are in snake case.

Both spellings set and read the same field: `SdsConfig(causalHistorySize=2).causal_history_size`.
"""

# Core: no I/O, no clock, no randomness (held by tests/test_layout.py).

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from dataclasses import fields
from operator import attrgetter
from typing import Any, TypeVar

__all__ = ["camel_case", "in_camel_case", "snake_case"]

T = TypeVar("T")


def snake_case(name: str) -> str:
    """`causalHistorySize` as `causal_history_size`; a name in snake case stays as it is."""
    return re.sub(r"(?<=[A-Za-z0-9])([A-Z])", lambda found: "_" + found[1].lower(), name)


def camel_case(name: str) -> str:
    """`causal_history_size` as `causalHistorySize`."""
    first, *others = name.split("_")
    return first + "".join(each.capitalize() for each in others)


def in_camel_case(*, made: bool = True, **aliases: str) -> Callable[[type[T]], type[T]]:
    """Decorate a dataclass: each field has its camel-case name too, and `aliases` further ones.

    With `made` false the names are for reading alone. Giving one field under two names raises `TypeError`.
    """

    def decorate(cls: type[T]) -> type[T]:
        names = {camel_case(each.name): each.name for each in fields(cls)}  # type: ignore[arg-type]
        for alias, name in aliases.items():
            names |= {alias: name, camel_case(alias): name}
        names = {alias: name for alias, name in names.items() if alias != name}
        for alias, name in names.items():
            setattr(cls, alias, property(attrgetter(name), doc=f"`{name}` under another name."))
        if made:
            _accept(cls, names)
        return cls

    return decorate


def _accept(cls: type[Any], names: dict[str, str]) -> None:
    make = cls.__init__

    @functools.wraps(make)
    def init(self: Any, *args: Any, **given: Any) -> None:
        for alias in given.keys() & names.keys():
            name = names[alias]
            if name in given:
                raise TypeError(f"{name} is given twice, as {alias} too")
            given[name] = given.pop(alias)
        make(self, *args, **given)

    cls.__init__ = init
