"""`strata-pipeline`: a command for each job."""

from __future__ import annotations

from strata_pipeline.cli.app import app, main
from strata_pipeline.cli.archive import archive_command

__all__ = ["app", "main"]

app.command("archive")(archive_command)
