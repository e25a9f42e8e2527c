"""Alembic's entry point. `relayd.store.upgrade` opens the connection, and holds the lock and transaction."""

from __future__ import annotations

from alembic import context

from relayd.store.schema import METADATA, is_ours

_connection = context.config.attributes.get("connection")
if _connection is None:
    raise SystemExit("run the migrations with `relayd migrate`: it locks the database while it changes it")

context.configure(connection=_connection, target_metadata=METADATA, include_object=is_ours)
with context.begin_transaction():
    context.run_migrations()
