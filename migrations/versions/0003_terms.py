"""The terms of the log: which log a sequence belongs to.

A restored backup ends earlier than the log that was lost, and the sequences after its end are given out a
second time. So a process that begins to write opens a term, and a place is a sequence with the tag of its
term (`relayd/lineage.py`).

- `log_terms`: the terms of this log, in order, and those of lost logs as far as they are known.
- `log_head.tag`, `.epoch`: those of the current term. `.home`: the table in which the term was opened;
  restoring a dump makes another table.
- `relay_append` appends under the caller's term, or appends nothing.
"""

from __future__ import annotations

from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None

_TABLES = """
CREATE TABLE log_terms (
    number            integer PRIMARY KEY,
    tag               bytea NOT NULL UNIQUE CHECK (octet_length(tag) = 4),
    begins_after      bigint NOT NULL,
    epoch             integer NOT NULL,
    good_to           bigint,
    reason            text NOT NULL,
    opened_at         bigint NOT NULL,
    system_identifier bigint,
    timeline          integer
);
COMMENT ON TABLE log_terms IS 'Who wrote which part of the log: a place is a sequence and a tag.';
COMMENT ON COLUMN log_terms.good_to IS 'For a term of a lost log: where it parted from this one.';
ALTER TABLE log_head ADD COLUMN tag bytea, ADD COLUMN epoch integer NOT NULL DEFAULT 1, ADD COLUMN home oid;
COMMENT ON COLUMN log_head.tag IS 'The tag of the current term.';
COMMENT ON COLUMN log_head.epoch IS 'The epoch: how often the log is known to have lost its end, and 1.';
COMMENT ON COLUMN log_head.home IS 'The table in which the current term was opened.';
DROP FUNCTION relay_append(bigint, bytea[], bytea[], bytea[], bigint[], bigint[], bytea[], bytea[], bytea[],
    bigint, boolean);
"""

_WHERE = """
CREATE FUNCTION relay_database(OUT system_identifier bigint, OUT timeline integer) LANGUAGE plpgsql AS $$
-- Which cluster this is, and on which timeline it writes; NULL where the role may not ask.
BEGIN
    SELECT s.system_identifier INTO system_identifier FROM pg_control_system() AS s;
    timeline := ('x' || left(pg_walfile_name(pg_current_wal_lsn()), 8))::bit(32)::integer;
EXCEPTION WHEN insufficient_privilege OR undefined_function THEN
    system_identifier := NULL;
    timeline := NULL;
END $$;
"""

_OPEN_TERM = """
CREATE FUNCTION relay_open_term(p_reason text, p_now bigint, p_bump boolean, p_least integer,
    OUT tag bytea, OUT epoch integer) LANGUAGE plpgsql AS $$
-- Open a term at the end of the log, in the same epoch, or in the next one where p_bump says so; never in an
-- earlier one than p_least.
DECLARE
    v_head bigint;
    v_number integer;
BEGIN
    SELECT h.last_sequence, h.epoch INTO STRICT v_head, epoch FROM log_head h FOR UPDATE;
    SELECT coalesce(max(t.number), 0) + 1, greatest(relay_open_term.epoch, max(t.epoch)) INTO v_number, epoch
        FROM log_terms t;
    epoch := greatest(epoch + p_bump::integer, p_least);
    tag := substring(uuid_send(gen_random_uuid()) FROM 1 FOR 4);
    -- Terms that begin behind the end of the log came with a copy of this table: their packets are not here.
    UPDATE log_terms t SET good_to = v_head WHERE t.good_to IS NULL AND t.begins_after > v_head;
    -- A process that keeps restarting fills nothing: of the terms without a packet the last ones stay.
    DELETE FROM log_terms t
        WHERE t.good_to IS NULL AND t.begins_after = v_head AND t.number > 1 AND t.number < v_number - 16;
    DELETE FROM log_terms t WHERE t.good_to IS NOT NULL AND t.number < v_number - 4096;
    INSERT INTO log_terms
        SELECT v_number, relay_open_term.tag, v_head, relay_open_term.epoch, NULL, p_reason, p_now,
            d.system_identifier, d.timeline
        FROM relay_database() AS d;
    UPDATE log_head h SET tag = relay_open_term.tag, epoch = relay_open_term.epoch, home = h.tableoid;
END $$;
"""

_FIRST = """
INSERT INTO log_terms
    SELECT 1, substring(uuid_send(gen_random_uuid()) FROM 1 FOR 4), 0, 1, NULL, 'first',
        extract(epoch FROM now())::bigint, d.system_identifier, d.timeline
    FROM relay_database() AS d;
UPDATE log_head h SET tag = t.tag, home = h.tableoid FROM log_terms t;
ALTER TABLE log_head ALTER COLUMN tag SET NOT NULL, ALTER COLUMN home SET NOT NULL;
"""

