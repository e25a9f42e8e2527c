"""The full record of a peer's conduct, by which it is judged: it outlives the process that reads there.

- `peers.conduct`: the counts of the last week and the resulting standing. NULL for a peer of which only
  `offences`, `bars` and `barred_until` are known, which are written as before.

Everything is added and nothing is changed, so programs of the previous revision keep working beside it.
"""

from __future__ import annotations

from alembic import op

revision = "0007"
down_revision = "0006"
branch_labels = None
depends_on = None

# Nothing that programs of the previous revision use has changed.
keeps_older_programs = True


def upgrade() -> None:
    op.execute("ALTER TABLE peers ADD COLUMN conduct jsonb")
    op.execute("COMMENT ON COLUMN peers.conduct IS 'What the peer has done within a week, by the hour.'")


def downgrade() -> None:
    op.execute("ALTER TABLE peers DROP COLUMN conduct")
