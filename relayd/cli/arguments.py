"""Options that many commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

__all__ = ["ConfigFile", "DataDir", "DataDirInUse", "DatabaseUrl", "Json"]

ConfigFile = Annotated[
    Path | None,
    typer.Option("--config", envvar="RELAYD_CONFIG", metavar="FILE", help="The settings file (TOML)."),
]
DatabaseUrl = Annotated[
    str | None,
    typer.Option(
        metavar="URL", help="The PostgreSQL to use; a password is safer in RELAYD_DATABASE_URL_FILE."
    ),
]
DataDir = Annotated[
    Path | None,
    typer.Option(
        metavar="DIR", help="The folder of the embedded PostgreSQL, which is used if no URL is given."
    ),
]
DataDirInUse = Annotated[
    Path | None,
    typer.Option(metavar="DIR", help="The folder of the embedded PostgreSQL; the relay may be running."),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")]
