"""The shared vectors are what the Python implementation says today, and cover every case they are for."""

from __future__ import annotations

import json
from typing import Any

import pytest
from strata.protocol.errors import ErrorCode

from tests.support.relay_process import ROOT
from tests.web import vectors


@pytest.fixture(scope="module")
def made() -> dict[str, str]:
    return vectors.files()


def test_the_files_are_current(made: dict[str, str]) -> None:
    kept = {path.name: path.read_text("utf-8") for path in vectors.FOLDER.iterdir()}
    assert kept.keys() == made.keys()
    stale = [name for name in made if made[name] != kept[name]]
    assert not stale, "`make vectors` renews them"


def test_they_reach_what_they_are_for(made: dict[str, str]) -> None:
    read: dict[str, Any] = {name.removesuffix(".json"): json.loads(text) for name, text in made.items()}
    details = {case.get("detail") for case in read["canonical"]["texts"]}
    assert details == {
        None,
        "malformed_json",
        "not_utf8",
        "duplicate_member",
        "lone_surrogate",
        "number_out_of_range",
        "integer_out_of_range",
        "too_deep",
    }
    assert len(read["ed25519"]) == 43
    assert {case["code"] for case in read["retry"]["advice"]} >= set(ErrorCode)
    worlds = read["keychains"]["worlds"]
    said = {verdict["code"] for world in worlds for verdict in world["verdicts"]}
    assert {None, "invalid_signature", "key_revoked", "key_expired", "key_not_yet_valid"} <= said
    assert any(world["conflict"] for world in worlds) and any(world["documents"] for world in worlds)
    details = {verdict["detail"] for world in worlds for verdict in world["verdicts"]}
    assert {"unknown_key", "key_known", "recovery_key_required", "document_conflict"} <= details
    frames = {
        frame["type"]
        for talk in read["transcripts"]
        for step in talk["steps"]
        for frame in step.get("sent", ())
    }
    assert frames == {"SUBSCRIBE", "UNSUBSCRIBE", "PUBLISH", "AUTH"}


def test_the_lock_file_names_packages_and_no_place_to_get_them() -> None:
    lock = json.loads((ROOT / "web/package-lock.json").read_text())
    packages = {name: package for name, package in lock["packages"].items() if name}
    assert not [name for name, package in packages.items() if "resolved" in package]
    assert all(package["integrity"].startswith("sha512-") for package in packages.values())
    assert {name for name, package in packages.items() if not package.get("dev")} == {
        "node_modules/@noble/ed25519",
        "node_modules/@noble/hashes",
    }
