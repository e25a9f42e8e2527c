"""The rulings of operators, and the record of erased packets.

- `moderation`: the bans, one row for each subject. All processes follow it, see `relayd/store/moderation.py`.
- `moderation_log`: who ruled what, when and why, with the ban before and after. It only grows: the triggers
  refuse everything else. Its last line says whether there is something new to read.
- `tombstones`: the erased packets, with a statement for each, signed by the relay. The row in `packets` stays
  at its place with the same id and time, which archives have hashed; it has no author, no type and no body,
  and expired in 1970, so that it is sent to no reader of any version.

Nothing that a process of the previous revision reads or calls has changed.
"""

from __future__ import annotations

from alembic import op

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None

# Nothing that programs of the previous revision use has changed.
keeps_older_programs = True

_TABLES = """
CREATE TABLE moderation (
    kind       text NOT NULL CHECK (kind IN ('author', 'packet', 'media', 'type', 'network')),
    subject    text NOT NULL,
    reason     text NOT NULL,
    actor      text NOT NULL,
    expires_at bigint,
    created_at bigint NOT NULL,
    PRIMARY KEY (kind, subject)
);
COMMENT ON TABLE moderation IS 'What operators have banned; relayd ban and relayd remove write it.';

CREATE TABLE moderation_log (
    number  bigint PRIMARY KEY,
    at      bigint NOT NULL,
    actor   text NOT NULL,
    via     text NOT NULL,
    act     text NOT NULL,
    kind    text NOT NULL,
    subject text NOT NULL,
    reason  text NOT NULL,
    before  jsonb,
    after   jsonb
);
COMMENT ON TABLE moderation_log IS 'Who ruled what, when and why. It only grows.';

CREATE TABLE tombstones (
    packet_id bytea PRIMARY KEY,
    sequence  bigint NOT NULL,
    erased_at bigint NOT NULL,
    body      bytea NOT NULL
);
COMMENT ON TABLE tombstones IS 'What was erased: a statement for each packet, signed by the relay.';
CREATE INDEX tombstones_sequence ON tombstones (sequence);
"""

_ONLY_GROWS = """
CREATE FUNCTION relay_only_grows() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    RAISE EXCEPTION '% only grows', TG_TABLE_NAME USING ERRCODE = 'restrict_violation';
END $$;
"""

_TRIGGERS = """
CREATE TRIGGER only_grows BEFORE UPDATE OR DELETE OR TRUNCATE ON moderation_log
    FOR EACH STATEMENT EXECUTE FUNCTION relay_only_grows();
CREATE TRIGGER only_grows BEFORE UPDATE OR DELETE OR TRUNCATE ON tombstones
    FOR EACH STATEMENT EXECUTE FUNCTION relay_only_grows();
"""


def upgrade() -> None:
    for statement in (*_TABLES.strip().split(";\n"), _ONLY_GROWS, *_TRIGGERS.strip().split(";\n")):
        op.get_bind().exec_driver_sql(statement.strip().rstrip(";"))


def downgrade() -> None:
    raise NotImplementedError("going back would serve what was banned and forget what was erased")
