"""Settings of Spark sessions that start quickly and handle few rows: for tests, not for production."""

from __future__ import annotations

__all__ = ["QUICK_JAVA", "QUICK_SPARK"]

QUICK_JAVA = (
    "-XX:TieredStopAtLevel=1 -XX:ReservedCodeCacheSize=240m -XX:+UseSerialGC"
    " -XX:+UnlockDiagnosticVMOptions -XX:-BytecodeVerificationRemote"
    " -XX:+UnlockExperimentalVMOptions -XX:SymbolTableSize=262144"
    " -Djdk.lang.Process.launchMechanism=VFORK"
)
"""A JVM that compiles little, has one collector, and does not verify Spark's own classes.

With so little compiling it would have room for only 48 MB of code. A run of tests compiles more: discarding
code and compiling it again took a fifth of the JVM's time. If its table of names began small, searching it
would take a tenth of the start. Hadoop sets each file's mode by running `chmod`.
"""
QUICK_SPARK = {
    "spark.default.parallelism": "2",
    "spark.driver.extraJavaOptions": QUICK_JAVA,
    # To report places in the code in errors, each column and frame may make several more calls to the JVM.
    "spark.python.sql.dataFrameDebugging.enabled": "false",
    # A few rows are interpreted before a compiler has started.
    "spark.sql.codegen.factoryMode": "NO_CODEGEN",
    "spark.sql.codegen.wholeStage": "false",
    "spark.sql.shuffle.partitions": "2",
    # Each execution is described for a page that nobody opens.
    "spark.sql.ui.explainMode": "simple",
}
