"""The paths that modules had before the rings: `strata.channel` is now `strata.txrx`, and so on.

Until 1.0 the old paths lead to the new modules, so that programs written for them keep working. Nothing in
this project uses them. A class is the same object under either path (docs/reference/versioning.md).
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Sequence
from importlib.abc import InspectLoader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import CodeType, ModuleType
from typing import Any

__all__ = ["OLD_MODULES", "OLD_NAMES", "install"]

_RINGS = {
    "protocol": (
        "auth canonical documents equivalence errors fields ids keys lake packets provenance secret_files "
        "typed wire"
    ),
    "relays": "backoff bootstrap curation pool resolver uris",
    "channels": "encryption messaging nodes persistence rate_limit reliable sds segmentation",
    "tools": "cli conformance sim",
}
_MERGED_IN_SDS = {
    "fresh": "outgoing",
    "ids": "messages",
    "history": "log",
    "journal": "state",
    "ledger": "log",
    "own_name": "incoming",
    "pace": "sync",
    "receiving": "incoming",
    "restoring": "state",
    "statistics": "events",
    "tips": "log",
}
OLD_MODULES = {
    **{f"strata.{name}": f"strata.{ring}.{name}" for ring, names in _RINGS.items() for name in names.split()},
    "strata.channel": "strata.txrx",
    "strata.channel.framing": "strata.txrx.multipart",
    "strata.channel.inbox": "strata.txrx.queue",
    "strata.relay": "strata.relays.connection",
    "strata.txrx.framing": "strata.txrx.multipart",
    **{
        f"{package}.{old}": f"strata.channels.sds.{new}"
        for package in ("strata.sds", "strata.channels.sds")
        for old, new in _MERGED_IN_SDS.items()
    },
}
"""Old modules, and the new ones. The modules of a package moved with it, unless they are listed here."""

_TX_RX_ERRORS = {
    "ChannelClosed": "TxRxClosed",
    "ChannelError": "TxRxError",
    "ChannelIOError": "TxRxIOError",
    "Delivery": "DeliveryStatus",
}
OLD_NAMES: dict[str, dict[str, str]] = {
    "strata.conformance": {"Level": "Keyword"},
    "strata.curation": {"Received": "Arrival"},
    "strata.pool.reputation": {"Kind": "Aspect"},
    "strata.sds": {"Statistics": "SdsStatistics"},
    "strata.sim": {"Checks": "PromiseChecks"},
    "strata.reliable": {"ChannelError": "ReliableError"},
    "strata.reliable.errors": {"ChannelError": "ReliableError"},
    "strata.channel": {"ChannelSettings": "TxRxSettings", "Codec": "MessageCodec", **_TX_RX_ERRORS},
    "strata.channel.codecs": {"Codec": "MessageCodec"},
    "strata.channel.errors": _TX_RX_ERRORS,
    "strata.channel.inbox": {"Inbox": "RxQueue"},
    "strata.channel.metrics": {"ChannelMetrics": "TxRxMetrics"},
    "strata.channel.settings": {"ChannelSettings": "TxRxSettings"},
    "strata.sds.fresh": {"Fresh": "WireCache"},
    "strata.sds.ledger": {"Ledger": "History"},
    "strata.sds.log": {"Entry": "LoggedMessage", "Log": "MessageLog"},
    "strata.sds.tips": {"Tips": "Unreferenced"},
    "strata.keys": {"Standing": "KeyStanding"},
}
"""By old module: the names that are different in the new one, old and new."""


class _OldModule(ModuleType):
    """A module under its old path; its names are looked up in the new module at their first use."""

    def __init__(self, old: str, new: str) -> None:
        super().__init__(old)
        self.__dict__["_new"] = new

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name not in ("__all__", "__doc__"):
            raise AttributeError(name)
        renamed = OLD_NAMES.get(self.__name__, {}).get(name, name)
        new = importlib.import_module(self.__dict__["_new"])
        strata = sys.modules["strata"]
        if not hasattr(new, renamed) and renamed in strata.__all__:
            return getattr(strata, renamed)  # `connect` and `Relay` are now in an outer ring
        return getattr(new, renamed)

    def __dir__(self) -> list[str]:
        return sorted(
            {*dir(importlib.import_module(self.__dict__["_new"])), *OLD_NAMES.get(self.__name__, ())}
        )


class _Finder(MetaPathFinder, InspectLoader):
    """Finds old modules, after the other finders have found nothing under that name."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        new = _moved(fullname)
        found = None if new is None else importlib.util.find_spec(new)
        if found is None:
            return None
        is_package = found.submodule_search_locations is not None
        return ModuleSpec(fullname, self, origin=found.origin, is_package=is_package)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        new = _moved(spec.name)
        assert new is not None, "only old modules are found here"
        return _OldModule(spec.name, new)

    def exec_module(self, module: ModuleType) -> None:
        """Do nothing: the new module is loaded when a name is looked up."""

    def get_code(self, fullname: str) -> CodeType | None:
        """Return the code for `python -m` with an old name."""
        new = _moved(fullname)
        found = None if new is None else importlib.util.find_spec(new)
        loader = None if found is None else found.loader
        return loader.get_code(found.name) if found and isinstance(loader, InspectLoader) else None

    def get_source(self, fullname: str) -> str | None:
        return None


def _moved(fullname: str) -> str | None:
    parts = fullname.split(".")
    for length in (4, 3, 2):
        head = ".".join(parts[:length])
        if head in OLD_MODULES:
            return ".".join([OLD_MODULES[head], *parts[length:]])
    return None


def install() -> None:
    """Make the old paths importable. Importing `strata` does this, once."""
    sys.meta_path.append(_Finder())
