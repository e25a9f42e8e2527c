"""Files whose statistics are not those of their rows: readers with a filter skip rows of theirs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import duckdb
import pyarrow.parquet as pq
import pytest
from strata_pipeline.lake.footers import check_footer
from strata_pipeline.lake.statistics import false_statistics
from strata_pipeline.lake.thrift import decode

from tests.support.footers import change, chunk, encode, read, statistics
from tests.support.toy_lakes import place, rows_table

MOST = 2**63 - 1
ROWS = rows_table([place(n) for n in range(1, 101)])
Edit = Callable[[dict[str, Any], bytearray], object]


def told(path: Path, first: int = -(2**63), last: int = MOST) -> list[str]:
    found = list(false_statistics(path, first, last))
    assert all((one.about, one.reason, one.file) == ("file", "statistics", str(path)) for one in found)
    return [one.detail.removeprefix(f"{path}, ") for one in found]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A file of two row groups, with an index of its pages, of which a column has some."""
    path = tmp_path / "rows.parquet"
    pq.write_table(
        ROWS, path, row_group_size=60, write_page_index=True, data_page_size=64, write_batch_size=16
    )
    return path


@pytest.mark.parametrize("options", [{}, {"row_group_size": 7}, {"write_page_index": True}])
@pytest.mark.parametrize("rows", [ROWS, ROWS.slice(0, 0), rows_table([place(3)], quarantined=True)])
def test_what_our_writers_write_is_true(tmp_path, rows, options):
    path = tmp_path / "rows.parquet"
    pq.write_table(rows, path, **options)
    assert told(path) == []


def test_a_file_with_many_pages_is_true(path):
    _, footer = read(path)
    assert len(pages(path, "body")) > 3 and "6L" in chunk(footer, "body")
    assert told(path) == []


def pages(path: Path, column: str) -> list[Any]:
    body, footer = read(path)
    return list(decode(bytes(body), chunk(footer, column)["4L"])[0]["1A"])


def set_bounds(column: str, **values: Any) -> Edit:
    names = {"old_max": "1S", "old_min": "2S", "nulls": "3L", "max": "5S", "min": "6S"}
    return lambda footer, _: statistics(footer, column).update({names[name]: values[name] for name in values})


def number(value: int) -> bytes:
    return value.to_bytes(8, "little", signed=True)


