"""The relay's log as Spark sees it."""
