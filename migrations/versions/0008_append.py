"""What an append makes of the clock, and of keys whose packet has expired.

- `log_head.last_told_at`: the time last given to a packet, as it is told. It is held when a clock steps back,
  but never further ahead of the clock than `relayd.lineage.SKEW_SECONDS`. `last_received_at` is the log's own
  time, by which days and sequences go: it never decreases.
- A packet that is stored while the log's own time is ahead has the time it is told by in `witnessed_at`, as a
  packet of a peer has, and `ingest_peer` is 0.
- `.most_ahead`: the most by which the two times of such a packet differ.
- `.latest_told_at`: the latest time ever given; beyond the clock, packets are said to be from the future.
- The append functions of programs of the previous revision have one argument less, and stay as they were.
"""

from __future__ import annotations

from alembic import op

revision = "0008"
down_revision = "0007"
branch_labels = None
depends_on = None

# Programs of the previous revision call the functions as before.
keeps_older_programs = True

_TIMES = """
ALTER TABLE log_head ADD COLUMN last_told_at bigint, ADD COLUMN latest_told_at bigint,
    ADD COLUMN most_ahead bigint NOT NULL DEFAULT 0;
COMMENT ON COLUMN log_head.last_told_at IS 'The time last given to a packet, as it is told.';
COMMENT ON COLUMN log_head.latest_told_at IS 'The latest time ever given to a packet.';
COMMENT ON COLUMN log_head.most_ahead IS 'The most by which the log''s own time was ahead of the time told.'
"""