FALSE: dict[str, tuple[str, Edit]] = {
    "the greatest time of receipt": ("received_at", set_bounds("received_at", max=number(3))),
    "the least timestamp": ("timestamp", set_bounds("timestamp", min=number(40))),
    "a bound that is not exact": ("timestamp", set_bounds("timestamp", min=number(-40))),
    "older bounds": ("received_at", set_bounds("received_at", old_max=number(3))),
    "older bounds of bytes": ("packet_id", set_bounds("packet_id", old_min=b"", old_max=b"\xff" * 33)),
    "an author": ("author_id", set_bounds("author_id", min=b"did:key:t")),
    "a type": ("content_type", set_bounds("content_type", max=b"NOTE")),
    "an id": ("packet_id", set_bounds("packet_id", max=b"\x00")),
    "a body": ("body", set_bounds("body", min=b"{}")),
    "nulls": ("annotation", set_bounds("annotation", nulls=60)),
    "no nulls": ("annotation", set_bounds("annotation", nulls=0)),
    "bounds of nulls": ("expires_at", set_bounds("expires_at", min=number(1), max=number(1))),
    "a size": ("size", set_bounds("size", min=bytes(4), max=bytes(4))),
    "counts by level": (
        "annotation", lambda footer, _: chunk(footer, "annotation")["3R"]["16R"].update({"3A": [60, 0]})
    ),
    "encodings": (
        "author_id", lambda footer, _: chunk(footer, "author_id")["3R"].update({"2A": [3]})
    ),
    "counts of encodings": (
        "author_id", lambda footer, _: chunk(footer, "author_id")["3R"]["13A"][0].update({"3I": 9})
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", FALSE)
def test_a_false_statement_in_a_footer_is_told_with_file_group_and_column(path, what):
    column, edit = FALSE[what]
    change(path, edit)
    check_footer(path)
    [found] = told(path)
    assert found.startswith(f"row group 0: column {column}: "), found


def test_what_cannot_be_checked_is_a_fault_and_the_file_is_read(path):
    order = {"1I": 2, "2B": False, "3B": False}
    change(path, lambda footer, _: footer["4A"][1].update({"4A": [order]}))
    change(path, lambda footer, _: chunk(footer, "author_id")["3R"].update({"14L": 4, "15I": 99}))
    check_footer(path)
    assert len(told(path)) == 1 + len(ROWS.column_names)
    assert told(path)[0] == "row group 0: column author_id: it has a bloom filter"
    assert told(path)[1] == "row group 1: column sequence: its row group is said to be sorted"


def test_a_query_sees_less_than_such_a_file_holds(path):
    edit = set_bounds("timestamp", max=number(1), old_max=number(1))
    query = f"SELECT count(*) FROM read_parquet('{path}') WHERE timestamp BETWEEN 5 AND 9"
    assert duckdb.execute(query).fetchall() == [(5,)]
    change(path, edit)
    assert duckdb.execute(query).fetchall() == [(0,)]
    assert told(path) == ["row group 0: column timestamp: its bounds are not those of the rows"]


@pytest.mark.parametrize(("least", "greatest"), [(b'{"t', b'{"tf'), (b"", b"\xff")])
def test_shortened_bounds_of_bytes_are_true_unless_they_are_said_to_be_exact(path, least, greatest):
    def edit(footer: dict[str, Any], body: bytearray) -> None:
        set_bounds("body", min=least, max=greatest)(footer, body)
        statistics(footer, "body").update({"7B": exact, "8B": exact})

    exact = False
    change(path, edit)
    assert told(path) == []
    exact = True
    change(path, edit)
    assert told(path) == ["row group 0: column body: its bounds are not those of the rows"]


def test_statistics_may_be_absent(path):
    change(path, lambda footer, _: [one["3R"].pop("12R") for one in footer["4A"][0]["1A"]])
    assert told(path) == []


INDEX: dict[str, Callable[[dict[str, Any], dict[str, Any]], object]] = {
    "a greatest value": lambda index, _: index["3A"].__setitem__(1, b"{"),
    "a least value": lambda index, _: index["2A"].__setitem__(1, b"~"),
    "nulls": lambda index, _: index["5A"].__setitem__(1, 1),
    "a page of nulls": lambda index, _: index["1A"].__setitem__(1, True),
    "an order": lambda index, _: index.update({"4I": 2}),
    "counts by level": lambda index, _: index["7A"].__setitem__(1, 9),
    "a page less": lambda index, _: [index[name].pop() for name in ("1A", "2A", "3A", "5A")],
    "a place less": lambda _, offsets: offsets["1A"].pop(),
    "a first row": lambda _, offsets: offsets["1A"][1].update({"3L": 1}),
    "a place": lambda _, offsets: offsets["1A"][1].update({"1L": offsets["1A"][0]["1L"]}),
}


@pytest.mark.parametrize("what", INDEX)
def test_an_index_of_pages_that_is_false_is_told(path, what):
    def edit(footer: dict[str, Any], body: bytearray) -> None:
        one = chunk(footer, "body")
        index, offsets = (decode(bytes(body), one[name])[0] for name in ("6L", "4L"))
        INDEX[what](index, offsets)
        for places, struct in (("6L", "7I"), index), (("4L", "5I"), offsets):
            written = encode(struct)
            one.update(dict(zip(places, (len(body), len(written)), strict=True)))
            body += written

    change(path, edit)
    check_footer(path)
    [found] = told(path)
    assert found.startswith("row group 0: column body: its ") and found.count("index") + found.count("page")


def test_a_huge_index_is_refused_before_it_is_read(path):
    def edit(footer: dict[str, Any], body: bytearray) -> None:
        chunk(footer, "body").update({"4L": len(body), "5I": 8 * 2**20 + 1})
        body += bytes(8 * 2**20 + 1)

    change(path, edit)
    assert told(path) == ["row group 0: column body: its index has 8388609 bytes, and may have 8388608"]


def test_false_statistics_in_the_header_of_a_page_are_told(tmp_path):
    path = tmp_path / "rows.parquet"
    pq.write_table(ROWS, path)

    def edit(footer: dict[str, Any], body: bytearray) -> None:
        one = chunk(footer, "timestamp")["3R"]
        begin, end = one["11L"], one["11L"] + one["7L"]
        pages = bytes(body[begin:end])
        told = b"\x08" + number(100)  # with its length: in both kinds of bounds
        assert pages.count(told) == 2
        body[begin:end] = pages.replace(told, b"\x08" + number(7))

    change(path, edit)
    assert told(path) == ["row group 0: column timestamp: page 0: its bounds are not those of the rows"]


@pytest.mark.parametrize(
    ("name", "why"),
    [("2I", "page 0: it is said to have 7 nulls, and has 0"), ("3I", "is said to have 7 rows, and has 16")],
)
def test_false_counts_in_the_header_of_a_later_page_are_told(tmp_path, name, why):
    path = tmp_path / "rows.parquet"
    pq.write_table(
        ROWS, path, data_page_version="2.0", use_dictionary=False, data_page_size=1, write_batch_size=16
    )
    assert told(path) == []

    def edit(footer: dict[str, Any], body: bytearray) -> None:
        begin = chunk(footer, "body")["3R"]["9L"]
        header, end = decode(bytes(body), begin)
        header["8R"].update({name: 7})
        body[begin:end] = encode(header)

    change(path, edit)
    [found] = told(path)
    assert found.startswith("row group 0: column body: ") and found.endswith((why, f"{why} values"))


def test_each_row_group_is_looked_at_by_whoever_has_its_first_sequence(path):
    change(path, lambda footer, _: [statistics(footer, "size", n).update({"3L": 1}) for n in (0, 1)])
    second = place(61)
    assert [one.split(":")[0] for one in told(path, last=second - 1)] == ["row group 0"]
    assert [one.split(":")[0] for one in told(path, first=second)] == ["row group 1"]
