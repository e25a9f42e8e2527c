"""A lake's part of a bucket, through the S3 protocol.

Objects appear as a whole or not at all, and nothing is renamed. Commits use `put_new`: if two writers put the
same name, the store refuses the second. If the response was lost, reading the object shows who was first.

The connection is made where it is needed: a store is sent to executors as its settings. Keys in the
environment of the job are sent with it; without such keys each executor uses what its machine offers.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from itertools import islice
from typing import NamedTuple, TypeVar

import obstore
from obstore.exceptions import AlreadyExistsError, BaseError
from obstore.store import S3Store

from strata_pipeline.errors import ObjectStoreError, UsageError
from strata_pipeline.lake.stores.limits import check_size
from strata_pipeline.lake.stores.schemes import SCHEME

__all__ = ["ObjectStore", "Stored", "several"]

_One = TypeVar("_One")
_Found = TypeVar("_Found")

_is_place = re.compile(
    r"s3://([A-Za-z0-9][A-Za-z0-9._-]{1,253}[A-Za-z0-9])((?:/[A-Za-z0-9_.=-]+)*)/*"
).fullmatch
_SETTINGS = {
    "access_key_id": ("AWS_ACCESS_KEY_ID",),
    "secret_access_key": ("AWS_SECRET_ACCESS_KEY",),
    "session_token": ("AWS_SESSION_TOKEN",),
    "region": ("AWS_REGION", "AWS_DEFAULT_REGION"),
    "endpoint": ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL"),
}
_PLAIN_HTTP = "AWS_ALLOW_HTTP"
_PATIENCE = timedelta(seconds=60)
"""How long a request that fails for a temporary reason is retried."""
_TRANSFER = timedelta(minutes=10)
_AT_ONCE = 16
_LOOKS = 5


@functools.cache
def _threads(count: int) -> ThreadPoolExecutor:
    """Threads that wait for stores. Starting new ones for each call would take longer than most requests."""
    return ThreadPoolExecutor(count, "objects")


os.register_at_fork(after_in_child=_threads.cache_clear)


def several(
    asked: Callable[[_One], _Found], some: Sequence[_One], at_once: int = _AT_ONCE
) -> Iterator[_Found]:
    """The results of calling `asked` for each, in this order, with several calls at a time.

    When this ends, even with an error, no call is running any more.
    """
    if len(some) == 1:
        yield asked(some[0])
        return
    left = [_threads(at_once).submit(asked, one) for one in some][::-1]
    try:
        while left:
            found = left[-1].result()
            left.pop()
            yield found
    finally:
        for one in left:
            one.cancel()
        wait(left)


@functools.lru_cache(64)
def _connected(bucket: str, prefix: str, settings: tuple[tuple[str, str], ...], plain_http: bool) -> S3Store:
    """One store for each place in a process: each has its own client, which reads all certificates."""
    return S3Store(
        bucket,
        prefix=prefix or None,
        config=dict(settings),  # type: ignore[arg-type]  # its own names, chosen above
        client_options={"allow_http": plain_http, "timeout": _TRANSFER},
        retry_config={"max_retries": 10, "retry_timeout": _PATIENCE},
    )


class Stored(NamedTuple):
    """An object in a list."""

    name: str
    modified_at: datetime
    """By the clock of the store."""
    version: str
    """What the store calls these bytes (its ETag); after another put under the same name it differs."""


@dataclass(frozen=True, eq=False)
class ObjectStore:
    """The objects of a bucket whose keys begin with a prefix; names are keys below it.

    Every method raises `ObjectStoreError` where the store cannot be reached or refuses.
    """

    bucket: str
    prefix: str
    settings: Mapping[str, str] = field(repr=False)
    """The settings, under the names that `S3Store` uses."""
    plain_http: bool = False
    _opened: list[S3Store] = field(default_factory=list, repr=False, compare=False)

    @classmethod
    def at(cls, place: str, environ: Mapping[str, str] = os.environ) -> ObjectStore:
        """The store that `s3://bucket/prefix` and the environment name. Raises `UsageError`."""
        found = _is_place(place)
        if found is None or ".." in found[2]:
            raise UsageError(f"{place} is not a place for a lake: it is written s3://bucket/prefix")
        settings = {}
        for name, variables in _SETTINGS.items():
            told = next((environ[one] for one in variables if environ.get(one)), None)
            if told is not None:
                settings[name] = told
        plain_http = environ.get(_PLAIN_HTTP, "").lower() in ("true", "1", "yes")
        if settings.get("endpoint", "").startswith("http://") and not plain_http:
            raise UsageError(
                f"{settings['endpoint']} is not encrypted, and whoever listens reads the packets: use "
                f"https://, or say that it is meant with {_PLAIN_HTTP}=true"
            )
        return cls(found[1], found[2].strip("/"), settings, plain_http)

    def __getstate__(self) -> tuple[str, str, dict[str, str], bool]:
        return self.bucket, self.prefix, dict(self.settings), self.plain_http

    def __setstate__(self, state: tuple[str, str, dict[str, str], bool]) -> None:
        for name, value in zip(("bucket", "prefix", "settings", "plain_http"), state, strict=True):
            object.__setattr__(self, name, value)
        object.__setattr__(self, "_opened", [])

    def url(self, name: str = "") -> str:
        """Where an object is, for messages."""
        return SCHEME + "/".join(part for part in (self.bucket, self.prefix, name) if part)

    def get(self, name: str, most: int | None = None) -> bytes:
        """The bytes of an object. Raises `FileNotFoundError`, and `LakeError` if it has more than `most`."""
        with self._told(name):
            found = obstore.get(self._store(), name)
            if most is not None:
                check_size(self.url(name), found.meta["size"], most)
            return bytes(found.bytes())

    def get_range(self, name: str, start: int, end: int) -> bytes:
        """The bytes of an object from `start` up to `end`, of which there is one at least. Raises
        `FileNotFoundError`, and `ValueError` for an object that ends earlier."""
        with self._told(name):
            try:
                found = bytes(obstore.get_range(self._store(), name, start=start, end=end))
            except (BaseError, OSError):
                size = obstore.head(self._store(), name)["size"]
                if size >= end:
                    raise
            else:
                if len(found) == end - start:
                    return found
                size = start + len(found)
        raise ValueError(f"{self.url(name)} has {size:,} bytes, and {end:,} were written")

    def get_end(self, name: str, size: int, most: int) -> bytes:
        """The last bytes of an object of this size. Raises as `get_range` does."""
        return self.get_range(name, max(0, size - most), size)

    def get_all(self, names: Iterable[str], most: int | None = None) -> Iterator[bytes]:
        """The bytes of each object, in this order, read several at a time. Raises as `get` does."""
        left = iter(names)
        while some := list(islice(left, 4 * _AT_ONCE)):
            yield from several(lambda name: self.get(name, most), some)

    def exists(self, name: str) -> bool:
        """Whether there is an object with this name."""
        with self._told(name):
            try:
                obstore.head(self._store(), name)
            except FileNotFoundError:
                return False
            return True

    def all_exist(self, names: Iterable[str]) -> Iterator[bool]:
        """Whether there is an object with each name, in this order, checked several at a time."""
        return several(self.exists, list(names))

    def put(self, name: str, content: bytes) -> None:
        """Put an object, replacing any other."""
        with self._told(name):
            # In one request: parts of an interrupted upload would stay, invisible but billed.
            obstore.put(self._store(), name, content, use_multipart=False)

    def put_new(self, name: str, content: bytes) -> bool:
        """Put an object if there is none with this name; return whether it is there with these bytes.

        Of two calls that put different bytes, at most one returns True.
        """
        for _ in range(_LOOKS):
            try:
                obstore.put(self._store(), name, content, mode="create", use_multipart=False)
                return True
            except AlreadyExistsError:
                pass  # or the response to a first request was lost, and the request was sent again
            except (BaseError, OSError) as error:
                if not self.exists(name):
                    raise self._failed(name, error) from None
            with contextlib.suppress(FileNotFoundError):  # the store refused a rival too: try again
                return self.get(name) == content
        raise ObjectStoreError(f"{self.url(name)} is neither there nor can it be put: run this again later")

    def keys(self, folder: str, after: str = "") -> Iterator[str]:
        """The names below a folder in order, only those after `after` if it is given."""
        return (one.name for one in self.listed(folder, after))

    def listed(self, folder: str, after: str = "") -> Iterator[Stored]:
        """The objects below a folder in order of their names, only those after `after` if it is given.

        Some tools put an empty object for a folder, which has the folder's name: it is left out.
        """
        with self._told(folder):
            try:
                for page in obstore.list(self._store(), folder, offset=after or None):
                    for one in page:
                        if one["path"] != folder:
                            yield Stored(one["path"], one["last_modified"], one["e_tag"] or "")
            except FileNotFoundError as error:
                raise self._failed("", error) from None

    def directly_below(self, folder: str) -> tuple[list[str], list[str]]:
        """The names of the folders directly below a folder, and those of the objects."""
        with self._told(folder):
            found = obstore.list_with_delimiter(self._store(), folder)
            folders = (one.removeprefix(f"{folder}/").rstrip("/") for one in found["common_prefixes"])
            return sorted(folders), sorted(one["path"] for one in found["objects"] if one["path"] != folder)

    def delete(self, names: Iterable[str]) -> None:
        """Delete objects one after the other; those that do not exist are skipped."""
        for name in names:
            with self._told(name), contextlib.suppress(FileNotFoundError):
                obstore.delete(self._store(), name)

    def delete_all(self, names: Iterable[str]) -> None:
        """Delete objects, several at a time and in no particular order."""
        for _ in several(lambda name: self.delete([name]), list(names)):
            pass

    def _store(self) -> S3Store:
        if not self._opened:
            settings = tuple(sorted(self.settings.items()))
            self._opened.append(_connected(self.bucket, self.prefix, settings, self.plain_http))
        return self._opened[0]

    @contextlib.contextmanager
    def _told(self, name: str) -> Iterator[None]:
        try:
            yield
        except FileNotFoundError:
            raise FileNotFoundError(f"{self.url(name)} is missing") from None
        except (BaseError, OSError) as error:
            raise self._failed(name, error) from None

    def _failed(self, name: str, error: Exception) -> ObjectStoreError:
        return ObjectStoreError(f"the object store, at {self.url(name)}: {str(error).splitlines()[0]}")