_APPEND = """
CREATE FUNCTION relay_append(
    p_now bigint, p_ids bytea[], p_authors bytea[], p_types bytea[],
    p_timestamps bigint[], p_expires bigint[], p_bodies bytea[], p_keys bytea[],
    p_annotations bytea[], p_followed bigint, p_moves_identities boolean,
    p_tag bytea, p_seen bigint,
    OUT previous bigint, OUT base bigint, OUT received bigint,
    OUT known_ids bytea[], OUT known_sequences bigint[], OUT known_received bigint[], OUT known_of bytea[]
) LANGUAGE plpgsql AS $$
-- Append a batch of distinct ids and distinct keys. Ids that are known already come back in known_*; the
-- others now have the sequences base + 1, base + 2, … in the order given, and all the same received_at.
-- p_keys is NULL, or has an equivalence key or NULL for each packet: a packet whose key is known is not
-- stored either; the key comes back in known_ids, and in known_of the id of the packet that brought it.
-- p_annotations is NULL, or has an annotation or NULL for each packet.
-- p_followed is how far the caller has applied identity packets, NULL where it does not matter. If there are
-- later ones, nothing is appended: base is NULL and previous says how far to follow.
-- p_tag is the term that the caller writes under, p_seen a sequence that it knows to be committed. If the log
-- has another term or does not reach so far, or stands in another table than the one that the term was opened
-- in, nothing is appended: base and previous are NULL.
DECLARE
    v_day bigint;
    v_count bigint;
    v_identity bigint;
    v_stands boolean;
BEGIN
    SELECT h.last_sequence, greatest(p_now, h.last_received_at), h.last_identity_sequence,
            h.tag = p_tag AND h.last_sequence >= p_seen AND h.home = h.tableoid
        INTO STRICT previous, received, v_identity, v_stands
        FROM log_head h FOR UPDATE;
    IF NOT v_stands THEN
        previous := NULL;
        RETURN;
    END IF;
    IF v_identity > p_followed THEN
        previous := v_identity;
        RETURN;
    END IF;
    v_day := received / 86400;
    base := greatest(previous, v_day << 32);
    IF base > previous THEN
        PERFORM relay_add_day(v_day);
    END IF;
    -- This statement's snapshot is younger than the lock: it sees whatever others committed (R-111).
    SELECT array_agg(i.packet_id), array_agg(i.sequence), array_agg(i.received_at),
            array_agg(CASE WHEN i.packet_id = ANY (p_keys) THEN
                (SELECT p.packet_id FROM packets p WHERE p.sequence = i.sequence) END)
        INTO known_ids, known_sequences, known_received, known_of
        FROM packet_ids i WHERE i.packet_id = ANY (p_ids || p_keys);
    IF known_ids IS NULL AND p_keys IS NULL AND p_annotations IS NULL THEN
        INSERT INTO packets
                (sequence, received_at, "timestamp", expires_at, packet_id, author_id, content_type, body)
            SELECT base + n, received, t, e, i, a, c, b
            FROM unnest(p_ids, p_authors, p_types, p_timestamps, p_expires, p_bodies)
                WITH ORDINALITY AS new (i, a, c, t, e, b, n);
        INSERT INTO packet_ids (packet_id, sequence, received_at)
            SELECT i, base + n, received FROM unnest(p_ids) WITH ORDINALITY AS new (i, n);
        v_count := cardinality(p_ids);
    ELSE
        WITH stored AS (
            INSERT INTO packets (sequence, received_at, "timestamp", expires_at, packet_id, author_id,
                    content_type, body, annotation)
                SELECT base + row_number() OVER (ORDER BY n), received, t, e, i, a, c, b, s
                FROM unnest(p_ids, p_authors, p_types, p_timestamps, p_expires, p_bodies, p_keys,
                        p_annotations) WITH ORDINALITY AS new (i, a, c, t, e, b, k, s, n)
                WHERE known_ids IS NULL OR (i <> ALL (known_ids) AND (k IS NULL OR k <> ALL (known_ids)))
                RETURNING packets.packet_id, packets.sequence),
        ids AS (
            INSERT INTO packet_ids (packet_id, sequence, received_at)
                SELECT s.packet_id, s.sequence, received FROM stored s),
        keys AS (
            INSERT INTO packet_ids (packet_id, sequence, received_at)
                SELECT k, s.sequence, received
                FROM unnest(p_ids, p_keys) AS new (i, k) JOIN stored s ON s.packet_id = i
                WHERE k IS NOT NULL)
        SELECT count(*) INTO v_count FROM stored;
    END IF;
    IF v_count > 0 THEN
        -- A batch that might have changed an identity counts as one that did: at worst others follow sooner.
        UPDATE log_head SET last_sequence = base + v_count, last_received_at = received,
            last_identity_sequence =
                CASE WHEN p_moves_identities THEN base + v_count ELSE last_identity_sequence END;
        PERFORM pg_notify('relayd_log', (base + v_count)::text);
    END IF;
END $$;
"""


def upgrade() -> None:
    for statement in (
        *_TABLES.strip().split(";\n"),
        _WHERE,
        _OPEN_TERM,
        *_FIRST.strip().split(";\n"),
        _APPEND,
    ):
        op.get_bind().exec_driver_sql(statement.strip().rstrip(";"))


def downgrade() -> None:
    raise NotImplementedError("going back would forget which log a cursor is of")
