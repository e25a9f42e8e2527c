"""The settings themselves: defaults, ranges, and what is never printed."""

from __future__ import annotations

import pickle

import pytest

from relayd.config import HARD_MAX_PACKET_BYTES, Settings, load, setting_table
from relayd.manual import describe_type
from tests.relayd.settings_files import SECRET, problems


def test_defaults_are_valid():
    assert load() == Settings()


@pytest.mark.req("R-118", "R-120")
def test_packets_up_to_256_kib_by_default_and_less_if_asked():
    assert load().max_packet_bytes == 262_144
    assert load(None, {"RELAYD_MAX_PACKET_BYTES": "4096"}).max_packet_bytes == 4096


@pytest.mark.req("R-119")
def test_no_setting_admits_more_than_one_mebibyte():
    settings = load(None, {"RELAYD_MAX_PACKET_BYTES": str(4 * 2**20)})
    assert settings.max_packet_bytes == HARD_MAX_PACKET_BYTES == 1_048_576
    assert settings.warnings == ("max_packet_bytes 4194304 is above the hard limit; using 1048576",)
    assert load(None, {"RELAYD_MAX_PACKET_BYTES": "1048576"}).warnings == ()


@pytest.mark.req("R-123")
def test_a_frame_has_room_for_escapes_and_the_envelope():
    assert load(None, {"RELAYD_MAX_PACKET_BYTES": "10000"}).max_frame_bytes == 2 * 10_000 + 65_536


def test_the_defaults_that_the_requirements_name():
    settings = load()
    assert settings.path == "/strata"
    assert (settings.ping_interval, settings.ping_misses) == (30.0, 2)
    assert (settings.malformed_limit, settings.malformed_window) == (20, 60.0)


def test_no_secret_is_ever_printed(tmp_path):
    environ = {
        "RELAYD_IDENTITY_SEED": SECRET,
        "RELAYD_DATABASE_URL": "postgresql://u:hunter2@h/d",
        "RELAYD_READ_DATABASE_URL": "postgresql://u:hunter2@r/d",
    }
    settings = load(None, environ)
    for text in (repr(settings), str(settings), f"{settings.shown()}"):
        assert "hunter2" not in text
        assert SECRET not in text
        assert "********" in text
    bad = {"RELAYD_IDENTITY_SEED": SECRET[:-1], "RELAYD_DATABASE_URL": "hunter2"}
    assert not any("hunter2" in problem or "abab" in problem for problem in problems(None, bad))


def test_settings_travel_to_worker_processes():
    settings = load(None, {"RELAYD_IDENTITY_SEED": SECRET}, {"port": 0})
    assert pickle.loads(pickle.dumps(settings)) == settings


def test_every_setting_is_documented():
    for row in setting_table().values():
        assert row.doc.endswith("."), row.name
        assert describe_type(row.type), row.name
        if describe_type(row.type).startswith(("integer", "number")) and row.name != "port":
            assert row.unit, row.name
