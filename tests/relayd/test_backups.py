"""What a backup does to the server that is copied."""

from __future__ import annotations

from pathlib import Path

import pytest

from relayd.backups import _allow_replication

RULES = "local all all trust\nhost all all 127.0.0.1/32 scram-sha-256"


@pytest.mark.parametrize("end", ["\n", ""])
def test_the_rules_of_a_server_are_never_away_while_one_is_added(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, end: str
):
    path = tmp_path / "postgres-18" / "pg_hba.conf"
    path.parent.mkdir()
    path.write_text(RULES + end)
    seen = []
    opened = Path.open

    def watched(self: Path, *arguments: object, **options: object) -> object:
        file = opened(self, *arguments, **options)  # type: ignore[call-overload]
        with open(path, "rb") as there:  # what there is if the process is killed now, or the disk is full
            seen.append(there.read())
        return file

    monkeypatch.setattr(Path, "open", watched)
    assert _allow_replication(tmp_path)
    monkeypatch.undo()
    assert {found.decode() for found in seen} == {RULES + end}
    assert path.read_text() == f"{RULES}\nlocal replication all trust\n"
    assert not _allow_replication(tmp_path)
