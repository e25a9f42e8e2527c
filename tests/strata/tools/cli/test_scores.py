"""`strata relays` as a process."""

from __future__ import annotations

import json
from functools import partial

import pytest
from strata.relays.conduct import Aspect, Conduct, Saved, Standing
from strata.relays.pool.reputation import Observation
from strata.relays.pool.score_file import ScoreFile

from tests.support.strata_command import run_strata


@pytest.fixture
def scores(tmp_path):
    return tmp_path / "state" / "relays.db"


@pytest.fixture
def run(scores):
    return partial(run_strata, "relays", STRATA_SCORES=scores)


async def test_relays_are_added_listed_and_forgotten(run, tmp_path):
    code, out, err = await run("list")
    assert code == 0 and out == "" and "strata relays add" in err
    code, out, _ = await run("add", "ws://a/strata", "ws://b/strata", "ws://a/strata")
    assert code == 0 and out.splitlines() == ["added: ws://a/strata", "added: ws://b/strata"]
    bootstrap = tmp_path / "list.json"
    bootstrap.write_text(json.dumps(["ws://b/strata", "wss://c/strata"]))
    code, out, _ = await run("add", "--from", bootstrap, "--json")
    assert [json.loads(line) for line in out.splitlines()] == [
        {"url": "ws://b/strata", "added": False},
        {"url": "wss://c/strata", "added": True},
    ]
    code, out, _ = await run("forget", "ws://a/strata", "ws://nobody")
    assert code == 1 and out.splitlines() == ["forgotten: ws://a/strata", "not known: ws://nobody"]
    code, out, _ = await run("list")
    assert code == 0 and out.startswith("state")
    assert "never" in out and "wss://c/strata" in out and "ws://a/strata" not in out


@pytest.mark.req("R-402")
async def test_a_uri_is_shown_first_and_needs_a_yes(run):
    uri = "strata://relay?v=1&http=http%3A%2F%2Frelay.example"
    code, out, err = await run("add", uri)
    assert code == 1 and not out and "ws://relay.example/strata" in err and "warning" in err
    code, out, _ = await run("add", uri, "--yes")
    assert code == 0 and out == "added: ws://relay.example/strata\n"


async def test_what_is_no_relay_is_neither_probed_nor_remembered(run):
    code, out, err = await run("probe", "ws://127.0.0.1:1/strata", "htp://mistyped")
    assert code == 2 and not out and "not a relay URL" in err
    assert (await run("list"))[:2] == (0, "")


@pytest.mark.req("R-341")
async def test_probing_measures_and_remembers(run, extended):
    code, out, err = await run("probe", extended.url, "ws://127.0.0.1:1/strata", "--count", 3, "--json")
    assert code == 1 and "nothing listens" in err
    good, bad = (json.loads(line) for line in out.splitlines())
    assert good["url"] == extended.url and good["uptime"] == 1.0 and 0 < good["latency"] < 5
    assert bad["uptime"] == 0.0 and bad["latency"] is None and bad["last_seen_at"] is None
    code, out, _ = await run("list", "--json")
    listed = [json.loads(line) for line in out.splitlines()]
    assert [view["url"] for view in listed] == [good["url"], bad["url"]], "best first"
    code, out, _ = await run("list")
    assert "100%" in out and " ms" in out


async def test_a_blacklisted_relay_shows_as_such(run, scores):
    with ScoreFile(scores) as file:
        import time

        file.add("ws://liar/strata", 0)
        file.write([Observation("ws://liar/strata", time.time(), Aspect.VALIDITY, 0, 9)], [], time.time())
    _, out, _ = await run("list", "--json")
    assert json.loads(out)["state"] == "blacklisted"


async def test_offences_whose_sentence_is_served_do_not_show_as_another_one(run, scores):
    import time

    now = time.time()
    saved = Saved(Standing.BACKUP, 1, now - 3600, now - 7300)
    with ScoreFile(scores) as file:
        offences = Observation("ws://mended/strata", now - 7200, Aspect.VALIDITY, 0, 9)
        file.write([offences], [("ws://mended/strata", saved, Conduct().score(now))], now)
    _, out, _ = await run("list", "--json")
    assert json.loads(out)["state"] in ("backup", "active")


@pytest.mark.parametrize(
    "arguments", [["add"], ["add", "http://x"], ["probe"], ["add", "--from", "/nowhere"]]
)
async def test_misuse_is_a_sentence_and_exit_code_2(run, arguments):
    code, out, err = await run(*arguments)
    assert (code, out) == (2, "") and err.startswith("error: ")


async def test_a_file_of_another_kind_is_refused(run, scores):
    scores.parent.mkdir()
    scores.write_text("not a database, though long enough to be taken for one " * 9)
    code, _, err = await run("list")
    assert code == 1 and "relays.db" in err
