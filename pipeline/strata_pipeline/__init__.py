"""The relay's log on Spark: a lake that can be trusted, audited, asked and restored from."""
