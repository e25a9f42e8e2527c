"""Where a build of this distribution finds the library and the schema: beside it in a checkout."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface
from hatchling.metadata.plugin.interface import MetadataHookInterface

__all__ = ["CustomBuildHook", "CustomMetadataHook"]

RELEASED = ">=0.2,<0.3"


class CustomMetadataHook(MetadataHookInterface):
    """Adds the library to the dependencies. A build with STRATA_RELEASE set names the released one."""

    def update(self, metadata: dict[str, Any]) -> None:
        beside = Path(self.root).parent / "client"
        in_checkout = (beside / "pyproject.toml").exists() and "STRATA_RELEASE" not in os.environ
        library = self.config["library"] + (f" @ {beside.as_uri()}" if in_checkout else RELEASED)
        metadata["dependencies"] = [library, *self.config["dependencies"]]


class CustomBuildHook(BuildHookInterface[Any]):
    """Puts the schema into what is built, from the folder beside this one; an sdist has it inside."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        beside = Path(self.root).parent / "migrations"
        if version != "editable" and beside.is_dir():
            build_data["force_include"][str(beside)] = "_migrations"
