"""The lake: Parquet by day, and a chain of manifests that says what it must hold."""
