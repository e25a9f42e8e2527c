"""Relay connection URIs: both forms, every row of relay.md §20, and what strangers may try."""

from __future__ import annotations

import json
import string

import pytest
from hypothesis import given
from hypothesis import strategies as st
from strata.relays import uris
from strata.relays.uris import RelayProposal, parse

FULL = RelayProposal(
    http="https://relay.example.net:8443",
    ws="wss://ws.example.net/strata",
    extra_ws=("wss://b.example.net/s", "ws://a.example.net:81/strata?x=1"),
    label="Übung & more = fun +1 %41",
    mode="manual",
)

hosts = st.text(string.ascii_lowercase + string.digits, min_size=1, max_size=20).map("{}.example".format)
ports = st.none() | st.integers(1, 65_535)
websockets = st.builds(
    "{}://{}{}/{}".format,
    st.sampled_from(["ws", "wss"]),
    hosts,
    ports.map(lambda port: "" if port is None else f":{port}"),
    st.text(string.ascii_letters + string.digits + "-._~/", max_size=12),
)
proposals = st.builds(
    RelayProposal,
    http=st.builds("{}://{}".format, st.sampled_from(["http", "https"]), hosts),
    ws=st.just("") | websockets,
    extra_ws=st.lists(websockets, max_size=4).map(tuple),
    label=st.none() | st.text(max_size=100),
    mode=st.sampled_from([None, "auto", "manual"]),
)


@pytest.mark.req("R-392", "R-398")
@given(proposals)
def test_both_forms_give_back_what_was_written(proposal):
    assert parse(proposal.to_uri()) == proposal
    assert parse(proposal.to_json()) == proposal


@pytest.mark.req("R-392", "R-393")
def test_the_two_forms_written_out():
    assert FULL.to_uri() == (
        "strata://relay?v=1&http=https%3A%2F%2Frelay.example.net%3A8443&ws=wss%3A%2F%2Fws.example.net%2Fstrata"
        "&label=%C3%9Cbung%20%26%20more%20%3D%20fun%20%2B1%20%2541&mode=manual"
        "&extra_ws=wss%3A%2F%2Fb.example.net%2Fs&extra_ws=ws%3A%2F%2Fa.example.net%3A81%2Fstrata%3Fx%3D1"
    )
    assert json.loads(FULL.to_json()) == {
        "type": "strata.relay",
        "v": 1,
        "http": "https://relay.example.net:8443",
        "ws": "wss://ws.example.net/strata",
        "label": "Übung & more = fun +1 %41",
        "mode": "manual",
        "extra_ws": ["wss://b.example.net/s", "ws://a.example.net:81/strata?x=1"],
    }
    assert parse(FULL.to_uri()) == parse(FULL.to_json()) == FULL


@pytest.mark.req("R-393")
@pytest.mark.parametrize(
    "uri",
    [
        "strato://relay?http=https://h.example",
        "https://relay?http=https://h.example",
        "strata://gateway?http=https://h.example",
        "strata://me@relay?http=https://h.example",
        "strata://relay:1?http=https://h.example",
        "strata://relay/path?http=https://h.example",
        "strata://relay?http=https://h.example#fragment",
        "strata:relay?http=https://h.example",
        "strata://relay?http=https://h.example&label=%zz",
        "strata://relay?http=https://h.example&label=%ff",
        "strata://relay?http=https://h.example&label=a b",
        "strata://relay?http=https://h.example&label=ü",
        "strata://relay?http=https://h.example&http=https://g.example",
        "strata://relay",
        "",
    ],
)
def test_what_is_no_relay_uri_is_refused(uri):
    with pytest.raises(ValueError):
        parse(uri)


@pytest.mark.req("R-393")
def test_scheme_and_authority_know_no_case_and_a_plus_is_a_plus():
    assert parse("STRATA://Relay/?http=https://h.example&label=a+b").label == "a+b"


@pytest.mark.req("R-394")
def test_the_version():
    assert parse("strata://relay?http=https://h.example").http == "https://h.example"
    assert parse("strata://relay?v=1&http=https://h.example").http == "https://h.example"
    for version in ("2", "", "1.0", "01"):
        with pytest.raises(ValueError, match="version"):
            parse(f"strata://relay?v={version}&http=https://h.example")


@pytest.mark.req("R-394", "R-401")
@pytest.mark.parametrize(
    "change",
    [
        {"type": "strata.gateway"},
        {"type": None},
        {"v": 2},
        {"v": "1"},
        {"v": True},
        {"v": None},
        {"http": None},
    ],
)
def test_the_json_form_needs_type_version_and_http(change):
    members = {"type": "strata.relay", "v": 1, "http": "https://h.example"}
    assert parse(json.dumps(members)) == RelayProposal(http="https://h.example")
    with pytest.raises(ValueError):
        parse(json.dumps(members | change))


