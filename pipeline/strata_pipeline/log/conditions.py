"""The filters that Spark pushes down, as SQL and as a span. No I/O.

An accepted filter is applied exactly, and Spark does not check it again. All others go back to Spark.
"""

from __future__ import annotations

from collections.abc import Iterable

from pyspark.sql.datasource import (
    EqualTo,
    Filter,
    GreaterThan,
    GreaterThanOrEqual,
    In,
    IsNotNull,
    LessThan,
    LessThanOrEqual,
)
from strata.protocol.columns import string_key
from strata.protocol.sequences import Span

from strata_pipeline.log.columns import BYTEA_STRINGS, NUMBERS
from strata_pipeline.log.database import literal

__all__ = ["Conditions"]

_OPERATORS = {EqualTo: "=", GreaterThan: ">", GreaterThanOrEqual: ">=", LessThan: "<", LessThanOrEqual: "<="}
_EQUALITY = (*BYTEA_STRINGS, "packet_id")
_ALWAYS_THERE = ("sequence", "received_at", "timestamp", "packet_id", "author_id", "content_type", "body")


class Conditions:
    """The pushed filters of one read."""

    def __init__(self, span: Span) -> None:
        self.span = span
        """The sequences that can match."""
        self.sql: list[str] = []

    def take(self, filters: Iterable[Filter]) -> list[Filter]:
        """Accept the filters that the database can apply; return the others."""
        return [item for item in filters if not self._take(item)]

    def _take(self, item: Filter) -> bool:
        match item:
            case IsNotNull(attribute=(name,)):
                if name not in _ALWAYS_THERE:
                    self.sql.append(f'"{name}" IS NOT NULL')
                return True
            case In(attribute=(name,), value=values) if name in (*_EQUALITY, *NUMBERS):
                if not all(isinstance(value, int | bytes | bytearray | str) for value in values):
                    return False
                listed = ", ".join(_literal(value) for value in values)
                self.sql.append(f'"{name}" IN ({listed})' if listed else "false")
                return True
            case EqualTo() | GreaterThan() | GreaterThanOrEqual() | LessThan() | LessThanOrEqual():
                return self._compare(item)
        return False

    def _compare(self, item: EqualTo | GreaterThan | GreaterThanOrEqual | LessThan | LessThanOrEqual) -> bool:
        if len(item.attribute) != 1:
            return False
        name, value = item.attribute[0], item.value
        if name in NUMBERS and type(value) is int:
            if name == "sequence":
                self._narrow(item, value)
            else:
                self.sql.append(f'"{name}" {_OPERATORS[type(item)]} {value}')
            return True
        if isinstance(item, EqualTo) and name in _EQUALITY and isinstance(value, str | bytes | bytearray):
            self.sql.append(f'"{name}" = {_literal(value)}')
            return True
        return False

    def _narrow(self, item: Filter, value: int) -> None:
        after, up_to = self.span
        match item:
            case EqualTo():
                after, up_to = max(after, value - 1), min(up_to, value)
            case GreaterThan():
                after = max(after, value)
            case GreaterThanOrEqual():
                after = max(after, value - 1)
            case LessThan():
                up_to = min(up_to, value - 1)
            case LessThanOrEqual():
                up_to = min(up_to, value)
        self.span = Span(after, max(after, up_to))


def _literal(value: int | bytes | bytearray | str) -> str:
    if isinstance(value, str):
        return literal(string_key(value))
    return literal(bytes(value) if isinstance(value, bytearray) else value)
