"""`strata` as a process, against the naive relay."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import stat
import sys
import time
from pathlib import Path

import pytest
import strata
from msgspec.structs import replace
from strata.protocol import wire
from strata.protocol.packets import Packet
from strata.relays.conduct import Aspect
from strata.relays.pool.reputation import Observation
from strata.relays.pool.score_file import ScoreFile
from strata.tools.cli.arguments import content_of, content_of_line
from strata.tools.cli.commands import options_within
from strata.tools.cli.output import harmless, note, write_line
from strata.tools.cli.position import MAX_PRINTED, PositionFile, Printed, SavedPosition

from tests.support.strata_command import run_strata

SOURCES = str(Path(strata.__file__).parent.parent)


class Strata:
    """Runs the command with its own relay and key file."""

    def __init__(self, url: str, folder: Path) -> None:
        self.key_file = folder / "keys" / "me.json"
        self._env = {"STRATA_RELAY": url, "STRATA_IDENTITY": str(self.key_file)}

    async def start(self, *arguments, stdout=asyncio.subprocess.PIPE):
        return await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "strata.tools.cli",
            *map(str, arguments),
            env={**os.environ, "PYTHONPATH": SOURCES, **self._env},
            stdin=asyncio.subprocess.PIPE,
            stdout=stdout,
            stderr=asyncio.subprocess.PIPE,
            # Children of a test run in the background would ignore Ctrl-C.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )

    async def __call__(self, *arguments, stdin=b""):
        return await run_strata(*arguments, stdin=stdin, **self._env)

    async def keygen(self):
        code, _, _ = await self("keygen", "--output", self.key_file)
        assert code == 0


@pytest.fixture
def run(extended, tmp_path):
    return Strata(extended.url, tmp_path)


@pytest.fixture
async def publisher(run):
    await run.keygen()
    return run


# Keys.


async def test_keygen_makes_a_private_file_once_and_never_shows_the_key(run):
    code, out, err = await run("keygen", "--output", run.key_file, "--json")
    assert code == 0
    identity = strata.Identity.load(run.key_file)
    assert json.loads(out) == {"did": identity.did, "path": str(run.key_file)}
    assert identity.seed.hex() not in out + err
    assert stat.S_IMODE(run.key_file.stat().st_mode) == 0o600
    before = run.key_file.read_bytes()
    code, out, err = await run("keygen", "--output", run.key_file)
    assert code == 1 and "not replaced" in err and out == ""
    assert run.key_file.read_bytes() == before


async def test_publishing_without_an_identity_says_how_to_make_one(run, extended):
    code, out, err = await run("publish", "--text", "hi")
    assert (code, out) == (1, "") and "strata keygen" in err
    assert not run.key_file.exists() and extended.received.empty()


# Publishing.


async def test_publish_prints_the_id_once_stored(publisher, extended):
    code, out, _ = await publisher("publish", "--text", "hi")
    ((packet, _),) = extended.model.log
    assert code == 0 and out.strip() == packet.packet_id
    assert packet.content == {"type": "POST", "text": "hi"}


async def test_publish_takes_any_content(publisher, extended):
    code, out, _ = await publisher("publish", "--type", "NOTE", "--content", '{"a":[1]}', "--json")
    ((packet, _),) = extended.model.log
    assert code == 0 and json.loads(out)["packet_id"] == packet.packet_id
    assert packet.content == {"type": "NOTE", "a": [1]}


async def test_lines_of_stdin_are_published_in_order_and_results_printed_in_order(publisher, extended):
    lines = b"one\r\n\n" + b'{"type":"NOTE","n":2}\n' + b"".join(b"%d\n" % n for n in range(500)) + b"last"
    code, out, _ = await publisher("publish", "--stdin", stdin=lines)
    packets = [packet for packet, _ in extended.model.log]
    assert code == 0 and out.split() == [packet.packet_id for packet in packets]
    assert packets[0].content["text"] == "one" and packets[1].content == {"type": "NOTE", "n": 2}
    assert [packet.content["text"] for packet in packets[2:]] == [*map(str, range(500)), "last"]


async def test_a_line_is_published_when_it_comes_not_when_the_next_does(publisher, extended):
    process = await publisher.start("publish", "--stdin")
    for _ in range(2):
        process.stdin.write(b"line\n")
        await process.stdin.drain()
        async with asyncio.timeout(30):
            assert (await process.stdout.readline()).strip()
        await extended.next(wire.Publish)
    process.stdin.close()
    assert await process.wait() == 0


async def test_refusals_and_bad_lines_are_told_by_line_and_the_rest_goes_on(publisher, extended):
    def answer(message):
        if b'"bad"' in bytes(message.packet):
            return wire.Error(code="policy_rejected", reason="not here", client_msg_id=message.client_msg_id)
        return None

    extended.model.answer = answer
    code, out, err = await publisher("publish", "--stdin", stdin=b"a\nbad\n{nonsense\n\xff\nb\n")
    assert code == 1 and len(out.split()) == 2
    assert "line 2: " in err and "not here" in err and "line 3: " in err and "line 4: " in err


async def test_the_mark_that_windows_puts_before_utf_8_is_no_text(publisher, extended):
    process = await publisher.start("publish", "--stdin")
    for piece in (b"\xef", b"\xbb\xbf", b'{"type":"NOTE","n":1}\r\n', b"two\r\n"):
        process.stdin.write(piece)
        await process.stdin.drain()
    process.stdin.close()
    assert await process.wait() == 0
    contents = [packet.content for packet, _ in extended.model.log]
    assert contents == [{"type": "NOTE", "n": 1}, {"type": "POST", "text": "two"}]


@pytest.mark.parametrize("coding", ["utf-16", "utf-16-le", "utf-16-be", "utf-32"])
async def test_utf_16_is_refused_as_a_whole(publisher, extended, coding):
    text = '{"type":"NOTE"}\r\ntwo\r\n'.encode(coding)
    code, out, err = await publisher("publish", "--stdin", stdin=text)
    assert (code, out) == (1, "") and "the text is UTF-16; save it as UTF-8" in err
    code, out, err = await publisher("channel", "room", "--topic", "/a/1/b/json", stdin=text)
    assert code == 1 and "the text is UTF-16; save it as UTF-8" in err
    assert [packet for packet, _ in extended.model.log if packet.content_type in ("NOTE", "POST")] == []


@pytest.mark.parametrize(
    "arguments", [[], ["--text", "a", "--stdin"], ["--content", "{"], ["--content", "[]"]]
)
async def test_publish_usage(publisher, extended, arguments):
    code, out, err = await publisher("publish", *arguments)
    assert code == 2 and out == "" and err
    assert extended.received.empty()


async def test_no_relay_is_told_with_what_to_do(publisher, unused_tcp_port):
    code, _, err = await publisher(
        "publish", "--text", "x", "--relay", f"ws://127.0.0.1:{unused_tcp_port}/strata"
    )
    assert code == 1 and "is the relay running?" in err


# Reading.


async def test_subscribe_prints_json_lines_with_the_signed_bytes(run, extended, make):
    await extended.append(*map(make, range(5)))
    code, out, _ = await run("subscribe", "--no-live", "--json")
    lines = [json.loads(line) for line in out.splitlines()]
    assert code == 0 and [line["packet"]["packet_id"] for line in lines] == [
        make(n).packet_id for n in range(5)
    ]
    assert make(0).canonical.decode() in out.splitlines()[0]
    Packet.parse(json.dumps(lines[0]["packet"]).encode()).verify()


@pytest.mark.parametrize("received_at", [2**62, -(2**40), 2**70])
async def test_a_time_that_no_calendar_has_is_printed_as_it_is(run, extended, make, received_at):
    extended.model.disguise = lambda event: replace(event, received_at=received_at)
    await extended.append(make(0), make(1))
    code, out, err = await run("subscribe", "--no-live")
    assert code == 0, err
    assert [line.split()[-1] for line in out.splitlines()] == [make(0).packet_id, make(1).packet_id]


async def test_filters_and_count(run, extended, make, identities):
    await extended.append(make(0), make(1, "OTHER"), make(2), make(3, author=identities[1]), make(4))
    options = ["--type", "POST", "--author", identities[0].did, "--since", "1760000001", "--json"]
    code, out, _ = await run("subscribe", *options, "-n", 2)
    got = [json.loads(line)["packet"]["packet_id"] for line in out.splitlines()]
    assert code == 0 and got == [make(2).packet_id, make(4).packet_id]
    assert (await run("subscribe", "--since", "yesterday"))[0] == 2
    assert (await run("subscribe", "--until", "now"))[0] == 2
    assert (await run("subscribe", "--until", "1760000000", "--no-live"))[1].count("\n") == 1


async def test_a_rerun_goes_on_where_the_state_file_stands(run, extended, make, tmp_path):
    await extended.append(*map(make, range(6)))
    state = tmp_path / "state"
    got = []
    for count in (2, 1, 3):
        code, out, _ = await run("subscribe", "-n", count, "--state", state, "--json")
        assert code == 0
        got += [json.loads(line)["packet"]["packet_id"] for line in out.splitlines()]
    assert got == [make(n).packet_id for n in range(6)]
    code, _, err = await run("subscribe", "--state", state, "--relay", "ws://127.0.0.1:1/")
    assert code == 1 and "belongs to" in err


@pytest.mark.parametrize("live", [("-n", 2), ("--no-live", "-n", 2)], ids=["live", "stored"])
async def test_a_rerun_prints_nothing_again_when_the_relay_has_lost_its_place(
    run, extended, make, tmp_path, live
):
    state = tmp_path / "state"
    await extended.append(*map(make, range(4)))
    await run("subscribe", "-n", 4, "--state", state)
    extended.model.generation += 1  # cursors given out before are no good
    await extended.append(make(4), make(5))
    code, out, _ = await run("subscribe", *live, "--state", state, "--json")
    got = [json.loads(line)["packet"]["packet_id"] for line in out.splitlines()]
    assert (code, got) == (0, [make(4).packet_id, make(5).packet_id])


def test_a_state_file_remembers_the_last_packets_and_one_of_before_is_read(tmp_path):
    file = tmp_path / "state"
    file.write_text('{"relay":"ws://a","cursor":"c","received_at":1}')
    saved = PositionFile(file).load()
    assert saved == SavedPosition(relay="ws://a", cursor="c", received_at=1)
    printed = Printed(saved)
    for number in range(MAX_PRINTED + 10):
        printed.add(b"%08d and so on" % number)
    again = Printed(replace(saved, printed=bytes(printed)))
    assert [b"%08d and so on" % number in again for number in (0, 9, 10, MAX_PRINTED + 9)] == [
        False,
        False,
        True,
        True,
    ]


async def test_a_limit_ends_a_live_subscription_with_the_packet_that_reaches_it(
    run, extended, make, tmp_path
):
    state = tmp_path / "state"
    await extended.append(make(0))
    process = await run.start("subscribe", "--limit", 3, "--state", state, "--json")
    got = [json.loads(await process.stdout.readline())["packet"]["packet_id"]]
    await extended.append(*map(make, range(1, 5)))
    out, err = await process.communicate()
    got += [json.loads(line)["packet"]["packet_id"] for line in out.splitlines()]
    assert (process.returncode, err) == (0, b"") and got == [make(n).packet_id for n in range(3)]
    code, out, _ = await run("subscribe", "--limit", 2, "--state", state, "--json")
    got = [json.loads(line)["packet"]["packet_id"] for line in out.splitlines()]
    assert code == 0 and got == [make(3).packet_id, make(4).packet_id], "none is lost and none is repeated"


@pytest.mark.parametrize("option", ["--limit", "--count", "-n"])
async def test_a_limit_holds_for_stored_packets_alone_too(run, extended, make, option):
    await extended.append(*map(make, range(4)))
    code, out, _ = await run("subscribe", "--no-live", option, 3)
    assert code == 0 and out.count("\n") == 3
    assert (await run("subscribe", option, 0))[0] == 2


async def test_interrupting_ends_cleanly_and_keeps_the_position(run, extended, make, tmp_path):
    await extended.append(*map(make, range(3)))
    state = tmp_path / "state"
    process = await run.start("subscribe", "--state", state)
    for _ in range(3):
        await process.stdout.readline()
    process.send_signal(signal.SIGINT)
    _, err = await process.communicate()
    assert process.returncode == 130 and err == b""
    position = PositionFile(state).load()
    assert position is not None and position.cursor == "0:2"
    await extended.abandoned.wait()


async def test_a_reader_that_goes_away_is_no_error(run, extended, make):
    read, write = os.pipe()
    os.close(read)
    process = await run.start("subscribe", stdout=write)
    os.close(write)
    await extended.append(make(0))
    _, err = await process.communicate()
    assert (process.returncode, err) == (141, b"")


@pytest.mark.parametrize(
    "command",
    [["notice"], ["--help"], ["relays", "list"], ["relays", "export"], ["conformance", "--list"]],
    ids=" ".join,
)
async def test_a_reader_that_goes_away_is_none_to_a_command_without_a_relay_either(run, tmp_path, command):
    scores = tmp_path / "scores.db"
    with ScoreFile(scores) as file:
        file.add("ws://127.0.0.1:1/", 0)
        file.write([Observation("ws://127.0.0.1:1/", time.time(), Aspect.PING, good=1)], [], time.time())
    read, write = os.pipe()
    os.close(read)
    options = ["--scores", scores] if command[0] == "relays" else []
    process = await run.start(*command, *options, stdout=write)
    os.close(write)
    _, err = await process.communicate()
    assert (process.returncode, err) == (141, b"")


async def test_a_problem_names_a_line_only_where_there_are_lines(run, extended):
    await run.keygen()
    code, _, err = await run("publish", "--text", "\udc80")
    assert code == 1 and err.startswith("error: a string holds a lone surrogate")
    code, _, err = await run("publish", "--content", "{bad")
    assert code == 2 and err.startswith("error: --content: the content is not JSON")


async def test_an_author_that_is_none_is_said_at_once(run, extended):
    code, out, err = await run("subscribe", "--author", "alice")
    assert (code, out) == (2, "") and err.startswith("error: --author: not a DID: 'alice'")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no full device here")
async def test_a_full_disk_below_stdout_is_a_sentence(run):
    full = os.open("/dev/full", os.O_WRONLY)
    process = await run.start("notice", stdout=full)
    os.close(full)
    _, err = await process.communicate()
    assert process.returncode == 1 and err.startswith(b"error: ") and err.count(b"\n") == 1


async def test_get(run, extended, make):
    await extended.append(*map(make, range(3)))
    code, out, _ = await run("get", make(1).packet_id, "--json")
    assert code == 0 and json.loads(out)["packet"]["packet_id"] == make(1).packet_id
    code, out, err = await run("get", make(9).packet_id)
    assert (code, out) == (1, "") and "does not have" in err
    code, _, err = await run("get", "0x12")
    assert code == 2 and "not a packet id" in err  # 1 would say that the relay does not have it


def test_connecting_takes_no_longer_than_the_whole_command_may():
    assert [options_within(seconds).connect_timeout for seconds in (0.5, 5.0, 60.0)] == [0.5, 5.0, 5.0]
    assert options_within(0.5).max_in_flight == options_within(60.0).max_in_flight


# Parts.


def test_a_packet_cannot_steer_the_terminal():
    assert harmless("a\x1b[2J\r\nb\u202ec\x07d\u2028") == "a [2J  b c d "


def test_nor_can_what_a_relay_says_of_a_refusal_or_somebody_calls_a_key(capfdbinary):
    note("error: refused: \x1b]0;title\x07 no\nnext: é")
    write_line("did:strata:zA#\x1b[2J\nkey file: x")
    said = capfdbinary.readouterr()
    assert said.err.decode() == "error: refused:  ]0;title  no\nnext: é\n"
    assert said.out.decode() == "did:strata:zA# [2J\nkey file: x\n"


def test_contents():
    assert content_of_line("plain", "T") == {"type": "T", "text": "plain"}
    assert content_of_line(' {"type":"X"}', "T") == {"type": "X"}
    for bad in ("[1]", "{", "1", "[" * 5000):
        with pytest.raises(ValueError, match="content"):
            content_of(bad, "T")


def test_a_position_that_nobody_could_keep_is_told_before_the_first_packet(tmp_path, monkeypatch):
    (tmp_path / "link").symlink_to(tmp_path / "no folder" / "p")
    for wrong in (tmp_path, tmp_path / "no folder" / "p", Path(""), tmp_path / "link", Path(os.devnull)):
        with pytest.raises(ValueError, match="cannot keep a position: name a file"):
            PositionFile(wrong).load()
    monkeypatch.setattr(os, "access", lambda *_: False)
    with pytest.raises(ValueError, match="its folder cannot be written to"):
        PositionFile(tmp_path / "p").load()


def test_a_position_is_replaced_whole(tmp_path):
    file = PositionFile(tmp_path / "p")
    assert file.load() is None
    (tmp_path / "p").touch()  # as mktemp makes it
    assert file.load() is None
    (tmp_path / "p").unlink()
    file.save()
    assert not list(tmp_path.iterdir())
    for n in range(2):
        position = SavedPosition(relay="ws://h", cursor=f"c{n}", received_at=n)
        file.advance(position)
        file.save()
        assert file.load() == position
    assert [path.name for path in tmp_path.iterdir()] == ["p"]
    for damaged in (b"{", b'{"relay":"\xff","cursor":"c","received_at":1}'):
        (tmp_path / "p").write_bytes(damaged)
        with pytest.raises(ValueError, match="remove it"):
            file.load()
