"""Small lakes made without a log and without Spark, for tests of files."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.dataset as pads
import pyarrow.parquet as pq
from blake3 import blake3
from msgspec.structs import replace
from strata.protocol.sequences import Span, first_of_day
from strata_pipeline.lake.checking import unit_faults, units_of_day
from strata_pipeline.lake.contents import contents_of
from strata_pipeline.lake.faults import Fault
from strata_pipeline.lake.lake import Lake
from strata_pipeline.lake.rows import digest_of, read_places
from strata_pipeline.lake.state import LakeState
from strata_pipeline.lake.stores.objects import ObjectStore
from strata_pipeline.lake_format import Manifest, encode_witnesses, manifests_of_day, witnesses_hash

__all__ = [
    "DAY",
    "compacted",
    "faults",
    "file_faults",
    "files_below",
    "manifest_of",
    "manifest_once",
    "newest_files",
    "place",
    "read",
    "rows_file",
    "rows_in",
    "rows_table",
    "staged",
    "witnessed",
    "write_batch",
]

DAY = 20_000

_PACKETS = pa.schema(
    [
        ("sequence", pa.int64()),
        ("received_at", pa.int64()),
        ("timestamp", pa.int64()),
        ("expires_at", pa.int64()),
        ("packet_id", pa.binary()),
        ("author_id", pa.string()),
        ("content_type", pa.string()),
        ("size", pa.int32()),
        ("body", pa.binary()),
        ("annotation", pa.binary()),
    ]
)
_QUARANTINE = _PACKETS.append(pa.field("reason", pa.string())).append(pa.field("detail", pa.string()))


def place(ordinal: int, day: int = DAY) -> int:
    """A sequence."""
    return first_of_day(day) + ordinal


def rows_table(sequences: Iterable[int], *, kind: str = "POST", quarantined: bool = False) -> pa.Table:
    """Rows at these places, all different; every third is annotated."""
    rows: list[dict[str, Any]] = []
    for sequence in sequences:
        body = b'{"text":"%d"}' % sequence
        rows.append(
            {
                "sequence": sequence,
                "received_at": (sequence >> 32) * 86_400 + (sequence & 0xFFFF),
                "timestamp": sequence & 0xFFFF,
                "expires_at": None,
                "packet_id": blake3(b"%d" % sequence).digest(),
                "author_id": "did:key:somebody",
                "content_type": kind,
                "size": len(body),
                "body": body,
                "annotation": b'{"found":1}' if (sequence & 0xFF) % 3 == 0 else None,
                "reason": "malformed_json",
                "detail": None,
            }
        )
    return pa.Table.from_pylist(rows, schema=_QUARANTINE if quarantined else _PACKETS)


@lru_cache(10_000)
def rows_file(sequences: tuple[int, ...], *, kind: str = "POST", quarantined: bool = False) -> bytes:
    """A Parquet file with these rows, cached: hundreds of lakes are made of the same few."""
    return _as_file(rows_table(sequences, kind=kind, quarantined=quarantined))


def staged(
    lake: Lake, ordinals: Iterable[int], quarantined: Iterable[int] = (), *, day: int = DAY
) -> tuple[Manifest, Path | None, Path | None]:
    """A batch in `_staging`, with two files in two kinds; returns the arguments of `commit`."""
    sound, aside = [place(n, day) for n in ordinals], [place(n, day) for n in quarantined]
    span = Span(lake.reached, max([*sound, *aside]))
    folder = lake.stage(span)
    folder.mkdir()
    packets = quarantine = None
    if sound:
        packets = folder / "packets"
        for kind, some in (("POST", sound[::2]), ("NOTE", sound[1::2])):
            if some:
                path = packets / f"kind={kind}" / f"part-{some[0]}.parquet"
                _write(path, rows_file(tuple(some), kind=kind))
    if aside:
        quarantine = folder / "quarantine"
        _write(quarantine / "part-0.parquet", rows_file(tuple(aside), quarantined=True))
    folders = [[one] if one else [] for one in (packets, quarantine)]
    return manifest_once(lake, span, sound, aside, *folders), packets, quarantine


def manifest_of(
    lake: LakeState,
    span: Span,
    packets: int,
    quarantined: int,
    folders: list[Path],
    aside: list[Path],
) -> Manifest:
    """The manifest of a lake's next batch, whose rows lie in these folders."""
    places = read_places([*folders, *aside])
    return Manifest(
        number=lake.chain.end.number,
        after=span.after,
        up_to=span.up_to,
        packets=packets,
        quarantined=quarantined,
        rows=digest_of(places),
        contents=contents_of(folders, aside, span),
        body_bytes=100,
        kinds={},
        last_packet_id=places["packet_id"][-1].as_py().hex(),
        last_received_at=places["received_at"][-1].as_py(),
        written_at=0,
        previous=lake.tip,
    )


