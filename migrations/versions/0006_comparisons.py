"""Comparisons of sets with peers: the requests, and the findings of the last comparison with each peer.

- `peer_comparisons`: one row for each peer. `asked` counts the requests of operators, `done` how many of them
  have been met: so a request needs no connection to the process that reads from the peers.

Everything is added and nothing is changed, so programs of the previous revision keep working beside it.
"""

from __future__ import annotations

from alembic import op

revision = "0006"
down_revision = "0005"
branch_labels = None
depends_on = None

# Nothing that programs of the previous revision use has changed.
keeps_older_programs = True

_TABLES = """
CREATE TABLE peer_comparisons (
    peer_id      integer PRIMARY KEY REFERENCES peers ON DELETE CASCADE,
    asked        bigint NOT NULL DEFAULT 0,
    done         bigint NOT NULL DEFAULT 0,
    asked_since  bigint,
    is_running   boolean NOT NULL DEFAULT false,
    found        jsonb,
    equal_at     bigint
);
COMMENT ON TABLE peer_comparisons IS 'The last comparison of sets with each peer, and requests for one.';
COMMENT ON COLUMN peer_comparisons.asked_since IS 'From which time on an operator wants to compare.';
COMMENT ON COLUMN peer_comparisons.equal_at IS 'When last nothing of the peer''s was missing here.'
"""


def upgrade() -> None:
    for statement in _TABLES.strip().split(";\n"):
        op.get_bind().exec_driver_sql(statement.strip())


def downgrade() -> None:
    op.execute("DROP TABLE peer_comparisons")
