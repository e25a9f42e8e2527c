"""Settings of Spark sessions that start quickly and have few rows: for tests, and not for work."""

from __future__ import annotations

__all__ = ["QUICK_JAVA", "QUICK_SPARK"]

QUICK_JAVA = (
    "-XX:TieredStopAtLevel=1 -XX:ReservedCodeCacheSize=240m -XX:+UseSerialGC"
    " -XX:+UnlockDiagnosticVMOptions -XX:-BytecodeVerificationRemote"
    " -XX:+UnlockExperimentalVMOptions -XX:SymbolTableSize=262144"
    " -Djdk.lang.Process.launchMechanism=VFORK"
)
"""A JVM that compiles little, has one collector, and takes Spark's own classes for sound.

With so little compiling it would have room for 48 MB of code. A run of tests compiles more: to throw code
away and compile it again was a fifth of what the JVM did. In a table of names that begins small it searches
for a tenth of its start. Hadoop sets each file's mode by a `chmod`.
"""
QUICK_SPARK = {
    "spark.default.parallelism": "2",
    "spark.driver.extraJavaOptions": QUICK_JAVA,
    # For a place in the code that errors name, each column and frame may ask the JVM several more questions.
    "spark.python.sql.dataFrameDebugging.enabled": "false",
    "spark.sql.adaptive.enabled": "false",
    # A few rows are interpreted before a compiler has begun.
    "spark.sql.codegen.factoryMode": "NO_CODEGEN",
    "spark.sql.codegen.wholeStage": "false",
    "spark.sql.shuffle.partitions": "2",
}