_APPEND = """
CREATE FUNCTION relay_append(
    p_now bigint, p_ids bytea[], p_authors bytea[], p_types bytea[],
    p_timestamps bigint[], p_expires bigint[], p_bodies bytea[], p_keys bytea[],
    p_annotations bytea[], p_followed bigint, p_moves_identities boolean,
    p_tag bytea, p_seen bigint, p_judged bigint,
    OUT previous bigint, OUT base bigint, OUT received bigint,
    OUT known_ids bytea[], OUT known_sequences bigint[], OUT known_received bigint[], OUT known_of bytea[],
    OUT told bigint
) LANGUAGE plpgsql AS $$
-- Append a batch of distinct ids and distinct keys. Ids that are known already come back in known_*; the
-- others now have the sequences base + 1, base + 2, … in the order given, and the same two times.
-- p_keys is NULL, or has an equivalence key or NULL for each packet: a packet whose key is known is not
-- stored either; the key comes back in known_ids, and in known_of the id of the packet that brought it, NULL
-- if that was erased.
-- p_annotations is NULL, or has an annotation or NULL for each packet.
-- p_followed is how far the caller has applied identity packets, NULL where it does not matter. If there are
-- later ones, or later acts of trust by an author of one in the batch, nothing is appended: base is NULL and
-- previous says how far to follow.
-- p_tag is the term that the caller writes under, p_seen a sequence that it knows to be committed. If the log
-- has another term or does not reach so far, or stands in another table than the one that the term was opened
-- in, nothing is appended: base and previous are NULL.
-- p_judged is the time as of which the packets were judged, NULL where it does not matter. If the log would
-- give them another one, nothing is appended: base is NULL, and told is that time.
DECLARE
    v_day bigint;
    v_count bigint;
    v_identity bigint;
    v_stands boolean;
    v_own bigint;  -- NULL unless the packets are told another time than the log's own
    v_here integer;
BEGIN
    SELECT h.last_sequence, greatest(given.at, h.last_received_at), given.at, h.last_identity_sequence,
            h.tag = p_tag AND h.last_sequence >= p_seen AND h.home = h.tableoid
        INTO STRICT previous, received, told, v_identity, v_stands
        FROM log_head h, LATERAL (SELECT least(greatest(p_now, coalesce(h.last_told_at, h.last_received_at)),
            p_now + 300) AS at) AS given FOR UPDATE OF h;
    IF NOT v_stands THEN
        previous := NULL;
        RETURN;
    END IF;
    IF p_types && ARRAY['TRUST_EDGE'::bytea, 'TRUST_REVOCATION'::bytea] THEN
        -- Whoever counts an identity's acts of trust must have counted those that others committed (R-241).
        SELECT greatest(v_identity, max(p.sequence)) INTO v_identity FROM packets p
            WHERE p.author_id = ANY (ARRAY(SELECT a FROM unnest(p_authors, p_types) AS new (a, c)
                    WHERE c IN ('TRUST_EDGE'::bytea, 'TRUST_REVOCATION'::bytea)))
                AND p.content_type IN ('TRUST_EDGE'::bytea, 'TRUST_REVOCATION'::bytea)
                AND p.sequence > p_followed;
    END IF;
    IF v_identity > p_followed THEN
        previous := v_identity;
        told := NULL;
        RETURN;
    END IF;
    IF told <> p_judged THEN
        RETURN;
    END IF;
    v_own := nullif(told, received);
    v_here := CASE WHEN v_own IS NOT NULL THEN 0 END;
    v_day := received / 86400;
    base := greatest(previous, v_day << 32);
    IF base > previous THEN
        PERFORM relay_add_day(v_day);
    END IF;
    IF p_keys IS NOT NULL THEN
        -- The key of a packet that has expired, or that retention has removed, is free again. That of an
        -- erased packet is not: what it stated stays away.
        DELETE FROM packet_ids i WHERE i.packet_id = ANY (p_keys)
            AND NOT EXISTS (SELECT FROM packets p WHERE p.sequence = i.sequence
                AND (p.expires_at IS NULL OR p.expires_at >= p_now OR p.body = ''))
            AND NOT EXISTS (SELECT FROM tombstones t WHERE t.sequence = i.sequence);
    END IF;
    -- This statement's snapshot is younger than the lock: it sees whatever others committed (R-111).
    SELECT array_agg(i.packet_id), array_agg(i.sequence), array_agg(i.received_at),
            array_agg(CASE WHEN i.packet_id = ANY (p_keys) THEN
                (SELECT p.packet_id FROM packets p WHERE p.sequence = i.sequence AND p.body <> '') END)
        INTO known_ids, known_sequences, known_received, known_of
        FROM packet_ids i WHERE i.packet_id = ANY (p_ids || p_keys);
    IF known_ids IS NULL AND p_keys IS NULL AND p_annotations IS NULL THEN
        INSERT INTO packets
                (sequence, received_at, "timestamp", expires_at, packet_id, author_id, content_type, body,
                witnessed_at, ingest_peer)
            SELECT base + n, received, t, e, i, a, c, b, v_own, v_here
            FROM unnest(p_ids, p_authors, p_types, p_timestamps, p_expires, p_bodies)
                WITH ORDINALITY AS new (i, a, c, t, e, b, n);
        INSERT INTO packet_ids (packet_id, sequence, received_at)
            SELECT i, base + n, told FROM unnest(p_ids) WITH ORDINALITY AS new (i, n);
        v_count := cardinality(p_ids);
    ELSE
        WITH stored AS (
            INSERT INTO packets (sequence, received_at, "timestamp", expires_at, packet_id, author_id,
                    content_type, body, annotation, witnessed_at, ingest_peer)
                SELECT base + row_number() OVER (ORDER BY n), received, t, e, i, a, c, b, s, v_own, v_here
                FROM unnest(p_ids, p_authors, p_types, p_timestamps, p_expires, p_bodies, p_keys,
                        p_annotations) WITH ORDINALITY AS new (i, a, c, t, e, b, k, s, n)
                WHERE known_ids IS NULL OR (i <> ALL (known_ids) AND (k IS NULL OR k <> ALL (known_ids)))
                RETURNING packets.packet_id, packets.sequence),
        ids AS (
            INSERT INTO packet_ids (packet_id, sequence, received_at)
                SELECT s.packet_id, s.sequence, told FROM stored s),
        keys AS (
            INSERT INTO packet_ids (packet_id, sequence, received_at)
                SELECT k, s.sequence, told
                FROM unnest(p_ids, p_keys) AS new (i, k) JOIN stored s ON s.packet_id = i
                WHERE k IS NOT NULL)
        SELECT count(*) INTO v_count FROM stored;
    END IF;
    IF v_count > 0 THEN
        -- A batch that might have changed an identity counts as one that did: at worst others follow sooner.
        UPDATE log_head SET last_sequence = base + v_count, last_received_at = received, last_told_at = told,
            latest_told_at = greatest(told, coalesce(latest_told_at, last_received_at)),
            most_ahead = greatest(most_ahead, received - told),
            last_identity_sequence =
                CASE WHEN p_moves_identities THEN base + v_count ELSE last_identity_sequence END;
        PERFORM pg_notify('relayd_log', (base + v_count)::text);
    END IF;
END $$;
"""

