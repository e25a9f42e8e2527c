"""The settings of spark-submit and spark-defaults.conf, read before a session is created.

`SparkConf()` knows them only once a JVM is running, when the memory and class path of a session are fixed.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

import pyspark
from pyspark import SparkConf, SparkContext

__all__ = ["configured", "parse_defaults"]

_GATEWAY = "PYSPARK_GATEWAY_PORT"  # set by spark-submit, which has started the JVM already
_BETWEEN = re.compile(r"\s*[=:]\s*|\s+")


def configured() -> dict[str, str]:
    """The settings that are already given."""
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
    """The settings in a properties file of Spark: lines of key and value, separated by blanks, `=` or `:`."""
    settings = {}
    for line in text.splitlines():
        if line.strip() and not line.lstrip().startswith(("#", "!")):
            key, *value = _BETWEEN.split(line.strip(), maxsplit=1)
            settings[key] = value[0] if value else ""
    return settings
