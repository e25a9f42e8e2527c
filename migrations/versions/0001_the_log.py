"""The log: packets by day, the duplicate index, and the head that gives out sequences.

Theory of operation:

- `log_head` has one row, and that row is the lock of the log. A transaction that appends, or adds or removes
  partitions, locks it FOR UPDATE first. So sequences become visible in commit order with any number of
  processes (A-040), and the uniqueness of ids across partitions needs no global index.
- A sequence is `day << 32 | ordinal`; `packets` has a partition for each day.
- `packets_kept` is the oldest partition: it covers every day that retention has removed, and holds only
  the packets that retention spares.
- `packet_ids` maps ids to sequences and outlives the packets (R-310). Its partitions span many days, so
  that a look-up, which cannot know the day, probes only two or three of them.
- author_id and content_type are bytea: UTF-8, since a JSON string may hold U+0000 and text may not.
"""

from __future__ import annotations

from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None

_TABLES = """
CREATE TABLE log_head (
    only_row         boolean PRIMARY KEY DEFAULT true CHECK (only_row),
    last_sequence    bigint NOT NULL,
    last_received_at bigint NOT NULL,
    generation_days  integer NOT NULL
);
COMMENT ON TABLE log_head IS 'One row: the last sequence given out, and the lock of the log.';
COMMENT ON COLUMN log_head.generation_days IS 'Days covered by the next partition of packet_ids.';
INSERT INTO log_head VALUES (true, 0, 0, 30);

CREATE TABLE relay_secrets (
    only_row      boolean PRIMARY KEY DEFAULT true CHECK (only_row),
    identity_seed bytea NOT NULL CHECK (octet_length(identity_seed) = 32),
    cursor_key    bytea NOT NULL CHECK (octet_length(cursor_key) = 32),
    created_at    bigint NOT NULL
);
COMMENT ON TABLE relay_secrets IS 'One row: what all processes on this database share, and nobody else sees.';
REVOKE ALL ON relay_secrets FROM PUBLIC;

CREATE TABLE packets (
    sequence     bigint NOT NULL,
    received_at  bigint NOT NULL,
    "timestamp"  bigint NOT NULL,
    expires_at   bigint,
    packet_id    bytea NOT NULL,
    author_id    bytea NOT NULL,
    content_type bytea NOT NULL,
    body         bytea NOT NULL,
    CONSTRAINT packets_pkey PRIMARY KEY (sequence)
) PARTITION BY RANGE (sequence);
COMMENT ON TABLE packets IS 'The log. body is the record; the other columns are derived from it (A-006).';
CREATE INDEX packets_author ON packets (author_id, sequence);
CREATE INDEX packets_type ON packets (content_type, sequence);
CREATE INDEX packets_timestamp ON packets USING brin ("timestamp") WITH (pages_per_range = 16);

CREATE TABLE packets_kept (LIKE packets INCLUDING ALL EXCLUDING INDEXES);
ALTER TABLE packets ATTACH PARTITION packets_kept FOR VALUES FROM (MINVALUE) TO (0);

CREATE TABLE packet_ids (
    packet_id   bytea NOT NULL,
    sequence    bigint NOT NULL,
    received_at bigint NOT NULL
) PARTITION BY RANGE (sequence);
COMMENT ON TABLE packet_ids IS 'The duplicate index: every id once stored; it outlives the packet (R-310).';
CREATE TABLE packet_ids_kept (LIKE packet_ids);
CREATE UNIQUE INDEX packet_ids_kept_id ON packet_ids_kept (packet_id);
ALTER TABLE packet_ids ATTACH PARTITION packet_ids_kept FOR VALUES FROM (MINVALUE) TO (0);
"""

_ADD_DAY = """
CREATE FUNCTION relay_add_day(p_day bigint) RETURNS void LANGUAGE plpgsql AS $$
-- Make the partitions that a day's packets need. The caller holds log_head.
-- CREATE and then ATTACH: ATTACH lets readers go on, PARTITION OF would wait for them.
DECLARE
    v_child text := format('packets_d%s', p_day);
    v_covered boolean;
    v_end bigint;
BEGIN
    IF to_regclass(v_child) IS NULL THEN
        EXECUTE format('CREATE TABLE %I (LIKE packets INCLUDING ALL EXCLUDING INDEXES)', v_child);
        EXECUTE format('ALTER TABLE packets ATTACH PARTITION %I FOR VALUES FROM (%s) TO (%s)',
                       v_child, p_day << 32, (p_day + 1) << 32);
    END IF;
    -- A partition of packet_ids is named for its first day and the day after its last.
    SELECT coalesce(bool_or(p_day >= first_day AND p_day < end_day), false),
           min(first_day) FILTER (WHERE first_day > p_day)
        INTO v_covered, v_end
        FROM (SELECT substring(c.relname FROM '_d([0-9]+)_d')::bigint AS first_day,
                     substring(c.relname FROM '_d([0-9]+)$')::bigint AS end_day
              FROM pg_inherits i JOIN pg_class c ON c.oid = i.inhrelid
              WHERE i.inhparent = 'packet_ids'::regclass) AS generations;
    IF NOT v_covered THEN
        SELECT least(v_end, p_day + generation_days) INTO v_end FROM log_head;
        v_child := format('packet_ids_d%s_d%s', p_day, v_end);
        EXECUTE format('CREATE TABLE %I (LIKE packet_ids)', v_child);
        -- The index lives on the partition: on the parent it could not be unique without the sequence.
        EXECUTE format('CREATE UNIQUE INDEX %I ON %I (packet_id)', v_child || '_id', v_child);
        EXECUTE format('ALTER TABLE packet_ids ATTACH PARTITION %I FOR VALUES FROM (%s) TO (%s)',
                       v_child, p_day << 32, v_end << 32);
    END IF;
END $$;
"""

