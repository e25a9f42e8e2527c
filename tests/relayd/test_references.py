"""Files and plug-ins that settings refer to must exist."""

from __future__ import annotations

import dataclasses

import pytest
from typer.testing import CliRunner

from relayd.cli import app
from relayd.config import ConfigurationError, Settings
from relayd.references import check_references
from relayd.tls import write_dev_certificates


def test_certificates_that_fit_are_enough(tmp_path):
    made = write_dev_certificates(tmp_path)
    check_references(Settings(tls_cert=made.cert, tls_key=made.key))
    check_references(Settings())


def test_everything_that_is_missing_is_named_at_once(tmp_path):
    settings = Settings(
        tls_cert=tmp_path / "cert.pem",
        tls_key=tmp_path / "key.pem",
        bootstrap_file=tmp_path / "bootstrap.json",
        policy_plugins=("absent",),
    )
    with pytest.raises(ConfigurationError) as caught:
        check_references(settings)
    certificate, bootstrap, plugin = caught.value.problems
    assert certificate == f"{settings.tls_cert}: No such file or directory"
    assert bootstrap == f"{settings.bootstrap_file}: No such file or directory"
    assert plugin.startswith("policy_plugins: absent: not installed")


def test_check_config_looks_for_certificates(monkeypatch, tmp_path):
    for name in ("cert", "key"):
        monkeypatch.setenv(f"RELAYD_TLS_{name.upper()}", str(tmp_path / name))
    done = CliRunner().invoke(app, ["check-config"])
    assert done.exit_code == 2
    assert done.stderr == f"relayd: {tmp_path}/cert: No such file or directory\n"


def test_a_key_of_another_certificate_is_found(tmp_path):
    one, other = write_dev_certificates(tmp_path / "one"), write_dev_certificates(tmp_path / "other")
    settings = Settings(tls_cert=one.cert, tls_key=other.key)
    with pytest.raises(ConfigurationError, match="mismatch"):
        check_references(settings)
    check_references(dataclasses.replace(settings, tls_key=one.key))
