"""Federation: where a packet came from, when a relay first received it, and how far each peer was read.

- `packets.witnessed_at`: when the very first relay received it, according to the peer that it came from; NULL
  for what was published here. It is shown to subscribers. Days, cursors and retention use `received_at`.
- `packets.ingest_peer`: the peer that delivered it; NULL for what was published here.
- `peers`, `peer_cursors`, `peer_skips`: the relays that this one reads from, how far each was read, and which
  packets were refused.
- `relay_append_replicated` is `relay_append` for packets of peers. How far a peer was read is stored in the
  transaction that stores the packets (R-364), and only by the process that holds the link, as `fence` shows.

Everything is added and nothing is changed, so programs of the previous revision keep working beside it.
"""

from __future__ import annotations

from alembic import op

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None

# Nothing that programs of the previous revision use has changed.
keeps_older_programs = True

_TABLES = """
ALTER TABLE packets ADD COLUMN witnessed_at bigint, ADD COLUMN ingest_peer integer;
COMMENT ON COLUMN packets.witnessed_at IS 'When the first relay received it, by the word of the peer.';
COMMENT ON COLUMN packets.ingest_peer IS 'The peer that delivered it; NULL for what was published here.';
CREATE TABLE peers (
    peer_id       integer GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    relay_id      text NOT NULL UNIQUE,
    url           text NOT NULL,
    paused        boolean NOT NULL DEFAULT false,
    fence         bigint NOT NULL DEFAULT 0,
    offences      integer NOT NULL DEFAULT 0,
    bars          integer NOT NULL DEFAULT 0,
    barred_until  bigint NOT NULL DEFAULT 0,
    state         text NOT NULL DEFAULT 'new',
    state_at      bigint NOT NULL DEFAULT 0,
    problem       text
);
COMMENT ON TABLE peers IS 'The relays that this one reads from.';
COMMENT ON COLUMN peers.fence IS 'Counts the processes that have held the link: only the last may write.';
CREATE TABLE peer_cursors (
    peer_id        integer NOT NULL REFERENCES peers ON DELETE CASCADE,
    stream         text NOT NULL,
    cursor         text,
    oldest_witness bigint,
    last_witness   bigint,
    PRIMARY KEY (peer_id, stream)
);
COMMENT ON TABLE peer_cursors IS 'How far each peer was read: all up to the cursor is stored or refused.';
COMMENT ON COLUMN peer_cursors.stream IS 'What was asked for; another selection begins anew.';
CREATE TABLE peer_skips (
    peer_id     integer NOT NULL REFERENCES peers ON DELETE CASCADE,
    packet_id   bytea NOT NULL,
    "timestamp" bigint NOT NULL,
    reason      text NOT NULL,
    PRIMARY KEY (peer_id, packet_id)
);
CREATE INDEX peer_skips_timestamp ON peer_skips (peer_id, "timestamp");
COMMENT ON TABLE peer_skips IS 'What a peer serves and this relay would not take, and why.';
"""

_APPEND = """
CREATE FUNCTION relay_append_replicated(
    p_now bigint, p_ids bytea[], p_authors bytea[], p_types bytea[],
    p_timestamps bigint[], p_expires bigint[], p_bodies bytea[], p_keys bytea[],
    p_annotations bytea[], p_followed bigint, p_moves_identities boolean,
    p_tag bytea, p_seen bigint, p_witnessed bigint[], p_peers integer[],
    p_mark_peers integer[], p_mark_fences bigint[], p_mark_streams text[], p_mark_cursors text[],
    p_mark_oldest bigint[], p_mark_last bigint[],
    OUT previous bigint, OUT base bigint, OUT received bigint,
    OUT known_ids bytea[], OUT known_sequences bigint[], OUT known_received bigint[], OUT known_of bytea[]
) LANGUAGE plpgsql AS $$
-- As relay_append, for a batch with packets of peers. p_witnessed and p_peers have NULL for a packet that was
-- published here. The duplicate index keeps the witness, which is what an OK tells.
-- p_mark_* say how far peers have been read once this batch is in: stored with it, by the holder of the link.
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
    WITH stored AS (
        INSERT INTO packets (sequence, received_at, "timestamp", expires_at, packet_id, author_id,
                content_type, body, annotation, witnessed_at, ingest_peer)
            SELECT base + row_number() OVER (ORDER BY n), received, t, e, i, a, c, b, s, w, d
            FROM unnest(p_ids, p_authors, p_types, p_timestamps, p_expires, p_bodies, p_keys,
                    p_annotations, p_witnessed, p_peers)
                WITH ORDINALITY AS new (i, a, c, t, e, b, k, s, w, d, n)
            WHERE known_ids IS NULL OR (i <> ALL (known_ids) AND (k IS NULL OR k <> ALL (known_ids)))
            RETURNING packets.packet_id, packets.sequence, coalesce(packets.witnessed_at, received) AS at),
    ids AS (
        INSERT INTO packet_ids (packet_id, sequence, received_at)
            SELECT s.packet_id, s.sequence, s.at FROM stored s),
    keys AS (
        INSERT INTO packet_ids (packet_id, sequence, received_at)
            SELECT k, s.sequence, s.at
            FROM unnest(p_ids, p_keys) AS new (i, k) JOIN stored s ON s.packet_id = i
            WHERE k IS NOT NULL)
    SELECT count(*) INTO v_count FROM stored;
    IF known_ids IS NOT NULL THEN
        -- R-368: the earliest witness counts, never a later one. Not of packets that decide whose keys hold:
        -- every process would have to replay the author's chain.
        WITH earlier AS (
            SELECT i.packet_id, i.sequence, w
            FROM unnest(p_ids, p_types, p_witnessed) AS new (id, c, w)
                JOIN packet_ids i ON i.packet_id = new.id AND i.packet_id = ANY (known_ids)
            WHERE w < i.received_at AND c <> ALL (ARRAY['KEY_EVENT'::bytea, 'RECOVERY_APPROVAL'::bytea,
                'DID_DOCUMENT'::bytea, 'CLIENT_MANIFEST'::bytea])),
        rows AS (
            UPDATE packets p SET witnessed_at = e.w FROM earlier e
                WHERE p.sequence = e.sequence AND p.packet_id = e.packet_id)
        UPDATE packet_ids i SET received_at = e.w FROM earlier e
            WHERE i.sequence = e.sequence AND i.packet_id = e.packet_id;
    END IF;
    INSERT INTO peer_cursors AS old (peer_id, stream, cursor, oldest_witness, last_witness)
        SELECT d, m, c, o, l
        FROM unnest(p_mark_peers, p_mark_fences, p_mark_streams, p_mark_cursors, p_mark_oldest, p_mark_last)
                AS new (d, f, m, c, o, l)
            JOIN peers ON peers.peer_id = d AND peers.fence = f
        ON CONFLICT (peer_id, stream) DO UPDATE SET cursor = excluded.cursor,
            oldest_witness = least(old.oldest_witness, excluded.oldest_witness),
            last_witness = greatest(old.last_witness, excluded.last_witness);
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
    for statement in (*_TABLES.strip().split(";\n"), _APPEND):
        op.get_bind().exec_driver_sql(statement.strip().rstrip(";"))


def downgrade() -> None:
    raise NotImplementedError("going back would forget where packets came from")