@pytest.mark.req("R-401")
@pytest.mark.parametrize("text", ["{", "{}", '{"type":"strata.relay","v":1,"http":7}', "{" * 5000])
def test_json_that_is_none_of_ours_is_refused(text):
    with pytest.raises(ValueError):
        parse(text)


@pytest.mark.parametrize(
    "member", [{"ws": 7}, {"label": []}, {"extra_ws": "wss://a.example"}, {"extra_ws": [7]}]
)
def test_members_of_the_wrong_type_are_refused_and_null_is_absence(member):
    members = {"type": "strata.relay", "v": 1, "http": "https://h.example"}
    with pytest.raises(ValueError):
        parse(json.dumps(members | member))
    assert parse(json.dumps(members | dict.fromkeys(member))) == RelayProposal(http="https://h.example")


@pytest.mark.req("R-395")
@pytest.mark.parametrize(
    "url",
    [
        "ftp://h.example",
        "h.example",
        "https://h.example?x=1",
        "https://h.example#x",
        "https://me:secret@h.example",
        "https://h.example:0",
        "https://h.example:99999",
        "https://[::1",
        "https://",
        "https://h.exa mple",
        "https://h.example\\@evil.example",
        "",
    ],
)
def test_what_is_no_web_address_is_refused(url):
    with pytest.raises(ValueError):
        RelayProposal(http=url)


@pytest.mark.req("R-395")
def test_the_path_of_the_web_address_is_ignored():
    assert RelayProposal(http="https://H.example:8443/some/path").http == "https://h.example:8443"
    assert RelayProposal(http="http://[::1]:80/").http == "http://[::1]:80"


@pytest.mark.req("R-396")
@pytest.mark.parametrize(
    "url", ["https://h.example", "h.example/strata", "ws://", "wss://me@h.example/", "wss://h#x"]
)
def test_what_is_no_websocket_address_is_refused(url):
    with pytest.raises(ValueError):
        RelayProposal(http="https://h.example", ws=url)
    with pytest.raises(ValueError):
        RelayProposal(http="https://h.example", extra_ws=("wss://h.example/strata", url))


@pytest.mark.req("R-397")
def test_the_websocket_address_is_derived():
    assert RelayProposal(http="https://h.example").ws == "wss://h.example/strata"
    assert RelayProposal(http="http://h.example:7447/x").ws == "ws://h.example:7447/strata"


@pytest.mark.req("R-398")
def test_further_addresses_keep_their_order_and_their_number_is_bounded():
    proposal = parse(
        "strata://relay?extra_ws=wss://b.example/&http=https://h.example&extra_ws=wss://a.example/"
    )
    assert proposal.extra_ws == ("wss://b.example/", "wss://a.example/")
    with pytest.raises(ValueError, match="16"):
        RelayProposal(http="https://h.example", extra_ws=("wss://a.example/",) * 17)


@pytest.mark.req("R-399")
def test_labels_are_short_plain_text():
    label = "ab\n\x07\u202e\u2028" + "c" * 100
    assert RelayProposal(http="https://h.example", label=label).label == "ab" + "c" * 62
    assert RelayProposal(http="https://h.example", label="\n \t").label is None
    assert RelayProposal(http="https://h.example", label="<b>ü</b>").label == "<b>ü</b>"


@pytest.mark.req("R-400")
@pytest.mark.parametrize(
    ("written", "read"),
    [("auto", "auto"), ("manual", "manual"), ("banana", None), ("", None), ("AUTO", None)],
)
def test_modes(written, read):
    assert parse(f"strata://relay?http=https://h.example&mode={written}").mode == read


@pytest.mark.req("R-402")
def test_unencrypted_and_foreign_addresses_draw_a_warning():
    assert RelayProposal(http="https://h.example").warnings == ()
    plain = RelayProposal(http="http://h.example").warnings
    assert len(plain) == 2 and all("not encrypted" in warning for warning in plain)
    (foreign,) = RelayProposal(http="https://h.example", ws="wss://evil.example/strata").warnings
    assert "another host" in foreign


def test_members_nobody_knows_are_ignored():
    assert parse("strata://relay?http=https://h.example&pin=x&&") == RelayProposal(http="https://h.example")


def test_what_is_meant_as_a_relay_uri():
    assert uris.is_relay_uri("strata://relay") and uris.is_relay_uri(' {"type":1}')
    assert not uris.is_relay_uri("ws://h.example/strata")


@given(st.text())
def test_any_text_is_read_or_refused_with_a_sentence(text):
    for candidate in (text, f"strata://relay?{text}", f"strata://relay?http={text}"):
        try:
            proposal = parse(candidate)
        except ValueError:
            continue
        assert proposal.ws.startswith(("ws://", "wss://"))


def test_a_text_without_end_is_refused_unread():
    with pytest.raises(ValueError, match="long"):
        parse("strata://relay?http=https://h.example&label=" + "a" * 10_000)