_APPEND_REPLICATED = """
CREATE FUNCTION relay_append_replicated(
    p_now bigint, p_ids bytea[], p_authors bytea[], p_types bytea[],
    p_timestamps bigint[], p_expires bigint[], p_bodies bytea[], p_keys bytea[],
    p_annotations bytea[], p_followed bigint, p_moves_identities boolean,
    p_tag bytea, p_seen bigint, p_witnessed bigint[], p_peers integer[],
    p_mark_peers integer[], p_mark_fences bigint[], p_mark_streams text[], p_mark_cursors text[],
    p_mark_oldest bigint[], p_mark_last bigint[], p_judged bigint,
    OUT previous bigint, OUT base bigint, OUT received bigint,
    OUT known_ids bytea[], OUT known_sequences bigint[], OUT known_received bigint[], OUT known_of bytea[],
    OUT told bigint
) LANGUAGE plpgsql AS $$
-- As relay_append, for a batch with packets of peers. p_witnessed and p_peers have NULL for a packet that was
-- published here. The duplicate index keeps the witness, which is what an OK tells.
-- p_mark_* say how far peers have been read once this batch is in: stored with it, by the holder of the link.
DECLARE
    v_day bigint;
    v_count bigint;
    v_identity bigint;
    v_stands boolean;
    v_own bigint;  -- NULL unless the packets are told another time than the log's own
    v_here integer;
BEGIN
    SELECT h.last_sequence, greatest(given.at, h.last_received_at), given.at, h.last_identity_sequence,
            h.tag = p_tag AND h.last_sequence >= p_seen AND h.home = h.tableoid
        INTO STRICT previous, received, told, v_identity, v_stands
        FROM log_head h, LATERAL (SELECT least(greatest(p_now, coalesce(h.last_told_at, h.last_received_at)),
            p_now + 300) AS at) AS given FOR UPDATE OF h;
    IF NOT v_stands THEN
        previous := NULL;
        RETURN;
    END IF;
    IF p_types && ARRAY['TRUST_EDGE'::bytea, 'TRUST_REVOCATION'::bytea] THEN
        -- Whoever counts an identity's acts of trust must have counted those that others committed (R-241).
        SELECT greatest(v_identity, max(p.sequence)) INTO v_identity FROM packets p
            WHERE p.author_id = ANY (ARRAY(SELECT a FROM unnest(p_authors, p_types) AS new (a, c)
                    WHERE c IN ('TRUST_EDGE'::bytea, 'TRUST_REVOCATION'::bytea)))
                AND p.content_type IN ('TRUST_EDGE'::bytea, 'TRUST_REVOCATION'::bytea)
                AND p.sequence > p_followed;
    END IF;
    IF v_identity > p_followed THEN
        previous := v_identity;
        told := NULL;
        RETURN;
    END IF;
    IF told <> p_judged THEN
        RETURN;
    END IF;
    v_own := nullif(told, received);
    v_here := CASE WHEN v_own IS NOT NULL THEN 0 END;
    v_day := received / 86400;
    base := greatest(previous, v_day << 32);
    IF base > previous THEN
        PERFORM relay_add_day(v_day);
    END IF;
    IF p_keys IS NOT NULL THEN
        -- The key of a packet that has expired, or that retention has removed, is free again. That of an
        -- erased packet is not: what it stated stays away.
        DELETE FROM packet_ids i USING unnest(p_keys, p_witnessed) AS new (k, w) WHERE i.packet_id = k
            AND NOT EXISTS (SELECT FROM packets p WHERE p.sequence = i.sequence
                AND (p.expires_at IS NULL OR p.expires_at >= greatest(p_now, w) OR p.body = ''))
            AND NOT EXISTS (SELECT FROM tombstones t WHERE t.sequence = i.sequence);
    END IF;
    -- This statement's snapshot is younger than the lock: it sees whatever others committed (R-111).
    SELECT array_agg(i.packet_id), array_agg(i.sequence), array_agg(i.received_at),
            array_agg(CASE WHEN i.packet_id = ANY (p_keys) THEN
                (SELECT p.packet_id FROM packets p WHERE p.sequence = i.sequence AND p.body <> '') END)
        INTO known_ids, known_sequences, known_received, known_of
        FROM packet_ids i WHERE i.packet_id = ANY (p_ids || p_keys);
    WITH stored AS (
        INSERT INTO packets (sequence, received_at, "timestamp", expires_at, packet_id, author_id,
                content_type, body, annotation, witnessed_at, ingest_peer)
            SELECT base + row_number() OVER (ORDER BY n), received, t, e, i, a, c, b, s, coalesce(w, v_own),
                coalesce(d, CASE WHEN w IS NULL THEN v_here END)
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
        UPDATE log_head SET last_sequence = base + v_count, last_received_at = received, last_told_at = told,
            latest_told_at = greatest(told, coalesce(latest_told_at, last_received_at)),
            most_ahead = greatest(most_ahead, received - told),
            last_identity_sequence =
                CASE WHEN p_moves_identities THEN base + v_count ELSE last_identity_sequence END;
        PERFORM pg_notify('relayd_log', (base + v_count)::text);
    END IF;
END $$;
"""


def upgrade() -> None:
    for statement in (*_TIMES.split(";\n"), _APPEND, _APPEND_REPLICATED):
        op.get_bind().exec_driver_sql(statement.strip())


def downgrade() -> None:
    raise NotImplementedError("what was appended since stands under the newer rules")
