"""The file of relays met before."""

from __future__ import annotations

import pytest
from strata.protocol.errors import IdentityError
from strata.relays.connection.pins import PinFile

ONE, TWO = "did:strata:relay_1", "did:strata:relay_2"


@pytest.fixture
def path(tmp_path):
    return tmp_path / "config" / "pins.json"


@pytest.mark.req("R-298")
def test_a_pin_is_kept_and_never_replaced(path):
    assert PinFile(path).get("wss://a.example/strata") is None
    assert PinFile(path).add("wss://a.example/strata", ONE) == ONE
    assert PinFile(path).get("wss://a.example/strata") == ONE
    assert PinFile(path).add("wss://a.example/strata", TWO) == ONE
    assert PinFile(path).get("wss://a.example/strata") == ONE


def test_an_address_is_scheme_host_port_and_path(path):
    pins = PinFile(path)
    pins.add("wss://A.example/strata?x=1", ONE)
    assert pins.get("wss://me:secret@a.example:443/strata") == ONE
    for other in (
        "ws://a.example/strata",
        "wss://a.example:444/strata",
        "wss://a.example/",
        "wss://b.example/strata",
    ):
        assert pins.get(other) is None
    pins.add("ws://[::1]:7447/strata", TWO)
    assert pins.get("ws://[::1]:7447/strata") == TWO
    assert "secret" not in path.read_text() and "[::1]:7447" in path.read_text()


@pytest.mark.parametrize("body", ["", "[]", "{", '{"a": 7}', '{"a": "x"}', "[" * 5000])
def test_what_is_no_pin_file_is_an_error_and_is_left_alone(path, body):
    path.parent.mkdir()
    path.write_text(body)
    with pytest.raises(IdentityError, match=r"pins\.json"):
        PinFile(path).get("ws://a.example/")
    with pytest.raises(IdentityError):
        PinFile(path).add("ws://a.example/", ONE)
    assert path.read_text() == body


def test_a_link_to_the_file_stays_one(path, tmp_path):
    path.parent.mkdir()
    path.symlink_to(tmp_path / "real")
    PinFile(path).add("ws://a.example/", ONE)
    assert path.is_symlink() and (tmp_path / "real").stat().st_mode & 0o777 == 0o600
    (tmp_path / "real").chmod(0o640)
    PinFile(path).add("ws://b.example/", TWO)
    assert path.is_symlink() and (tmp_path / "real").stat().st_mode & 0o777 == 0o640


def test_nothing_is_left_beside_it(path):
    PinFile(path).add("ws://a.example/", ONE)
    PinFile(path).add("ws://b.example/", TWO)
    assert [file.name for file in path.parent.iterdir()] == ["pins.json"]
