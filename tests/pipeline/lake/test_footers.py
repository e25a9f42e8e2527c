"""Footers of Parquet files that no writer of a lake has written."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import polars as pl
import pyarrow.parquet as pq
import pytest
from strata.protocol.sequences import Span
from strata_pipeline.lake.contents import UNREADABLE, read_rows
from strata_pipeline.lake.footers import check_content, check_end, check_footer, footer_of
from strata_pipeline.lake.statistics import false_statistics
from strata_pipeline.lake.thrift import decode

from tests.support.footers import change, chunk, encode, read
from tests.support.toy_lakes import place, rows_table

Edit = Callable[[dict[str, Any]], object]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "rows.parquet"
    pq.write_table(rows_table([place(n) for n in range(1, 11)]), path, row_group_size=5)
    return path


def data(footer: dict[str, Any], column: str = "timestamp") -> dict[str, Any]:
    told: dict[str, Any] = chunk(footer, column)["3R"]
    return told


def test_a_footer_says_what_was_written(path):
    with path.open("rb") as file:
        footer = footer_of(file)
    assert (footer.rows, [group.rows for group in footer.groups]) == (10, [5, 5])
    body, told = read(path)
    assert decode(encode(told))[0] == told == decode(path.read_bytes(), len(body))[0]
    check_footer(path)
    check_content(path.read_bytes())


def test_what_another_version_or_program_may_write_is_read(path):
    rows = pq.read_table(path)
    others: list[Callable[[Path], object]] = [
        lambda path: pq.write_table(rows, path, data_page_version="2.0"),
        lambda path: pq.write_table(rows, path, write_page_index=True, compression="zstd"),
        lambda path: pl.DataFrame(rows).write_parquet(path),
        lambda path: change(path, lambda footer, _: data(footer).update({"31S": b"not known yet"})),
        lambda path: change(path, lambda footer, _: footer["2A"][1].update({"6I": 18})),
        lambda path: change(path, lambda footer, _: note(*COLUMNS)(footer)),
    ]
    for write in others:
        pq.write_table(rows, path)
        write(path)
        check_footer(path)
        assert [*false_statistics(path, -(2**63), 2**63 - 1)] == []


def note(*columns: tuple[str, str]) -> Edit:
    """A note by which Spark takes a file to have these columns."""
    fields = [{"name": name, "type": kind, "nullable": True, "metadata": {}} for name, kind in columns]
    text = json.dumps({"type": "struct", "fields": fields}).encode()
    told = {"1S": b"org.apache.spark.sql.parquet.row.metadata", "2S": text}
    return lambda footer: footer.update({"5A": [told]})


COLUMNS = [
    *((name, "long") for name in ("sequence", "received_at", "timestamp", "expires_at")),
    ("packet_id", "binary"), ("author_id", "string"), ("content_type", "string"), ("size", "integer"),
    ("body", "binary"), ("annotation", "binary"),
]  # fmt: skip
FALSE: dict[str, tuple[str, Edit]] = {
    "rows of the file": ("counts other rows", lambda footer: footer.update({"3L": 11})),
    "rows of a group": ("5 values for 4 rows", lambda footer: footer.update(
        {"3L": 9, "4A": [{**footer["4A"][0], "3L": 4}, footer["4A"][1]]})),
    "values of a column": ("6 values for 5 rows", lambda footer: data(footer).update({"5L": 6})),
    "a size by which Spark finds no group": (
        "another size", lambda footer: footer["4A"][0].update({"6L": 2**40})),
    "another beginning": (
        "begins elsewhere", lambda footer: footer["4A"][0].update({"5L": 2**40})),
    "names exchanged": ("another name", lambda footer: data(footer).update({"3A": [b"received_at"]})),
    "a type": ("another name or type", lambda footer: data(footer).update({"1I": 1})),
    "a number of another type": (
        "missing required field `5L`", lambda footer: data(footer).update({"5I": data(footer).pop("5L")})),
    "columns of a column": ("schema is not a list", lambda footer: footer["2A"][0].update({"5I": 9})),
    "numbers as text": ("declared as another type", lambda footer: footer["2A"][1].update({"6I": 0})),
    "a column less": ("other columns", lambda footer: footer["4A"][0]["1A"].pop()),
    "pages beyond the end": ("not in the file", lambda footer: data(footer).update({"7L": 2**20})),
    "a dictionary behind": ("dictionary follows", lambda footer: data(footer).update({"11L": 2**20})),
    "short bounds": ("not numbers", lambda footer: data(footer)["12R"].update({"5S": b"1"})),
    "levels of another column": ("counts by level", lambda footer: data(footer)["16R"].update({"3A": [1]})),
    "bytes of numbers": ("bytes of numbers", lambda footer: data(footer)["16R"].update({"1L": 1})),
    "a column that Spark does not see": ("note for Spark", note(*COLUMNS[:-1])),
    "a column that Spark sees under another name": ("note for Spark", note(("x", "long"), *COLUMNS[1:])),
    "a type for Spark": ("note for Spark", note(("sequence", "integer"), *COLUMNS[1:])),
    "no columns for Spark": ("Object missing required field", lambda footer: footer.update(
        {"5A": [{"1S": b"org.apache.spark.sql.parquet.row.metadata", "2S": b"{}"}]})),
    "another file": ("Expected `null`.*1S", lambda footer: chunk(footer, "timestamp").update({"1S": b"x"})),
    "encryption": ("Expected `null`.*8R", lambda footer: footer.update({"8R": {"1R": {}}})),
    "an index beyond the end": (
        "index is not in the file", lambda footer: chunk(footer, "timestamp").update({"4L": 4, "5I": 2**20})),
}  # fmt: skip


@pytest.mark.parametrize("what", FALSE)
def test_what_readers_take_in_different_ways_is_refused(path, what):
    why, edit = FALSE[what]
    change(path, lambda footer, _: edit(footer))
    with pytest.raises(ValueError, match=why) as refused:
        check_footer(path)
    assert str(refused.value).startswith(f"{path}: ")


def test_a_file_that_has_changed_is_checked_again(path):
    check_footer(path)
    change(path, lambda footer, _: footer.update({"3L": 11}))
    with pytest.raises(ValueError, match="counts other rows"):
        check_footer(path)


def test_what_follows_a_footer_or_is_cut_off_is_refused(path):
    whole, end = path.read_bytes(), len(read(path)[0])
    size = int.from_bytes(whole[-8:-4], "little")
    longer = whole[:-8] + b"x" + (size + 1).to_bytes(4, "little") + b"PAR1"
    shorter = whole[:-9] + (size - 1).to_bytes(4, "little") + b"PAR1"
    far = whole[:-8] + (end + size).to_bytes(4, "little") + b"PAR1"
    for one in (longer, shorter, far, b"", b"PAR1", whole[:-1], b"QAR1" + whole[4:]):
        with pytest.raises(ValueError):
            check_content(one)


def test_of_a_large_file_the_end_is_enough(path):
    whole, begin = path.read_bytes(), len(read(path)[0])
    check_end(whole[begin:], len(whole))
    check_end(whole, len(whole))
    for end, size in ((whole[begin + 1 :], len(whole)), (b"PAR1", 4), (whole[:-1], len(whole) - 1)):
        with pytest.raises(ValueError, match="or its footer is longer than these bytes"):
            check_end(end, size)
    with pytest.raises(ValueError, match="pages are not in the file"):
        check_end(whole[begin:], len(whole) - begin)


def test_a_huge_footer_is_refused_before_it_is_read(path):
    body, _ = read(path)
    size = 8 * 2**20 + 1
    with pytest.raises(ValueError, match=f"its footer has {size} bytes, and may have {size - 1}"):
        check_content(bytes(body) + bytes(size) + size.to_bytes(4, "little") + b"PAR1")


def test_no_byte_that_was_changed_in_a_footer_ends_the_process(path):
    """pyarrow ends it for some of these, when it is asked for statistics."""
    pq.write_table(rows_table([place(1)]), path, store_schema=False)
    whole, end = path.read_bytes(), len(read(path)[0])
    child = os.fork()
    if not child:
        try:
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
            for at in range(end, len(whole)):
                path.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
                with contextlib.suppress(*UNREADABLE):
                    list(read_rows([path], ["sequence"], Span(0, 2**62)))
            os._exit(0)
        finally:
            os._exit(1)
    assert os.waitpid(child, 0)[1] == 0
