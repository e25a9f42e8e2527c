"""`spark.read.format("relay_log")` and `readStream`: the relay's log as a Spark data source.

    RelayLog.register(spark)
    spark.read.format("relay_log").option("url", URL).load()
    spark.readStream.format("relay_log").option("url", URL).load()

| option | default | |
|---|---|---|
| `url` | – | PostgreSQL (a replica works too); SELECT on `packets`, `packet_ids` and `log_head` is enough |
| `after` | 0 | read after this sequence; for a stream: `earliest`, `latest` or a sequence, where it begins |
| `up_to` | the head | read up to this sequence (not for streams) |
| `partitions` | 2 | the approximate number of equal parts of a read |
| `max_rows` | 200000 | for a stream: the most packets in a batch; 0 for no bound |

Name the wanted columns with `.schema("sequence long, author_id string")`: only these are read. The database
itself applies comparisons of numbers and equality of ids, authors and types. A read ends at the head of the
log at the time of planning, and so does a batch of a stream: every row up to that head is committed, and none
can appear there later (relayd assigns sequences under one lock).

A stream's offset `{"version": 1, "sequence": n}` says that everything up to `n` has been read.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, MutableMapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pyarrow as pa
from pyspark.sql import SparkSession
from pyspark.sql.datasource import (
    DataSource,
    DataSourceReader,
    DataSourceStreamReader,
    Filter,
    InputPartition,
)
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxRows,
    SupportsTriggerAvailableNow,
)
from pyspark.sql.types import StructType
from strata.protocol.sequences import Span

from strata_pipeline.errors import LogUnavailable, UsageError
from strata_pipeline.log.columns import arrow_schema, convert, select_list
from strata_pipeline.log.conditions import Conditions
from strata_pipeline.log.database import connect, log_state, read_span
from strata_pipeline.log.spans import LogState, advance, share_out
from strata_pipeline.schemas import schema
from strata_pipeline.spark_daemon import calm_planning

if TYPE_CHECKING:
    from adbc_driver_postgresql import dbapi as adbc

__all__ = ["FORMAT", "RelayLog"]

FORMAT = "relay_log"
_OFFSET_VERSION = 1
_LAST = 2**63 - 1

calm_planning()  # every process that plans a part of a read imports this module


class RelayLog(DataSource):
    """The data source; `RelayLog.register(spark)` registers it under its name."""

    def __init__(self, options: MutableMapping[str, str]) -> None:
        super().__init__(options)
        self._options = LogOptions.read(options)

    @classmethod
    def name(cls) -> str:
        """The name of the format."""
        return FORMAT

    @classmethod
    def register(cls, spark: SparkSession) -> None:
        """Register `relay_log` with a session, with filter pushdown enabled."""
        spark.conf.set("spark.sql.python.filterPushdown.enabled", "true")
        spark.dataSource.register(cls)

    def schema(self) -> StructType:
        """All columns of the log."""
        return schema("log")

    def reader(self, schema: StructType) -> DataSourceReader:
        """The reader for `spark.read`."""
        return _Reader(self._options, schema)

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:
        """The reader for `spark.readStream`."""
        return _StreamReader(self._options, schema)


@dataclass(frozen=True)
class LogOptions:
    """The options of one read."""

    url: str
    after: str
    up_to: int | None
    partitions: int
    max_rows: int

    @classmethod
    def read(cls, options: MutableMapping[str, str]) -> LogOptions:
        """The options of a read, from the mapping that Spark gives. Raises `UsageError`."""
        known = {"url", "after", "up_to", "partitions", "max_rows", "path"}
        unknown = sorted(name for name in options if name.lower() not in known)
        if unknown:
            raise UsageError(f"relay_log has no option {', '.join(unknown)}")
        url = options.get("url") or options.get("path")
        if not url:
            raise UsageError('relay_log needs option("url", "postgresql://…")')
        up_to = options.get("up_to")
        return cls(
            url,
            options.get("after", "0"),
            None if up_to is None else _number("up_to", up_to),
            max(1, _number("partitions", options.get("partitions", "2"))),
            _number("max_rows", options.get("max_rows", "200000")),
        )

    def start(self) -> int:
        """`after` as a sequence. Raises `UsageError`."""
        return 0 if self.after == "earliest" else _number("after", self.after)


@dataclass
class _Part(InputPartition):
    """The span that one task reads."""

    span: Span
    conditions: tuple[str, ...] = ()


class _Readable:
    """Reads a part of the log; the base of both readers."""

    def __init__(self, options: LogOptions, wanted: StructType) -> None:
        self._options = options
        self._schema = arrow_schema(wanted)

    def _read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        assert isinstance(partition, _Part)
        columns = select_list(self._schema.names) or "sequence"
        conditions = list(partition.conditions)
        with contextlib.closing(connect(self._options.url)) as connection:
            for batch in read_span(connection, partition.span, columns, conditions):
                yield convert(batch, self._schema)


class _Reader(_Readable, DataSourceReader):
    def __init__(self, options: LogOptions, wanted: StructType) -> None:
        super().__init__(options, wanted)
        up_to = options.up_to
        self._conditions = Conditions(Span(options.start(), _LAST if up_to is None else up_to))

    def pushFilters(self, filters: list[Filter]) -> Iterable[Filter]:
        return self._conditions.take(filters)

    def partitions(self) -> Sequence[InputPartition]:
        with contextlib.closing(connect(self._options.url)) as connection:
            state = log_state(connection)
        spans = state.spans(*self._conditions.span)
        sql = tuple(self._conditions.sql)
        return [_Part(span, sql) for span in share_out(spans, self._options.partitions)] or [
            _Part(Span(0, 0), ("false",))
        ]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        return self._read(partition)


class _StreamReader(_Readable, DataSourceStreamReader, SupportsTriggerAvailableNow):
    def __init__(self, options: LogOptions, wanted: StructType) -> None:
        super().__init__(options, wanted)
        self._connection: adbc.Connection | None = None
        self._last: int | None = None

    def initialOffset(self) -> dict[str, int]:
        """The start of a stream without a checkpoint."""
        return _offset(self._state().head if self._options.after == "latest" else self._options.start())

    def getDefaultReadLimit(self) -> ReadLimit:
        """The limit that `max_rows` sets."""
        return ReadMaxRows(self._options.max_rows) if self._options.max_rows else ReadAllAvailable()

    def prepareForTriggerAvailableNow(self) -> None:
        """Remember the head: this run reads no further."""
        self._last = self._state().head

    def latestOffset(self, start: dict[str, object], limit: ReadLimit) -> dict[str, int]:
        """The end of the next batch."""
        after = _sequence(start)
        state = self._state()
        if self._last is not None:
            state = LogState(min(state.head, self._last), state.removed_to, state.day_ends)
        rows = limit.max_rows if isinstance(limit, ReadMaxRows) else None
        return _offset(max(after, advance(state, after, rows)))

    def reportLatestOffset(self) -> dict[str, int]:
        """The head of the log, for Spark's progress reports."""
        return _offset(self._state().head)

    def partitions(self, start: dict[str, object], end: dict[str, object]) -> Sequence[InputPartition]:
        spans = self._state().spans(_sequence(start), _sequence(end))
        return [_Part(span) for span in share_out(spans, self._options.partitions)] or [
            _Part(Span(0, 0), ("false",))
        ]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        return self._read(partition)

    def stop(self) -> None:
        """Close the connection that is kept between batches."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _state(self) -> LogState:
        if self._connection is None:
            self._connection = connect(self._options.url)
        try:
            return log_state(self._connection)
        except LogUnavailable:
            self.stop()  # perhaps only the connection failed: the next query opens another one
            raise


def _offset(sequence: int) -> dict[str, int]:
    return {"version": _OFFSET_VERSION, "sequence": sequence}


def _sequence(offset: dict[str, object]) -> int:
    sequence = offset.get("sequence")
    if offset.get("version") != _OFFSET_VERSION or type(sequence) is not int:
        raise UsageError(
            f"the checkpoint holds an offset of another version ({offset}); begin with a new checkpoint and "
            'option("after", …)'
        )
    return sequence


def _number(name: str, text: str) -> int:
    try:
        number = int(text)
    except ValueError:
        number = -1
    if number < 0:
        raise UsageError(f"option {name}: {text!r} is neither a number of rows nor a sequence")
    return number
