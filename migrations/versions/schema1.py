"""The schema of a relay's database.

The log:

- `log_head` has one row, and that row is the lock of the log. A transaction that appends, or adds or removes
  partitions, locks it FOR UPDATE first. So sequences become visible in commit order with any number of
  processes (A-040), and the uniqueness of ids across partitions needs no global index.
- A sequence is `day << 32 | ordinal`; `packets` has a partition for each day.
- `packets_kept` is the oldest partition: it covers every day that retention has removed, and holds only
  the packets that retention spares.
- `packet_ids` maps ids to sequences and outlives the packets (R-310). Its partitions span many days, so
  that a look-up, which cannot know the day, probes only two or three of them.
- author_id and content_type are bytea: UTF-8, since a JSON string may hold U+0000 and text may not.

Times: `log_head.last_told_at` is the time last given to a packet, as it is told. It is held when a clock
steps back, but never further ahead of the clock than `relayd.lineage.SKEW_SECONDS`. `last_received_at` is the
log's own time, by which days and sequences go: it never decreases. A packet that is stored while the log's
own time is ahead has the time it is told by in `witnessed_at`, as a packet of a peer has, and 0 in
`ingest_peer`.

Terms: a restored backup ends earlier than the log that was lost, and the sequences after its end are given
out a second time. So a process that begins to write opens a term, and a place is a sequence with the tag of
its term (`relayd/lineage.py`). Restoring a dump makes another table than the `home` of the term.

Identities: a process that appends says how far it has followed the log. If it has not applied every change
before `last_identity_sequence`, nothing is appended: so no process accepts a signature under a key that
another has seen revoked (R-074).

Moderation: all processes follow `moderation`. `moderation_log` and `tombstones` only grow: triggers refuse
everything else. The row of an erased packet stays at its place with the same id and time, which archives have
hashed; it has no author, no type and no body, and expired in 1970, so that it is sent to no reader.

Peers: how far a peer was read is stored in the transaction that stores the packets (R-364), and only by the
process that holds the link, as `fence` shows. `peer_comparisons.asked` counts the requests of operators,
`done` how many have been met: a request needs no connection to the process that reads from the peers.
"""

from __future__ import annotations

from alembic import op

revision = "schema1"
down_revision = None
branch_labels = None
depends_on = None