_manifests: dict[tuple[tuple[int, ...], tuple[int, ...]], Manifest] = {}


def manifest_once(
    lake: LakeState,
    span: Span,
    sound: Sequence[int],
    quarantined: Sequence[int],
    folders: list[Path],
    aside: list[Path],
) -> Manifest:
    """As `manifest_of`, for rows of `rows_table`: the files of the same places are read back only once."""
    key = (*sound,), (*quarantined,)
    if key not in _manifests:
        counts = len(sound), len(quarantined)
        _manifests[key] = manifest_of(lake, span, *counts, folders, aside)
    return replace(_manifests[key], number=lake.chain.end.number, after=span.after, previous=lake.tip)


def witnessed(manifest: Manifest, times: Mapping[int, int]) -> tuple[Manifest, bytes]:
    """The manifest of a lake's next batch, and its file, if rows were first received at these times."""
    text = encode_witnesses(sorted(times.items()))
    return replace(manifest, witnesses=witnesses_hash(text)), text


def write_batch(
    path: Path,
    ordinals: Iterable[int],
    quarantined: Iterable[int] = (),
    *,
    day: int = DAY,
    times: Mapping[int, int] | None = None,
) -> Manifest:
    """Add a batch to a lake."""
    with Lake.write(path) as lake:
        manifest, packets, aside = staged(lake, ordinals, quarantined, day=day)
        text = b""
        if times is not None:
            manifest, text = witnessed(manifest, times)
        return lake.commit(manifest, packets, aside, text)


def compacted(lake: Lake, day: int, target: Path) -> None:
    """Write what a compaction would make of a day, into the folder of `staged_day`."""
    table = pads.dataset(lake.day_folder(day), schema=_PACKETS, format="parquet").to_table()
    for kind in ("POST", "NOTE"):
        some = table.filter(pads.field("content_type") == kind).sort_by("sequence")
        _write(target / f"kind={kind}" / "part-0.parquet", _as_file(some))


def read(lake: Path, root: str = "packets") -> list[int]:
    """The sequences that a plain reader finds, duplicates included."""
    folder = lake / root
    paths = [path for path in files_below(folder) if path.suffix == ".parquet"]
    return sorted(
        n
        for path in paths
        for n in pq.ParquetFile(path).read(["sequence"], use_threads=False)["sequence"].to_pylist()
    )


def newest_files(lake: Path) -> list[str]:
    """The files that a reader finds by the links, as the guide tells."""
    folders = [max(day.iterdir()) for day in (lake / "generations").glob("day=*")]
    return [str(file) for folder in folders for file in sorted(folder.glob("batch=*/kind=*/*.parquet"))]


def rows_in(paths: Iterable[str]) -> list[int]:
    """The sequences in these files."""
    found = (pq.ParquetFile(path).read(["sequence"], use_threads=False)["sequence"] for path in paths)
    return sorted(n for column in found for n in column.to_pylist())


def faults(path: Path) -> list[str]:
    """The faults that an audit of the files finds.

    Writers that are killed at every call leave the same files again and again: a lake without faults is
    audited once.
    """
    content = content_of(path)
    if content in _sound:
        return []
    lake = Lake.open(path)
    found = [str(folder) for folder in lake.foreign(beyond=True) + lake.strays()]
    found += [f"{fault.about}: {fault.reason}: {fault.detail}" for fault in file_faults(lake)]
    if not found:
        _sound.add(content)
    return found


_sound: set[bytes] = set()
"""What `content_of` gave for lakes without faults."""


def content_of(place: Path | str) -> bytes:
    """A hash over the names and bytes of all files of a lake, or of all its objects."""
    content = blake3()
    if isinstance(place, Path):
        paths = sorted(place.rglob("*"))
        names = [str(path.relative_to(place)) for path in paths]
        contents = [path.read_bytes() if path.is_file() else b"" for path in paths]
    else:
        store = ObjectStore.at(place)
        names = sorted(store.keys(""))
        contents = list(store.get_all(names))
    for name, found in zip(names, contents, strict=True):
        content.update(f"{name}\n".encode() + blake3(found).digest())
    return content.digest()


def file_faults(lake: Lake) -> list[Fault]:
    """The faults that an audit finds in the folders of batches."""
    found: list[Fault] = []
    for day in lake.days():
        for unit in units_of_day(lake, day, lake.erasures.told(manifests_of_day(lake.manifests, day))):
            found += unit_faults(unit)
    return found


def files_below(folder: Path) -> list[Path]:
    """The files that a plain reader sees."""
    return sorted(
        path
        for path in folder.rglob("*")
        if path.is_file() and not any(part.startswith(("_", ".")) for part in path.relative_to(folder).parts)
    )


def _write(path: Path, content: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)


def _as_file(table: pa.Table) -> bytes:
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink)
    return sink.getvalue().to_pybytes()  # type: ignore[no-any-return]
