"""What Spark was told before we ask for a session: by spark-submit, or by spark-defaults.conf.

`SparkConf()` knows neither before a JVM runs, and a session's memory and class path can only be set before
that.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

import pyspark
from pyspark import SparkConf, SparkContext

__all__ = ["configured", "parse_defaults"]

_GATEWAY = "PYSPARK_GATEWAY_PORT"  # set by spark-submit: the JVM is there already
_BETWEEN = re.compile(r"\s*[=:]\s*|\s+")


def configured() -> dict[str, str]:
    """The settings that are decided already."""
    if _GATEWAY in os.environ:
        SparkContext._ensure_initialized()
        return dict(SparkConf().getAll())
    home = os.environ.get("SPARK_HOME") or Path(pyspark.__file__).parent
    folder = os.environ.get("SPARK_CONF_DIR") or Path(home, "conf")
    try:
        return parse_defaults(Path(folder, "spark-defaults.conf").read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}


def parse_defaults(text: str) -> dict[str, str]:
    """A properties file as Spark writes them: a key and a value a line, between them blanks, `=` or `:`."""
    settings = {}
    for line in text.splitlines():
        if line.strip() and not line.lstrip().startswith(("#", "!")):
            key, *value = _BETWEEN.split(line.strip(), maxsplit=1)
            settings[key] = value[0] if value else ""
    return settings
