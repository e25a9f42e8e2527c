"""`strata-pipeline`: a command for each job."""

from __future__ import annotations

from strata_pipeline.cli.app import app, main
from strata_pipeline.cli.archive import archive_command
from strata_pipeline.cli.audit import audit_command
from strata_pipeline.cli.compact import compact_command
from strata_pipeline.cli.copy import copy_command
from strata_pipeline.cli.delta import delta_command
from strata_pipeline.cli.erase import erase_command
from strata_pipeline.cli.find import find_command
from strata_pipeline.cli.reliability import reliability_command
from strata_pipeline.cli.report import report_command
from strata_pipeline.cli.reputation import reputation_command
from strata_pipeline.cli.restore import restore_command
from strata_pipeline.cli.traffic import traffic_command
from strata_pipeline.cli.trust import trust_command
from strata_pipeline.cli.views import views_command

__all__ = ["app", "main"]

app.command("archive")(archive_command)
app.command("audit")(audit_command)
app.command("compact")(compact_command)
app.command("find")(find_command)
app.command("erase")(erase_command)
app.command("reliability")(reliability_command)
app.command("traffic")(traffic_command)
app.command("trust")(trust_command)
app.command("reputation")(reputation_command)
app.command("restore")(restore_command)
app.command("publish-delta")(delta_command)
app.command("report")(report_command)
app.command("views")(views_command)
app.command("copy")(copy_command)
