"""What the log needs to know about identities, provenance and policy.

- `packets.annotation`: this relay's finding about a packet's provenance; the body stays as it was signed.
- `log_head.last_identity_sequence`: the last packet that changed an identity. A process that appends says how
  far it has followed the log; if it has not applied every change, nothing is appended. So no process accepts
  a signature under a key that another has seen revoked (R-074), and none reads the changes before it must.
- `packets_identity`: finds an author's identity packets for admission without reading the author's others.
- `abuse`: authors that policy blocks or slows down.
"""

from __future__ import annotations

from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None

_TABLES = """
ALTER TABLE packets ADD COLUMN annotation bytea;
COMMENT ON COLUMN packets.annotation IS 'What the relay found about the provenance, where it matters.';

CREATE INDEX packets_identity ON packets (author_id, sequence) WHERE content_type IN (
    'KEY_EVENT'::bytea, 'RECOVERY_APPROVAL'::bytea, 'DID_DOCUMENT'::bytea, 'CLIENT_MANIFEST'::bytea,
    'TRUST_EDGE'::bytea, 'TRUST_REVOCATION'::bytea);

ALTER TABLE log_head ADD COLUMN last_identity_sequence bigint NOT NULL DEFAULT 0;
COMMENT ON COLUMN log_head.last_identity_sequence IS 'The last packet that changed an identity.';
UPDATE log_head SET last_identity_sequence = coalesce(
    (SELECT max(sequence) FROM packets
     WHERE content_type IN ('KEY_EVENT'::bytea, 'RECOVERY_APPROVAL'::bytea, 'DID_DOCUMENT'::bytea)), 0);

CREATE TABLE abuse (
    author_id  text PRIMARY KEY,
    verdict    text NOT NULL CHECK (verdict IN ('block', 'limit')),
    reason     text NOT NULL,
    expires_at bigint,
    created_at bigint NOT NULL DEFAULT extract(epoch FROM now())::bigint
);
COMMENT ON TABLE abuse IS 'Authors that policy blocks or slows down; filled by the pipeline or by hand.';

DROP FUNCTION relay_append(bigint, bytea[], bytea[], bytea[], bigint[], bigint[], bytea[], bytea[]);
"""

_APPEND = """
CREATE FUNCTION relay_append(
    p_now bigint, p_ids bytea[], p_authors bytea[], p_types bytea[],
    p_timestamps bigint[], p_expires bigint[], p_bodies bytea[], p_keys bytea[],
    p_annotations bytea[], p_followed bigint, p_moves_identities boolean,
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
DECLARE
    v_day bigint;
    v_count bigint;
    v_identity bigint;
BEGIN
    SELECT h.last_sequence, greatest(p_now, h.last_received_at), h.last_identity_sequence
        INTO STRICT previous, received, v_identity
        FROM log_head h FOR UPDATE;
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
    connection = op.get_bind()
    for statement in _TABLES.strip().split(";\n"):
        connection.exec_driver_sql(statement.rstrip(";"))
    connection.exec_driver_sql(_APPEND)


def downgrade() -> None:
    raise NotImplementedError("going back would forget what was found about stored packets")
