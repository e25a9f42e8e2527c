"""Which relay a command talks to, and under which identity: relay URIs, AUTH, the notice."""

from __future__ import annotations

import json

import pytest
import strata
from strata.protocol import wire
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


@pytest.mark.parametrize("url", ["http://relay.example/strata", "", "ws://", "ws://relay.example:99999"])
async def test_a_url_of_no_relay_is_a_usage_error_of_every_command(run, key_file, tmp_path, url):
    """The exit code 1 would say that the relay refused, was away, or did not have it."""
    packet_id = "0x" + "0" * 64
    for command in (
        ("publish", "--text", "x"),
        ("subscribe", "--no-live"),
        ("get", packet_id),
        ("channel", "room", "--topic", "/chat/1/room/proto"),
        ("identity", "show"),
        ("identity", "rotate", "-o", tmp_path / "new.json"),
        ("identity", "revoke", "keys-1"),
        ("identity", "approve", packet_id),
        ("identity", "document", "--recovery-key", key_file),
        ("identity", "create", "-o", tmp_path / "created.json", "--recovery", 1),
        ("moderate", "list"),
    ):
        code, out, err = await run(*command, "--relay", url)
        assert (code, out) == (2, ""), (command, err)
        assert "not a relay URL" in err
    assert list(tmp_path.glob("*.json")) == [key_file]


@pytest.mark.req("R-298")
async def test_whoever_manages_keys_or_moderates_holds_the_relay_to_its_pin_too(
    run, closed, key_file, tmp_path
):
    pins = tmp_path / "pins"
    packet_id = "0x" + "0" * 64
    for command in (
        ("identity", "show"),
        ("identity", "rotate", "-o", tmp_path / "new.json"),
        ("identity", "revoke", "keys-1", "--yes"),
        ("identity", "approve", packet_id),
        ("moderate", "list"),
        ("moderate", "ban", "did:strata:x", "--reason", "x"),
    ):
        pins.write_text(json.dumps({closed.url: "did:strata:relay_2"}))
        for by in ({"STRATA_PINS": pins}, {}):
            code, _, err = await run(*command, "--relay", closed.url, *([] if by else ["--pins", pins]), **by)
            assert code == 1 and "not the one expected" in err, (command, err)
    assert not any(isinstance(message, wire.Auth) for message in closed.received_so_far())


async def test_keys_can_be_shown_by_a_relay_that_wants_to_know_who_asks(run, closed, key_file, identities):
    show = ("identity", "show", "--relay", closed.url, "--json")
    code, out, err = await run(*show)
    assert code == 0 and json.loads(out)["did"] == identities[0].did, err
    code, _, err = await run(*show, identities[1].did)
    assert code == 1 and "--identity FILE" in err  # nobody is told who asks for another's keys unasked
    code, out, err = await run(*show, identities[1].did, "--identity", key_file)
    assert code == 0 and json.loads(out)["did"] == identities[1].did, err


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