_TABLES = """
CREATE TABLE log_head (
    only_row               boolean PRIMARY KEY DEFAULT true CHECK (only_row),
    last_sequence          bigint NOT NULL,
    last_received_at       bigint NOT NULL,
    last_told_at           bigint,
    latest_told_at         bigint,
    most_ahead             bigint NOT NULL DEFAULT 0,
    last_identity_sequence bigint NOT NULL DEFAULT 0,
    generation_days        integer NOT NULL,
    tag                    bytea,
    epoch                  integer NOT NULL DEFAULT 1,
    home                   oid
);
COMMENT ON TABLE log_head IS 'One row: the last sequence given out, and the lock of the log.';
COMMENT ON COLUMN log_head.generation_days IS 'Days covered by the next partition of packet_ids.';
COMMENT ON COLUMN log_head.last_told_at IS 'The time last given to a packet, as it is told.';
COMMENT ON COLUMN log_head.latest_told_at IS 'The latest time ever given to a packet.';
COMMENT ON COLUMN log_head.most_ahead IS 'The most by which the log''s own time was ahead of the time told.';
COMMENT ON COLUMN log_head.last_identity_sequence IS 'The last packet that changed an identity.';
COMMENT ON COLUMN log_head.tag IS 'The tag of the current term.';
COMMENT ON COLUMN log_head.epoch IS 'The epoch: how often the log is known to have lost its end, and 1.';
COMMENT ON COLUMN log_head.home IS 'The table in which the current term was opened.';
INSERT INTO log_head (last_sequence, last_received_at, generation_days) VALUES (0, 0, 30);

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
    annotation   bytea,
    witnessed_at bigint,
    ingest_peer  integer,
    CONSTRAINT packets_pkey PRIMARY KEY (sequence)
) PARTITION BY RANGE (sequence);
COMMENT ON TABLE packets IS 'The log. body is the record; the other columns are derived from it (A-006).';
COMMENT ON COLUMN packets.annotation IS 'What the relay found about the provenance, where it matters.';
COMMENT ON COLUMN packets.witnessed_at IS 'When the first relay received it, by the word of the peer.';
COMMENT ON COLUMN packets.ingest_peer IS 'The peer that delivered it; NULL for what was published here.';
CREATE INDEX packets_author ON packets (author_id, sequence);
CREATE INDEX packets_type ON packets (content_type, sequence);
CREATE INDEX packets_timestamp ON packets USING brin ("timestamp") WITH (pages_per_range = 16);
CREATE INDEX packets_identity ON packets (author_id, sequence) WHERE content_type IN (
    'KEY_EVENT'::bytea, 'RECOVERY_APPROVAL'::bytea, 'DID_DOCUMENT'::bytea, 'CLIENT_MANIFEST'::bytea,
    'TRUST_EDGE'::bytea, 'TRUST_REVOCATION'::bytea);

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

CREATE TABLE abuse (
    author_id  text PRIMARY KEY,
    verdict    text NOT NULL CHECK (verdict IN ('block', 'limit')),
    reason     text NOT NULL,
    expires_at bigint,
    created_at bigint NOT NULL DEFAULT extract(epoch FROM now())::bigint
);
COMMENT ON TABLE abuse IS 'Authors that policy blocks or slows down; filled by the pipeline or by hand.';

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
    problem       text,
    conduct       jsonb
);
COMMENT ON TABLE peers IS 'The relays that this one reads from.';
COMMENT ON COLUMN peers.conduct IS 'What the peer has done within a week, by the hour.';
COMMENT ON COLUMN peers.fence IS 'Counts the processes that have held the link: only the last may write.';
CREATE TABLE peer_cursors (
    peer_id      integer NOT NULL REFERENCES peers ON DELETE CASCADE,
    stream       text NOT NULL,
    cursor       text,
    last_witness bigint,
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
COMMENT ON COLUMN peer_comparisons.equal_at IS 'When last nothing of the peer''s was missing here.';
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

_DATABASE = """
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

_FIRST_TERM = """
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
    p_mark_last bigint[], p_judged bigint,
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
    INSERT INTO peer_cursors AS old (peer_id, stream, cursor, last_witness)
        SELECT d, m, c, l
        FROM unnest(p_mark_peers, p_mark_fences, p_mark_streams, p_mark_cursors, p_mark_last)
                AS new (d, f, m, c, l)
            JOIN peers ON peers.peer_id = d AND peers.fence = f
        ON CONFLICT (peer_id, stream) DO UPDATE SET cursor = excluded.cursor,
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
    connection = op.get_bind()
    # A server may be built without lz4. Then large bodies are better not compressed at all than with pglz,
    # which costs more than reading the bytes.
    has_lz4 = connection.exec_driver_sql(
        "SELECT 'lz4' = ANY (enumvals) FROM pg_settings WHERE name = 'default_toast_compression'"
    ).scalar()
    how = "COMPRESSION lz4" if has_lz4 else "STORAGE external"
    bodies = (f"ALTER TABLE {table} ALTER COLUMN body SET {how}" for table in ("packets", "packets_kept"))
    functions = (_ADD_DAY, _POSITION, _DATABASE, _OPEN_TERM, _APPEND, _APPEND_REPLICATED, _ONLY_GROWS)
    tables, first_term, triggers = (block.split(";\n") for block in (_TABLES, _FIRST_TERM, _TRIGGERS))
    for statement in (*tables, *bodies, *functions, *first_term, *triggers):
        if statement.strip():
            connection.exec_driver_sql(statement.strip().rstrip(";"))


def downgrade() -> None:
    raise NotImplementedError("the first revision has nothing below it; drop the database instead")