_APPEND = """
CREATE FUNCTION relay_append(
    p_now bigint, p_ids bytea[], p_authors bytea[], p_types bytea[],
    p_timestamps bigint[], p_expires bigint[], p_bodies bytea[], p_keys bytea[],
    OUT previous bigint, OUT base bigint, OUT received bigint,
    OUT known_ids bytea[], OUT known_sequences bigint[], OUT known_received bigint[], OUT known_of bytea[]
) LANGUAGE plpgsql AS $$
-- Append a batch of distinct ids and distinct keys. Ids that are known already come back in known_*; the
-- others now have the sequences base + 1, base + 2, … in the order given, and all the same received_at.
-- p_keys is NULL, or has an equivalence key or NULL for each packet: a packet whose key is known is not
-- stored either; the key comes back in known_ids, and in known_of the id of the packet that brought it.
DECLARE
    v_day bigint;
    v_count bigint;
BEGIN
    SELECT h.last_sequence, greatest(p_now, h.last_received_at) INTO STRICT previous, received
        FROM log_head h FOR UPDATE;
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
    IF known_ids IS NULL AND p_keys IS NULL THEN
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
            INSERT INTO packets
                    (sequence, received_at, "timestamp", expires_at, packet_id, author_id, content_type, body)
                SELECT base + row_number() OVER (ORDER BY n), received, t, e, i, a, c, b
                FROM unnest(p_ids, p_authors, p_types, p_timestamps, p_expires, p_bodies, p_keys)
                    WITH ORDINALITY AS new (i, a, c, t, e, b, k, n)
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
        UPDATE log_head SET last_sequence = base + v_count, last_received_at = received;
        PERFORM pg_notify('relayd_log', (base + v_count)::text);
    END IF;
END $$;
"""

_POSITION = """
CREATE FUNCTION relay_position(p_received_at bigint) RETURNS bigint LANGUAGE plpgsql STABLE AS $$
-- The last sequence received before a time, or a border below its day: rows up to it are older, rows after it
-- are not. received_at never decreases along the log (R-099), so bisecting finds it in some thirty look-ups.
DECLARE
    v_low bigint := (p_received_at / 86400) << 32;
    v_high bigint;
    v_middle bigint;
    v_received bigint;
    v_sequence bigint;
BEGIN
    SELECT max(sequence) INTO v_high FROM packets
        WHERE sequence > v_low AND sequence < ((p_received_at / 86400 + 1) << 32);
    WHILE v_low < coalesce(v_high, v_low) LOOP
        v_middle := v_low + (v_high - v_low) / 2;
        SELECT sequence, received_at INTO v_sequence, v_received FROM packets
            WHERE sequence > v_middle AND sequence <= v_high ORDER BY sequence LIMIT 1;
        IF v_received < p_received_at THEN
            v_low := v_sequence;
        ELSE
            v_high := v_middle;
        END IF;
    END LOOP;
    RETURN v_low;
END $$;
"""


def upgrade() -> None:
    connection = op.get_bind()
    for statement in _TABLES.strip().split(";\n"):
        connection.exec_driver_sql(statement)
    # A server may be built without lz4. Then large bodies are better not compressed at all than with pglz,
    # which costs more than reading the bytes.
    has_lz4 = connection.exec_driver_sql(
        "SELECT 'lz4' = ANY (enumvals) FROM pg_settings WHERE name = 'default_toast_compression'"
    ).scalar()
    how = "COMPRESSION lz4" if has_lz4 else "STORAGE external"
    for table in ("packets", "packets_kept"):
        connection.exec_driver_sql(f"ALTER TABLE {table} ALTER COLUMN body SET {how}")
    for function in (_ADD_DAY, _APPEND, _POSITION):
        connection.exec_driver_sql(function)


def downgrade() -> None:
    raise NotImplementedError("the first revision has nothing below it; drop the database instead")
