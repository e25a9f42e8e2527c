"""`strata status`: what it finds, and what it says when there is nothing to find."""

from __future__ import annotations

import json
from dataclasses import astuple
from functools import partial

import pytest
from strata.tools.cli.status import Clock, Handshake, clock_of
from strata.tools.cli.status import _date as date_of

from tests.support.strata_command import run_strata

RELAY_ID = "did:strata:relay_1"


@pytest.fixture
def run(tmp_path):
    return partial(run_strata, "status", XDG_CONFIG_HOME=tmp_path / "config")


@pytest.fixture
def announcing(extended):
    extended.manifest_body = json.dumps(
        {
            "relay_id": RELAY_ID,
            "extensions": ["history_marker", "gapless"],
            "status": "ok",
            "software": {"name": "naive\x1b[2J", "version": "7"},
            "limits": {"max_packet_bytes": 1000, "max_limit": 500, "rates": {"window_seconds": 60}},
        }
    ).encode()
    return extended


async def test_a_reachable_relay_as_json(run, announcing):
    code, out, err = await run(announcing.url, "--json", "--samples", 3)
    assert (code, err, out.count("\n")) == (0, "", 1)
    found = json.loads(out)
    assert (found["reachable"], found["url"], found["error"]) == (True, announcing.url, None)
    assert (found["protocol"], found["packet_version"]) == ("RFC-0004", 1)
    assert (found["relay_id"], found["status"]) == (RELAY_ID, "ok")
    assert found["extensions"] == ["gapless", "history_marker"]
    assert found["limits"] == {"max_packet_bytes": 1000, "max_limit": 500, "rates": {"window_seconds": 60}}
    clock = found["clock"]
    assert abs(clock["difference"]) <= clock["error"] + 0.01, "both ends have the same clock"
    assert clock["samples"] == 3 and clock["error"] <= 1
    for what in ("connect", "round_trip"):
        spread = found["latency"][what]
        assert spread["samples"] == 3 and 0 < spread["min"] <= spread["median"] <= spread["max"] < 30
    assert found["authenticated"] is None and found["authentication_error"] is None


async def test_a_reachable_relay_for_people(run, announcing):
    code, out, _ = await run(announcing.url, "-n", 2)
    rows = {line[:15].rstrip(): line[15:] for line in out.splitlines()}
    assert code == 0
    assert rows["relay"] == announcing.url and rows["reachable"] == "yes"
    assert rows["limits"] == "max_packet_bytes 1000" and rows[""] == "max_limit 500"
    assert "this machine" in rows["clock"] and "by the Date of 2 handshakes" in rows["clock"]
    assert "(2 samples" in rows["connect"]
    assert "\x1b" not in out, "a relay cannot steer the terminal"


async def test_a_plain_relay_leaves_gaps(run, plain):
    code, out, _ = await run(plain.url, "--json", "-n", 1)
    found = json.loads(out)
    assert code == 0 and found["extensions"] == []
    assert found["limits"] is found["software"] is found["relay_id"] is None
    assert found["latency"]["round_trip"] is None and found["latency"]["connect"]["samples"] == 1
    code, out, _ = await run(plain.url, "-n", 1)
    assert code == 0 and "unknown" in out


async def test_nobody_there_is_exit_code_1(run, unused_tcp_port):
    url = f"ws://127.0.0.1:{unused_tcp_port}/strata"
    code, out, err = await run(url)
    assert (code, out) == (1, "") and "is the relay running?" in err
    code, out, err = await run(url, "--json")
    assert (code, err) == (1, "")
    assert json.loads(out) == {"url": url, "reachable": False, "error": json.loads(out)["error"]}


async def test_a_server_that_is_no_relay_is_exit_code_1(run, extended):
    extended.refuse_with = 404
    code, _, err = await run(extended.url)
    assert code == 1 and "/strata" in err


async def test_what_is_no_url_is_exit_code_2(run):
    code, out, err = await run("http://127.0.0.1/")
    assert (code, out) == (2, "") and "not a relay URL" in err


async def test_whom_the_relay_takes_an_identity_for(run, extended, identities, tmp_path):
    extended.model.server_id = RELAY_ID
    extended.model.lifetime = 10**9
    extended.model.grants = frozenset({"subscribe"})
    identities[0].save(tmp_path / "me.json")
    code, out, _ = await run(extended.url, "--identity", tmp_path / "me.json", "--json", "-n", 1)
    found = json.loads(out)
    assert code == 0 and found["relay_id"] == RELAY_ID
    assert found["authenticated"] == {"author_id": identities[0].did, "capabilities": ["subscribe"]}
    code, out, _ = await run(extended.url, "--identity", tmp_path / "me.json", "-n", 1)
    assert code == 0 and f"as {identities[0].did} for subscribe" in out


async def test_an_identity_that_is_not_accepted_is_exit_code_1(run, extended, identities, tmp_path):
    extended.model.server_id = "no did"
    extended.model.lifetime = 10**9
    identities[0].save(tmp_path / "me.json")
    code, out, _ = await run(extended.url, "--identity", tmp_path / "me.json", "--json", "-n", 1)
    found = json.loads(out)
    assert code == 1 and found["reachable"] and found["authenticated"] is None
    assert found["authentication_error"]


async def test_a_relay_that_asks_and_does_not_answer_has_accepted_nobody(run, extended, identities, tmp_path):
    extended.model.server_id = RELAY_ID
    extended.model.lifetime = 10**9
    receive = extended.model.receive
    extended.model.receive = lambda session, data: b'"AUTH"' in data or receive(session, data)
    identities[0].save(tmp_path / "me.json")
    arguments = ("--identity", tmp_path / "me.json", "--json", "-n", 1, "--timeout", 1)
    code, out, _ = await run(extended.url, *arguments)
    found = json.loads(out)
    assert code == 1 and found["reachable"] and found["authenticated"] is None
    assert "did not ask" not in found["authentication_error"]


def at(began: float, ended: float, date: float | None) -> Handshake:
    return Handshake(began, ended, date)


def test_a_second_bounds_the_clock_difference():
    clock = clock_of([at(100.2, 100.4, 107.0)])
    assert clock is not None and astuple(clock) == (pytest.approx(7.2), pytest.approx(0.6), 1)


def test_more_answers_narrow_the_clock_difference_down():
    true_difference = 3.3
    answers = [at(t, t + 0.01, float(int(t + true_difference))) for t in (10.0, 10.15, 10.3, 10.65, 10.8)]
    clock = clock_of(answers)
    assert clock is not None and abs(clock.difference - true_difference) <= clock.error < 0.2


def test_answers_that_contradict_each_other_leave_the_last():
    assert clock_of([at(10, 10, 50.0), at(11, 11, 11.0)]) == Clock(0.5, 0.5, 2)


def test_without_a_date_the_clock_is_unknown():
    assert clock_of([]) is None
    assert clock_of([at(1, 2, None)]) is None


@pytest.mark.parametrize(
    "text", ["", "soon", "Mon, 01 Jan 99999999999 00:00:00 GMT", "1 Jan 2024 1:2:3 +99999999999999999999"]
)
def test_a_date_that_is_none_tells_nothing(text):
    assert date_of(text) is None
