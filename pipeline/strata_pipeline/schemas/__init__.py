"""The schemas of all datasets: one TOML file for each, with one table for each column, in order.

[sequence]
type = "long"               # as Spark writes it: long, int, double, string, binary, date, array<string>, …
required = true             # NOT NULL; the default is false
is = "place in the log"     # its meaning and unit
"""

from __future__ import annotations

import functools
import tomllib
from importlib.resources import files
from typing import NotRequired, TypedDict

from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    BooleanType,
    DataType,
    DateType,
    DoubleType,
    IntegerType,
    LongType,
    StringType,
    StructField,
    StructType,
)

__all__ = ["schema"]

_TYPES: dict[str, DataType] = {
    "binary": BinaryType(),
    "boolean": BooleanType(),
    "date": DateType(),
    "double": DoubleType(),
    "int": IntegerType(),
    "long": LongType(),
    "string": StringType(),
}


_Column = TypedDict("_Column", {"type": str, "is": NotRequired[str], "required": NotRequired[bool]})
"""What a schema file says of a column."""


@functools.cache
def schema(name: str) -> StructType:
    """The schema in `{name}.toml`. It needs no Spark session, so executors can read it too."""
    text = files(__name__).joinpath(f"{name}.toml").read_text(encoding="utf-8")
    return StructType([_field(column, told) for column, told in tomllib.loads(text).items()])


def _field(name: str, told: _Column) -> StructField:
    metadata = {"comment": told["is"]} if "is" in told else {}
    return StructField(name, _type(told["type"]), not told.get("required", False), metadata)


def _type(text: str) -> DataType:
    if text.startswith("array<"):
        return ArrayType(_type(text[6:-1]), containsNull=False)
    return _TYPES[text]
