-- The role as which archive, audit and the reports read the relay's log. It can read the log and nothing else.
--
--     STRATA_READER_PASSWORD=… psql --file deploy/spark/reader.sql "$RELAYD_DATABASE_URL"
--
-- Run it as a role that may create roles and grant on the relay's tables: a superuser, or their owner if it has
-- CREATEROLE. Run it after the relay's first start (or `relayd migrate`). Running it again sets the password again.
-- On a replica there is nothing to do: roles and grants are replicated.
\set ON_ERROR_STOP on
\getenv password STRATA_READER_PASSWORD
\if :{?password}
\else
  DO $$ BEGIN RAISE 'STRATA_READER_PASSWORD is not set'; END $$;
\endif

BEGIN;
SELECT 'CREATE ROLE strata_reader LOGIN' WHERE to_regrole('strata_reader') IS NULL \gexec
ALTER ROLE strata_reader PASSWORD :'password';
-- The log is read in long queries, over as many connections as there are tasks.
ALTER ROLE strata_reader SET default_transaction_read_only = on;
ALTER ROLE strata_reader SET statement_timeout = 0;
-- A driver or executor that has vanished must not hold a snapshot and thereby block vacuum.
ALTER ROLE strata_reader SET tcp_keepalives_idle = 60;
GRANT USAGE ON SCHEMA public TO strata_reader;
GRANT SELECT ON packets, packet_ids, log_head, tombstones TO strata_reader;
COMMIT;
