"""Every query of every dashboard and alert, against the metrics of a running relay."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import subprocess
import urllib.parse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from relayd.metrics import Metrics
from tests.support.bare_client import open_client
from tests.support.made_packets import make, new_identity
from tests.support.ports import free_port
from tests.support.relay_process import ROOT, RelayProcess, http_get, running
from tests.support.waiting import wait_until

DASHBOARDS = sorted((ROOT / "deploy/grafana/dashboards").glob("*.json"))
_SAMPLE = re.compile(r"^(\w+)(?:{(.*)})? \S+$", re.MULTILINE)
_WORD = re.compile(r"\b(?:relayd|process)_\w+")


def _queries() -> list[tuple[str, str]]:
    """(where, expression) of all dashboards and alerts."""
    found = []
    for path in DASHBOARDS:
        for panel in json.loads(path.read_text())["panels"]:
            found += [(f"{path.stem}: {panel['title']}", target["expr"]) for target in panel["targets"]]
    alerts = (ROOT / "deploy/prometheus/alerts.yml").read_text()
    return found + re.findall(r"- alert: (\w+)\n(?:\s*#.*\n)*        expr: (.*)\n", alerts)


@pytest.fixture(scope="module")
def relay(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RelayProcess]:
    """With every feature of a relay: workers, its own TLS, a replica (the database itself), a plug-in."""
    folder = tmp_path_factory.mktemp("dashboards")
    with running(RelayProcess(folder, arguments=("--workers", "2"), tls_self_made=True)) as relay:
        relay.ready["metrics"] = relay.ready["metrics"].replace("https:", "http:")
        yield relay


async def _traffic(relay: RelayProcess) -> None:
    async with open_client(relay.ws.replace("wss:", "ws:")) as client:
        assert (await client.publish(make(new_identity())))["type"] == "OK"


async def test_each_query_names_metrics_and_labels_that_a_running_relay_has(relay: RelayProcess):
    assert {path.stem for path in DASHBOARDS} == {"relayd", "channels", "pipeline"}
    await _traffic(relay)
    _, _, body = http_get(relay.ready["metrics"])
    labels: dict[str, set[str]] = {"up": set()}
    for name, text in _SAMPLE.findall(body.decode()):
        labels.setdefault(name, set()).update(re.findall(r'(\w+)="', text))
    # Series that appear with the plug-in that they describe.
    labels["relayd_policy_plugin_verdicts_total"] = {"plugin", "verdict"}
    # With workers it appears once one of them has maintained the log.
    labels["relayd_retention_waiting_days"] = {"reason"}
    # Series that appear with the first peer.
    for metric in [each for name, each in vars(Metrics()).items() if name.startswith("peer_")]:
        suffix = "_total" if metric._type == "counter" else ""
        labels[metric._name + suffix] = set(metric._labelnames)
    labels["relayd_bus_connected"] = {"bus"}  # with a bus
    queries = _queries()
    assert len(queries) > 70
    for where, expression in queries:
        names = set(_WORD.findall(expression))
        assert names <= set(labels), where
        told = set().union(*(labels[name] for name in names)) | {"instance", "job"}
        selectors = ",".join(re.findall(r"{(.*?)}", expression))
        used = set(re.findall(r"(\w+)=~?\"", selectors))
        used |= {
            each.strip() for group in re.findall(r"by \((.*?)\)", expression) for each in group.split(",")
        }
        assert used <= told, where


def test_prometheus_answers_each_query_of_the_dashboards(relay: RelayProcess, tmp_path: Path):
    program = shutil.which("prometheus")
    if program is None:
        pytest.skip("needs prometheus (apt-get install prometheus)")
    address, target = f"127.0.0.1:{free_port()}", urllib.parse.urlsplit(relay.ready["metrics"]).netloc
    config = {
        "global": {"scrape_interval": "1s"},
        "scrape_configs": [{"job_name": "relayd", "static_configs": [{"targets": [target]}]}],
    }
    (tmp_path / "prometheus.json").write_text(json.dumps(config))
    command = [
        program,
        f"--config.file={tmp_path / 'prometheus.json'}",
        f"--storage.tsdb.path={tmp_path / 'data'}",
    ]
    with (tmp_path / "log").open("wb") as log:
        server = subprocess.Popen([*command, f"--web.listen-address={address}"], stdout=log, stderr=log)

    def ask(expression: str) -> list[Any]:
        query = expression.replace("$instance", ".*").replace("$__rate_interval", "1m")
        path = f"http://{address}/api/v1/query?query={urllib.parse.quote(query)}"
        status, _, body = http_get(path)
        if status == 503:
            raise ConnectionError("Prometheus is about to start")
        assert status == 200, (expression, body)
        result: list[Any] = json.loads(body)["data"]["result"]
        return result

    def scraped() -> bool:
        try:
            return bool(ask("rate(relayd_publishes_total[1m])"))
        except OSError:
            return False

    try:
        asyncio.run(_traffic(relay))
        wait_until(scraped, "two scrapes", 60)
        for where, expression in _queries():
            found = ask(expression)
            # These have series once something was queried or maintained, and an alert when it fires.
            if ":" in where and not re.search("plugin|retention_waiting|peer_|bus_connected", expression):
                assert found, where
    finally:
        server.terminate()
        server.wait(30)
