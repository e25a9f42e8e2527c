"""A start of Spark that is interrupted leaves no JVM behind."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
from pyspark import SparkContext, java_gateway
from strata_pipeline.spark_start import ending_what_is_cut_off


def _home(folder: Path, script: str) -> str:
    submit = folder / "bin" / "spark-submit"
    submit.parent.mkdir()
    submit.write_text(f"#!/bin/sh\necho $$ > {folder}/pid\n{script}\n")
    submit.chmod(0o755)
    return str(folder)


def test_a_jvm_that_is_starting_ends_where_a_signal_cuts_off_its_start(tmp_path, monkeypatch):
    monkeypatch.setattr(SparkContext, "_gateway", None)
    monkeypatch.delenv("PYSPARK_GATEWAY_PORT", raising=False)
    monkeypatch.setenv("SPARK_HOME", _home(tmp_path, "kill -TERM $PPID\nexec sleep 600"))

    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    gateway: Any = java_gateway
    popen, before = gateway.Popen, signal.signal(signal.SIGTERM, stop)
    try:
        with pytest.raises(KeyboardInterrupt), ending_what_is_cut_off():
            java_gateway.launch_gateway()
    finally:
        signal.signal(signal.SIGTERM, before)
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)
    assert gateway.Popen is popen
