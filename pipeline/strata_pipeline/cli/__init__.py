"""`strata-pipeline`: a command for each job."""

from __future__ import annotations

from strata_pipeline.cli.app import app, main
from strata_pipeline.cli.archive import archive_command
from strata_pipeline.cli.audit import audit_command
from strata_pipeline.cli.compact import compact_command

__all__ = ["app", "main"]

app.command("archive")(archive_command)
app.command("audit")(audit_command)
app.command("compact")(compact_command)
