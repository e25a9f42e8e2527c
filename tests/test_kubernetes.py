"""The chart for Kubernetes, rendered by Helm, against the schemas of Kubernetes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from relayd.config import load
from relayd.version import VERSION

ROOT = Path(__file__).resolve().parents[1]
CHART = ROOT / "deploy" / "helm" / "relayd"
HELM = Path(sys.executable).with_name("helm")
SECRET = {"database.existingSecret": "relayd-database"}

Objects = dict[str, dict[str, Any]]

needs_helm = pytest.mark.skipif(not HELM.exists(), reason="PyPI has no Helm for this machine")


def helm(*arguments: str, **values: str) -> subprocess.CompletedProcess[str]:
    given = [word for name, value in values.items() for word in ("--set", f"{name}={value}")]
    return subprocess.run([HELM, *arguments, *given], capture_output=True, text=True, timeout=60)


def rendered(release: str = "relayd", **values: str) -> Objects:
    done = helm("template", release, str(CHART), **values)
    assert done.returncode == 0, done.stderr
    return by_kind(done.stdout)


def by_kind(text: str) -> Objects:
    objects = [each for each in yaml.safe_load_all(text) if each]
    assert len({each["kind"] for each in objects}) == len(objects)
    return {each["kind"]: each for each in objects}


def check(objects: Objects) -> None:
    """Anything unknown to the schemas is an error, in the chart's first and last Kubernetes."""
    for each in objects.values():
        for version in ("1.25", kubernetes_validate.latest_version()):
            kubernetes_validate.validate(each, version, strict=True)


@needs_helm
@pytest.mark.parametrize(
    ("values", "more"),
    [
        (SECRET, set()),
        ({"database.url": "postgresql://relayd:x@db/relayd"}, {"Secret"}),
        (
            {
                **SECRET,
                "replicas": "3",
                "minAvailable": "2",
                "ingress.enabled": "true",
                "ingress.className": "nginx",
                "ingress.tlsSecret": "relay-tls",
                "ingress.annotations.a/b": "c",
                "service.type": "LoadBalancer",
                "service.annotations.d/e": "f",
                "imagePullSecrets[0].name": "pull",
                "env[0].name": "OTEL_SERVICE_NAME",
                "env[0].value": "relay",
                "nodeSelector.disk": "fast",
                "tolerations[0].operator": "Exists",
                "affinity.nodeAffinity.requiredDuringSchedulingIgnoredDuringExecution.nodeSelectorTerms[0]"
                ".matchFields[0].key": "metadata.name",
                "affinity.nodeAffinity.requiredDuringSchedulingIgnoredDuringExecution.nodeSelectorTerms[0]"
                ".matchFields[0].operator": "Exists",
            },
            {"Ingress"},
        ),
        ({**SECRET, "replicas": "1", "minAvailable": "0"}, {"-PodDisruptionBudget"}),
    ],
    ids=["secret", "url", "everything", "alone"],
)
def test_whatever_is_set_the_chart_makes_what_kubernetes_takes(values, more):
    objects = rendered("other", **values)
    check(objects)
    expected = {"ConfigMap", "Deployment", "Service", "PodDisruptionBudget"}
    assert set(objects) == (expected | {kind for kind in more if kind[0] != "-"}) - {
        kind[1:] for kind in more
    }
    deployment = objects["Deployment"]["spec"]
    assert str(deployment["replicas"]) == values.get("replicas", "2")
    labels = deployment["template"]["metadata"]["labels"].items()
    for kind, path in (("Service", ["selector"]), ("PodDisruptionBudget", ["selector", "matchLabels"])):
        if kind in objects:
            selector = objects[kind]["spec"]
            for name in path:
                selector = selector[name]
            assert selector.items() <= labels and "other" in selector.values()


@needs_helm
def test_another_database_means_other_pods():
    """Pods that kept the old URL would serve another log than those started later."""
    pods = [
        rendered(**{"database.url": f"postgresql://relayd:x@{host}/relayd"})["Deployment"]["spec"]["template"]
        for host in ("old", "old", "new")
    ]
    assert pods[0] == pods[1] != pods[2]


@needs_helm
@pytest.mark.parametrize("kind", ["NodePort", "LoadBalancer"])
def test_the_world_reaches_no_metrics_and_its_addresses_are_its_own(kind):
    service = rendered(**SECRET, **{"service.type": kind})["Service"]["spec"]
    assert [port["name"] for port in service["ports"]] == ["relay"]
    assert service["externalTrafficPolicy"] == "Local"
    assert "externalTrafficPolicy" not in rendered(**SECRET)["Service"]["spec"]


@needs_helm
def test_helm_finds_no_fault_with_the_chart():
    done = helm("lint", "--strict", str(CHART), **SECRET)
    assert done.returncode == 0, done.stdout
    about = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert about["version"] == about["appVersion"] == VERSION


@needs_helm
@pytest.mark.parametrize(
    ("values", "complaint"),
    [
        ({}, "the relays share one PostgreSQL"),
        ({"database.url": "mysql://x/y"}, "database.url: Does not match"),
        ({**SECRET, "replicas": "1"}, "no node could ever be emptied"),
        ({**SECRET, "replica": "3"}, "replica"),
        ({**SECRET, "database.key": "a/b"}, "database.key: Does not match"),
        ({**SECRET, "podAnnotations.a": "1"}, "podAnnotations.a: Invalid type"),
        ({**SECRET, "nodeSelector.disk": "1"}, "nodeSelector.disk: Invalid type"),
        ({**SECRET, "env[0].name": "A", "env[0].value": "1"}, "value: Invalid type"),
        ({**SECRET, "service": "null"}, "service is required"),
    ],
)
def test_what_cannot_work_is_refused_before_anything_is_installed(values, complaint):
    done = helm("template", "relayd", str(CHART), **values)
    assert done.returncode != 0 and complaint in done.stderr


@needs_helm
@pytest.mark.parametrize("release", ["1relay", "my.relay"])
def test_a_release_whose_name_no_service_can_have_is_refused(release):
    done = helm("template", release, str(CHART), **SECRET)
    assert done.returncode != 0 and "a Service has its name" in done.stderr


@needs_helm
def test_the_chart_has_probes_replicas_and_a_budget(tmp_path):
    objects = rendered(**SECRET)
    (tmp_path / "config.toml").write_text(objects["ConfigMap"]["data"]["config.toml"])
    settings = load(tmp_path)
    pod = objects["Deployment"]["spec"]["template"]["spec"]
    (relay,) = pod["containers"]
    ports = {port["name"]: port["containerPort"] for port in relay["ports"]}
    assert ports == {"relay": settings.port, "metrics": 9464} and settings.metrics_listen == "0.0.0.0:9464"
    probes = {name: relay[f"{name}Probe"]["httpGet"] for name in ("startup", "liveness", "readiness")}
    assert {probe["port"] for probe in probes.values()} == {"relay"}
    assert [probe["path"] for probe in probes.values()] == ["/healthz", "/healthz", "/readyz"]
    assert pod["terminationGracePeriodSeconds"] > settings.drain_spread + settings.drain_timeout
    assert {each["name"] for each in relay["env"]} == {"RELAYD_CONFIG", "RELAYD_DATABASE_URL_FILE"}
    # The Service relayd would set RELAYD_PORT to `tcp://…`, and RELAYD_SERVICE_HOST, which is not a setting.
    assert pod["enableServiceLinks"] is False
    assert objects["Deployment"]["spec"]["replicas"] == 2
    assert objects["PodDisruptionBudget"]["spec"]["minAvailable"] == 1
