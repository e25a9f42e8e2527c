"""The files for the pipeline in deploy/ work as described: the role, the units, the commands, the locks."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import shutil
import subprocess
from pathlib import Path
from urllib.parse import urlsplit, urlunsplit

import asyncpg
import pytest
import typer
from strata.protocol.sequences import Span
from strata_pipeline.cli import app
from strata_pipeline.jobs.copy import copy_lake
from strata_pipeline.log.database import connect, log_state, read_span, sequence_of
from typer.core import TyperGroup

from relayd.postgres.binaries import find_binaries
from tests.support import lakes, relay_logs
from tests.support.object_lakes import erased
from tests.support.toy_lakes import DAY, faults, read, write_batch
from tests.support.toy_lakes import place as sequence

ROOT = Path(__file__).resolve().parents[2]
UNITS = sorted((ROOT / "deploy" / "systemd").glob("strata-pipeline-*"))
READER_SQL = ROOT / "deploy" / "spark" / "reader.sql"
PASSWORD = "it's a secret"


def _make_reader(
    url: str, password: str | None = PASSWORD, *, script: Path = READER_SQL
) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name != "STRATA_READER_PASSWORD"}
    if password is not None:
        environment["STRATA_READER_PASSWORD"] = password
    psql = find_binaries(None) / "psql"
    command: list[str | Path] = [psql, "--no-psqlrc", "--quiet", "--file", script, url]
    return subprocess.run(command, env=environment, capture_output=True, text=True)


def _as_reader(url: str) -> str:
    parts = urlsplit(url)
    return urlunsplit(parts._replace(netloc=parts.netloc.replace("relayd@", "strata_reader@")))


def test_the_reader_reads_the_log_and_nothing_else(log_url):
    for _ in range(2):  # twice has the same effect as once
        made = _make_reader(log_url)
        assert (made.returncode, made.stderr) == (0, "")
    packet = relay_logs.make(1)
    relay_logs.append(log_url, [packet])
    url = _as_reader(log_url)

    with contextlib.closing(connect(url)) as connection:
        head = log_state(connection).head
        assert sequence_of(connection, packet.digest) == head
        [batch] = read_span(connection, Span(0, head), "packet_id")
        assert batch.column("packet_id").to_pylist() == [packet.digest]

    async def refusals() -> list[str]:
        reader = await asyncpg.connect(url)
        refused = []
        try:
            assert await reader.fetchval("SHOW default_transaction_read_only") == "on"
            # A session that turns that off again still has no right to write.
            await reader.execute("SET default_transaction_read_only = off")
            for statement in (
                "SELECT * FROM relay_secrets",
                "SELECT * FROM abuse",
                "DELETE FROM packets",
                "UPDATE log_head SET last_sequence = 0",
                "CREATE TABLE mine (n int)",
            ):
                with pytest.raises(asyncpg.InsufficientPrivilegeError):
                    await reader.execute(statement)
                refused.append(statement)
        finally:
            await reader.close()
        return refused

    assert len(asyncio.run(refusals())) == 5


def test_the_reader_is_not_made_without_a_password(log_url):
    made = _make_reader(log_url, None)
    assert made.returncode != 0
    assert "STRATA_READER_PASSWORD is not set" in made.stderr


@pytest.mark.parametrize("may", ["CREATEROLE", "NOCREATEROLE"])
def test_the_owner_of_the_relays_tables_makes_the_reader_if_it_may_create_roles(log_url, tmp_path, may):
    owner, reader = f"owner_{may.lower()}", f"reader_{may.lower()}"
    tables = ("packets", "packet_ids", "log_head", "tombstones")
    owned = [f"ALTER TABLE {table} OWNER TO {owner}" for table in tables]
    lakes.sql(log_url, f"CREATE ROLE {owner} LOGIN {may}", *owned)
    script = tmp_path / "reader.sql"
    script.write_text(READER_SQL.read_text().replace("strata_reader", reader))
    parts = urlsplit(log_url)
    url = urlunsplit(parts._replace(netloc=parts.netloc.replace("relayd@", f"{owner}@")))
    made = _make_reader(url, script=script)
    assert (made.returncode == 0) == (may == "CREATEROLE"), made.stderr
    if made.returncode:
        assert "permission denied to create role" in made.stderr
        # What the page and the script say of it.
        for text in (READER_SQL.read_text(), (ROOT / "deploy" / "spark" / "README.md").read_text()):
            assert "a superuser, or their owner if it has" in text


def test_a_backup_of_the_folders_that_the_page_names_agrees_with_its_manifests(place, tmp_path):
    write_batch(tmp_path / "lake", [1, 2], [3])
    write_batch(tmp_path / "lake", [4], day=DAY + 1)
    copy_lake(tmp_path / "lake", place)
    assert erased(place, sequence(2)) == 1
    copy_lake(place, tmp_path / "lake")
    page = (ROOT / "deploy" / "spark" / "README.md").read_text()
    named = re.findall(r"^aws s3 sync .*/mnt/lake/(\w+) +s3://bucket/backup/\1$", page, re.MULTILINE)
    for name in named:
        if (tmp_path / "lake" / name).exists():
            shutil.copytree(tmp_path / "lake" / name, tmp_path / "backup" / name)
    assert named[-1] == "_manifests" and faults(tmp_path / "backup") == []
    assert read(tmp_path / "backup") == [sequence(1), sequence(4, DAY + 1)]


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="needs systemd-analyze")
def test_units_are_what_systemd_understands(tmp_path):
    assert len(UNITS) == 10
    for unit in UNITS:
        (tmp_path / unit.name).write_text(unit.read_text())
    units = [tmp_path / unit.name for unit in UNITS]
    told = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", "--recursive-errors=no", *units],
        capture_output=True,
        text=True,
    )
    # Where it is installed does not matter here; all other findings do.
    assert (told.returncode, told.stderr) == (0, "")


def _told_commands() -> list[tuple[str, str, list[str]]]:
    """(where, command, options) of every command line in deploy/spark, the units and compose."""
    line = re.compile(r"(?:strata-pipeline|--rm archive) ([a-z]+) (--.*)")
    found = [
        (file.name, command, re.findall(r"--[a-z-]+", options))
        for file in (*UNITS, ROOT / "deploy" / "spark" / "README.md")
        for command, options in line.findall(file.read_text())
    ]
    compose = (ROOT / "docker-compose.yml").read_text()
    [block] = re.findall(r"^  archive:\n(?:    .*\n|\n)+", compose, re.MULTILINE)
    [command] = re.findall(r"    command:\n((?:      - .*\n)+)", block)
    name, *arguments = re.findall(r"- (\S+)", command)
    found.append(("docker-compose.yml", name, [argument.partition("=")[0] for argument in arguments]))
    [keeper] = re.findall(r"^  lake-keeper:\n(?:    .*\n|\n)+", compose, re.MULTILINE)
    for command, options in re.findall(r"strata-pipeline ([a-z]+) (--.*) &", keeper):
        found.append(("lake-keeper", command, re.findall(r"--[a-z]+", options)))
    return found


def test_commands_told_exist():
    group = typer.main.get_command(app)
    assert isinstance(group, TyperGroup)
    commands = group.commands
    told = _told_commands()
    assert {where for where, _, _ in told} == {
        "README.md", "docker-compose.yml", "lake-keeper", "strata-pipeline-archive.service",
        "strata-pipeline-audit.service", "strata-pipeline-audit-since.service",
        "strata-pipeline-compact.service", "strata-pipeline-erase.service",
    }  # fmt: skip
    assert [command for where, command, _ in told if where == "lake-keeper"] == ["compact", "erase"]
    for where, command, options in told:
        known = {option for parameter in commands[command].params for option in parameter.opts}
        assert set(options) <= known, f"{where}: {command}"


def test_compose_and_image_agree():
    dockerfile, compose = ((ROOT / name).read_text() for name in ("Dockerfile", "docker-compose.yml"))
    assert re.findall(r"^FROM \S+ AS pipeline$", dockerfile, re.MULTILINE)
    assert "target: pipeline" in compose
    # `docker build .` builds the last stage.
    assert dockerfile.rpartition("\nFROM ")[2].endswith('"relayd"]\nCMD ["serve"]\n')


def test_an_init_is_the_first_process_of_every_container():
    """Otherwise a SIGTERM that comes before the program has a handler is lost."""
    stages = (ROOT / "Dockerfile").read_text().split("\nFROM ")
    run = [stage for stage in stages if "ENTRYPOINT" in stage]
    assert len(run) == 2
    for stage in run:
        assert 'ENTRYPOINT ["/usr/bin/tini", "--", ' in stage
        assert re.search(r"apt-get install .*\btini\b", stage)
    deployment = ROOT / "deploy" / "helm" / "relayd" / "templates" / "deployment.yaml"
    assert "command:" not in deployment.read_text()  # it would replace the init


def test_compose_passes_on_what_protects_a_relay_and_bounds_each_container():
    compose, example = ((ROOT / name).read_text() for name in ("docker-compose.yml", ".env.example"))
    for name in ("RELAYD_METRICS_LISTEN", "RELAYD_TRUSTED_PROXIES", "RELAYD_REQUIRE_AUTH"):
        assert f"{name}: ${{{name}:-" in compose
    defaults = dict(re.findall(r"\$\{([A-Z_]+):-([^}]*)\}", compose))
    assert dict(re.findall(r"^([A-Z_]+)=(.*)$", example, re.MULTILINE)).items() <= defaults.items()
    services = re.findall(
        r"^  ([a-z-]+):\n((?:    .*\n|\n)+)", compose.partition("\nservices:\n")[2], re.MULTILINE
    )
    bounded = {name for name, body in services if "mem_limit:" in body or "<<: *spark" in body}
    assert bounded == {name for name, body in services if "image:" in body or "<<: *spark" in body}
    assert len(bounded) == 12
    # No account with a well-known password.
    assert "GF_SECURITY_DISABLE_INITIAL_ADMIN_CREATION: ${GRAFANA_WITHOUT_ADMIN:-true}" in compose
    assert '"127.0.0.1:${GRAFANA_PORT:-3000}:3000"' in compose


def _pins(name: str) -> dict[str, str]:
    lines = (ROOT / "locks" / name).read_text().splitlines()
    return dict(re.findall(r"^([\w.-]+)==(\S+)", "\n".join(lines), re.MULTILINE))


def test_the_image_has_what_is_tested_here():
    tested, installed = _pins("dev.txt"), _pins("pipeline.txt")
    assert {"pyspark", "pyarrow", "adbc-driver-postgresql", "pynacl", "blake3", "msgspec"} <= set(installed)
    assert {name: tested.get(name) for name in installed} == installed
