"""Alert rules work as described, and each leads to a page that says what to do."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PROMETHEUS = ROOT / "deploy" / "prometheus"
ALERTS = re.findall(
    r"^      - alert: (\w+)\n((?:        .*\n)+)", (PROMETHEUS / "alerts.yml").read_text(), re.MULTILINE
)


def test_each_alert_has_a_runbook_that_its_url_opens():
    folder = ROOT / "docs" / "runbooks"
    assert len(ALERTS) >= 18
    for name, rule in ALERTS:
        assert f'runbook_url: "{{{{ $externalURL }}}}/user/{name}.md"' in rule
        page = (folder / f"{name}.md").read_text()
        assert page.startswith(f"# {name}\n")
        assert "\n## Look\n" in page and "\n## Do\n" in page
        assert f"]({name}.md)" in (folder / "README.md").read_text()
    assert {path.stem for path in folder.glob("Relay*.md")} == {name for name, _ in ALERTS}
    # The files at /user.
    compose = (ROOT / "docker-compose.yml").read_text()
    assert "- --web.user-assets=/runbooks\n" in compose
    assert "- ./docs/runbooks:/runbooks:ro\n" in compose


def test_each_alert_is_seen_to_fire():
    for rules, ways in (("alerts", ["alerts", "slow_alerts"]), ("pipeline_alerts", ["pipeline_alerts"])):
        names = re.findall(r"^      - alert: (\w+)$", (PROMETHEUS / f"{rules}.yml").read_text(), re.MULTILINE)
        tests = "".join((PROMETHEUS / f"{way}_test.yml").read_text() for way in ways)
        fired = re.findall(r"alertname: (\w+)\n\s+exp_alerts:\n", tests)
        assert names and set(names) == set(fired)


@pytest.mark.skipif(shutil.which("promtool") is None, reason="needs promtool (apt-get install prometheus)")
@pytest.mark.parametrize(
    "arguments",
    [
        ("check", "config", "--syntax-only", "prometheus.yml", "prometheus-tls.yml"),
        ("check", "rules", "alerts.yml", "pipeline_alerts.yml"),
        ("test", "rules", "alerts_test.yml", "slow_alerts_test.yml", "pipeline_alerts_test.yml"),
    ],
)
def test_promtool_agrees(arguments):
    done = subprocess.run(["promtool", *arguments], cwd=PROMETHEUS, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
