"""`strata relays export`: the probe log, for those who collect scores from many clients."""

from __future__ import annotations

import msgspec
from strata.relays.conduct import Aspect
from strata.relays.pool.reputation import Observation
from strata.relays.pool.score_file import ScoreFile
from strata.tools.cli import app
from typer.testing import CliRunner

NOW = 1_760_000_000.25


def test_the_log_comes_as_it_was_observed(tmp_path):
    seen = [
        Observation("wss://a.example", NOW, Aspect.CONNECT, good=1),
        Observation("wss://b.example", NOW + 1, Aspect.PING, 4, 1, 0.1 + 0.2),
    ]
    with ScoreFile(tmp_path / "relays.db") as file:
        file.write(seen, [], NOW)
    told = CliRunner().invoke(app, ["relays", "export", "--scores", str(tmp_path / "relays.db")])
    assert told.exit_code == 0
    assert [msgspec.json.decode(line, type=Observation) for line in told.stdout.splitlines()] == seen


def test_a_file_that_is_none_is_an_error(tmp_path):
    (tmp_path / "relays.db").write_text("no database, and longer than the header of one would have to be")
    told = CliRunner().invoke(app, ["relays", "export", "--scores", str(tmp_path / "relays.db")])
    assert told.exit_code == 1
    assert "relays.db" in told.stderr
