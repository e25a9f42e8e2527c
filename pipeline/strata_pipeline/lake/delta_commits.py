"""Commits of a Delta log as the text of their files, for a commit that only adds files. No I/O.

Delta's library reads the whole log before it commits, and again afterwards. To say that a few files were
added, none of that is needed. Source: the Delta transaction log protocol, "Delta Log Entries" and "Actions".
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple
from urllib.parse import quote

import msgspec
from deltalake.exceptions import DeltaError
from deltalake.transaction import AddAction

__all__ = ["Commit", "encode_commit", "read_commit"]


class Commit(NamedTuple):
    """What a commit says of itself."""

    transaction: int | None
    """The version of the application's transaction, if the commit has one."""
    info: Mapping[str, object]
    """Who made it, and what they noted."""


class _Transaction(msgspec.Struct, rename="camel"):
    app_id: str
    version: int


class _Action(msgspec.Struct, rename="camel"):
    commit_info: dict[str, object] = {}
    txn: _Transaction | None = None


_actions_of = msgspec.json.Decoder(_Action).decode_lines


def read_commit(text: bytes, app: str) -> Commit:
    """What a commit says of itself, and of the transaction of an application. Raises `DeltaError`."""
    transaction: int | None = None
    info: dict[str, object] = {}
    try:
        actions = _actions_of(text)
    except ValueError as error:
        raise DeltaError(f"its last commit is damaged: {error}") from None
    for action in actions:
        info = action.commit_info or info
        if action.txn is not None and action.txn.app_id == app:
            transaction = action.txn.version
    return Commit(transaction, info)


def encode_commit(
    added: Iterable[AddAction],
    partitions: Iterable[str],
    app: str,
    transaction: int,
    noted: Mapping[str, str],
    now: float,
) -> bytes:
    """The text of a commit that adds files and records a transaction of an application, at a time in Unix
    seconds; `noted` are more members of its information."""
    info = {
        "timestamp": int(now * 1000),
        "operation": "WRITE",
        "operationParameters": {"mode": "Append", "partitionBy": _text(list(partitions))},
        **noted,
    }
    actions: list[dict[str, Any]] = [{"commitInfo": info}]
    actions += ({"add": _add(action)} for action in added)
    actions.append({"txn": {"appId": app, "version": transaction, "lastUpdated": int(now * 1000)}})
    return "".join(f"{_text(action)}\n" for action in actions).encode()


def _text(value: object) -> str:
    return json.dumps(value, separators=(",", ":"))


def _add(action: AddAction) -> dict[str, object]:
    return {
        "path": quote(action.path, safe="/="),  # the protocol has paths as URIs
        "partitionValues": dict(action.partition_values),
        "size": action.size,
        "modificationTime": action.modification_time,
        "dataChange": action.data_change,
        "stats": action.stats,
    }
