"""The relay's log on Spark: a lake that can be verified, audited, queried and restored from."""
