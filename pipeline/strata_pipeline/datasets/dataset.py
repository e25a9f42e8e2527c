"""A DataFrame with the columns of its schema file, checked on construction."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Self

from pyspark.sql import DataFrame, SparkSession

from strata_pipeline.errors import DatasetError
from strata_pipeline.schemas import schema

__all__ = ["Dataset"]


@dataclass(frozen=True)
class Dataset:
    """The base of all datasets. A subclass names its schema: `class Hours(Dataset, schema="hours")`.

    Columns beyond the schema are dropped, the order of columns does not matter, and nothing is computed.
    Raises `DatasetError` for a column that is missing or has another type.
    """

    frame: DataFrame
    schema_name: ClassVar[str]

    def __init_subclass__(cls, schema: str) -> None:
        cls.schema_name = schema

    def __post_init__(self) -> None:
        wanted = schema(self.schema_name)
        # Compared by the names of types: to Spark, anything read from a file is nullable, also within a list.
        found = {field.name: field.dataType.simpleString() for field in self.frame.schema.fields}
        wrong = [
            f"{field.name} is {found.get(field.name, 'missing')}, not {field.dataType.simpleString()}"
            for field in wanted.fields
            if found.get(field.name) != field.dataType.simpleString()
        ]
        if wrong:
            raise DatasetError(f"not a dataset of {self.schema_name}: {'; '.join(wrong)}")
        if list(found) != wanted.names:  # each selection is another analysis of the whole plan
            object.__setattr__(self, "frame", self.frame.select(*wanted.names))

    @classmethod
    def empty(cls, spark: SparkSession) -> Self:
        """A dataset without rows."""
        return cls(spark.createDataFrame([], schema(cls.schema_name)))
