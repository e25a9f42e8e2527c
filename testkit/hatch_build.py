"""Where this distribution finds the library: beside it in a checkout, on the index once it is released."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

__all__ = ["CustomMetadataHook"]

RELEASED = ">=0.2,<0.3"


class CustomMetadataHook(MetadataHookInterface):
    """Adds the library to the dependencies. A build with STRATA_RELEASE set names the released one."""

    def update(self, metadata: dict[str, Any]) -> None:
        beside = Path(self.root).parent / "client"
        in_checkout = (beside / "pyproject.toml").exists() and "STRATA_RELEASE" not in os.environ
        library = self.config["library"] + (f" @ {beside.as_uri()}" if in_checkout else RELEASED)
        metadata["dependencies"] = [library, *self.config["dependencies"]]
