"""Which relay a command talks to, and under which identity: relay URIs, AUTH, the notice."""

from __future__ import annotations

import json

import pytest
import strata
from strata.relays.uris import RelayProposal

RELAY_ID = "did:strata:relay_1"


@pytest.fixture
def closed(extended):
    """A relay that serves only authenticated sessions."""
    extended.model.server_id = RELAY_ID
    extended.model.lifetime = 10**9
    extended.model.needs_auth = frozenset({"publish", "subscribe"})
    return extended


def uri_of(fake, **members):
    return RelayProposal(http=f"http://127.0.0.1:{fake.port}", **members).to_uri()


@pytest.mark.req("R-293")
async def test_publish_authenticates_where_it_must_and_pins_the_relay(run, closed, key_file, tmp_path):
    pins = tmp_path / "pins.json"
    code, out, err = await run("publish", "--relay", closed.url, "--text", "x", "--pins", pins)
    assert (code, err) == (0, "") and out.strip() == closed.model.log[0][0].packet_id
    assert json.loads(pins.read_text()) == {closed.url: RELAY_ID}
    closed.model.server_id = "did:strata:impostor"
    code, _, err = await run("publish", "--relay", closed.url, "--text", "y", "--pins", pins)
    assert code == 1 and "unauthenticated" in err
    assert len(closed.model.log) == 1


async def test_reading_needs_an_identity_only_where_the_relay_wants_one(run, closed, key_file, make):
    closed.model.append(make(1))
    arguments = ("subscribe", "--relay", closed.url, "--no-live", "--json")
    code, _, err = await run(*arguments)
    assert code == 1 and "--identity FILE" in err
    code, out, _ = await run(*arguments, "--identity", key_file)
    assert code == 0 and json.loads(out)["packet"]["packet_id"] == make(1).packet_id
    code, _, err = await run(*arguments, "--identity", key_file, "--authenticate", "never")
    assert code == 1
    code, out, _ = await run("get", make(1).packet_id, "--relay", closed.url, "--identity", key_file)
    assert code == 0 and make(1).packet_id in out


async def test_a_failed_authentication_is_explained(run, closed, key_file):
    closed.model.server_id = "no did"
    code, _, err = await run("publish", "--relay", closed.url, "--text", "x")
    assert code == 1 and "unauthenticated" in err
    code, _, err = await run("subscribe", "--relay", closed.url, "--no-live", "--identity", key_file)
    assert code == 1 and "authentication failed" in err


async def test_to_authenticate_always_takes_an_identity(run, closed):
    code, _, err = await run("subscribe", "--relay", closed.url, "--authenticate", "always")
    assert code == 2 and "--identity" in err


@pytest.mark.req("R-402")
async def test_a_proposed_relay_is_used_only_once_agreed_to(run, extended, key_file):
    uri = uri_of(extended, label="A \u202e relay")
    code, _, err = await run("publish", "--relay", uri, "--text", "x")
    assert code == 2 and "--yes" in err and not extended.model.log and extended.connections == 0
    assert f"ws://127.0.0.1:{extended.port}/strata (A  relay)" in err
    assert "not encrypted" in err
    code, _, err = await run("publish", "--relay", uri, "--text", "x", "--yes")
    assert code == 0 and "not encrypted" in err and len(extended.model.log) == 1


async def test_a_uri_that_is_none_is_a_usage_error(run):
    for text in ("strata://gateway?http=https://h.example", "{}"):
        code, _, err = await run("subscribe", "--relay", text, "--yes")
        assert code == 2 and "--relay" in err


@pytest.mark.req("R-334", "R-335")
async def test_what_relays_see_can_be_read(run):
    code, out, _ = await run("notice")
    assert code == 0 and out.strip() == strata.WHAT_RELAYS_SEE.strip()
    for command in ("publish", "subscribe"):
        _, out, _ = await run(command, "--help")
        assert "strata notice" in out
