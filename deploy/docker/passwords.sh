#!/bin/bash
# Writes the passwords of docker-compose.yml to files that the services read. Those in .env take precedence; the
# others are made at the first start and kept. A database from the time before passwords were made keeps the one
# that everybody knew: PostgreSQL takes a password only when it creates a database.
set -Eeuo pipefail
umask 022
folder=${PASSWORDS:-/run/passwords}
reader=${READER:-/run/reader}
data=${PGDATA:-/var/lib/postgresql/data}

made() { od -An -N24 -tx1 /dev/urandom | tr -d ' \n'; }

keep() { # FILE VALUE: atomically, so that nobody reads half of it
    printf '%s' "$2" > "$1.new"
    mv "$1.new" "$1"
}

in_url() { # TEXT: percent-encoded for a URL, byte by byte
    local LC_ALL=C i each
    for ((i = 0; i < ${#1}; i++)); do
        each=${1:i:1}
        case $each in
        [A-Za-z0-9._~-]) printf '%s' "$each" ;;
        *) printf '%%%02X' "$(($(printf '%d' "'$each") & 255))" ;;
        esac
    done
}

if [ -n "${POSTGRES_PASSWORD:-}" ]; then
    keep "$folder/postgres" "$POSTGRES_PASSWORD"
elif [ ! -s "$folder/postgres" ]; then
    if [ -s "$data/PG_VERSION" ]; then
        keep "$folder/postgres" relayd
        echo "passwords: this database has the password 'relayd'; docs/guides/operations.md tells how to change it" >&2
    else
        keep "$folder/postgres" "$(made)"
    fi
fi
keep "$folder/database-url" "postgresql://relayd:$(in_url "$(cat "$folder/postgres")")@postgres:5432/relayd"

if [ -n "${STRATA_READER_PASSWORD:-}" ]; then
    keep "$reader/password" "$STRATA_READER_PASSWORD"
elif [ ! -s "$reader/password" ]; then
    keep "$reader/password" "$(made)"
fi
keep "$reader/url" "postgresql://strata_reader:$(in_url "$(cat "$reader/password")")@postgres:5432/relayd"
