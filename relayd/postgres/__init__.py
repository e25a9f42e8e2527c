"""The embedded PostgreSQL server that a relay runs when no database is named."""

from __future__ import annotations

from relayd.postgres.binaries import EmbeddedPostgresError
from relayd.postgres.embedded import EmbeddedPostgres

__all__ = ["EmbeddedPostgres", "EmbeddedPostgresError"]
