"""`strata context`, and where commands take their relay, identity and pins from."""

from __future__ import annotations

import json
import os
import stat
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from strata.relays.connection import Options
from strata.tools.cli import app, channel, commands
from strata.tools.cli.context_file import ContextFile, SavedContext, nearest
from typer.testing import CliRunner

NOWHERE = "ws://127.0.0.1:1/strata"


@pytest.fixture
def file(tmp_path, monkeypatch):
    for name in ("STRATA_RELAY", "STRATA_IDENTITY", "STRATA_PINS", "STRATA_CONTEXT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    # No relay is ever reached: a command need not try for seconds. A busy machine refuses within 0.5 s.
    monkeypatch.setattr(commands, "_OPTIONS", Options(connect_timeout=0.5))
    monkeypatch.setattr(channel, "_CONNECT_TIMEOUT", 0.05)
    return tmp_path / "config" / "strata" / "contexts.json"


def strata(*arguments, **environment):
    return CliRunner().invoke(app, [str(each) for each in arguments], prog_name="strata", env=environment)


def relay_of(*arguments, **environment):
    """Return the relay that a command contacts: each of these commands fails with an error that names it."""
    told = strata("get", "0x" + "0" * 64, *arguments, **environment)
    assert told.exit_code == 1 and "nothing listens" in told.stderr, told.output
    return told.stderr.split(" to ")[1].split(": ")[0]


def test_contexts_are_added_shown_used_and_removed(file, tmp_path):
    added = strata("context", "add", "home", "--relay", NOWHERE, "--identity", tmp_path / "me.json")
    assert added.exit_code == 0 and "strata context use home" in added.stderr
    assert "strata keygen --output" in added.stderr
    assert (
        strata("context", "add", "work", "--relay", "wss://w.example/strata", "--pins", "~/p").exit_code == 0
    )
    assert strata("context", "use", "home").exit_code == 0
    listed = strata("context", "list").stdout.splitlines()
    assert listed == [f"* home  {NOWHERE}", "  work  wss://w.example/strata"]
    home = {
        "name": "home", "current": True, "relay": NOWHERE,
        "identity": str(tmp_path / "me.json"), "pins": None,
    }  # fmt: skip
    assert json.loads(strata("context", "show", "--json").stdout) == home
    assert json.loads(strata("context", "list", "--json").stdout.partition("\n")[0]) == home
    assert "~" not in json.loads(strata("context", "show", "work", "--json").stdout)["pins"]
    assert strata("context", "remove", "home").stdout == "removed: home\n"
    assert strata("context", "show").exit_code == 1, "the one in use is gone"
    assert strata("context", "use", "work").exit_code == 0
    assert strata("context", "use").stdout == "no context is in use\n"
    assert strata("context", "list").stdout == "  work  wss://w.example/strata\n"


def test_the_file_is_its_owners_alone_and_is_replaced_whole(file):
    strata("context", "add", "home", "--relay", NOWHERE)
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    before = file.stat().st_ino
    strata("context", "use", "home")
    assert file.stat().st_ino != before
    assert [path.name for path in file.parent.iterdir()] == [file.name]
    assert json.loads(file.read_text()) == {"current": "home", "contexts": {"home": {"relay": NOWHERE}}}


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["add", "home", "--relay", NOWHERE], "already"),
        (["add", "-x/y", "--relay", NOWHERE], "No such option"),
        (["add", "a b", "--relay", NOWHERE], "letters"),
        (["add", "new", "--relay", "http://x"], "not a relay URL"),
        (["add", "new", "--relay", "ws://me:secret@h/strata"], "password"),
        (["add", "new"], "--relay"),
        (["show", "hoem"], "the nearest is home"),
        (["use", "hoem"], "the nearest is home"),
        (["remove", "home", "hoem"], "the nearest is home"),
        (["use", "xyz"], "strata context list"),
    ],
)
def test_misuse_is_exit_code_2_and_changes_nothing(file, arguments, told):
    strata("context", "add", "home", "--relay", NOWHERE)
    before = file.read_bytes()
    done = strata("context", *arguments)
    assert (done.exit_code, told in done.stderr) == (2, True), done.output
    assert file.read_bytes() == before and "secret" not in done.output


@pytest.mark.parametrize("body", [b'{"contexts": {"home": {"relay": 1}}}', b'{"current": "\xff"}'])
def test_a_file_of_something_else_is_named(file, body):
    file.parent.mkdir(parents=True)
    file.write_bytes(body)
    done = strata("publish", "--text", "x")
    assert done.exit_code == 2 and str(file) in done.stderr and "mend or remove it" in done.stderr


def test_option_then_context_then_environment_then_the_one_in_use_then_the_default(file, unused_tcp_port):
    urls = [f"ws://127.0.0.1:{unused_tcp_port}/{name}" for name in ("option", "environment", "named", "used")]
    option, environment, named, used = urls
    strata("context", "add", "named", "--relay", named)
    strata("context", "add", "used", "--relay", used)
    strata("context", "use", "used")
    everything = {"STRATA_RELAY": environment, "STRATA_CONTEXT": "named"}
    assert relay_of("--relay", option, "--context", "named", **everything) == option
    assert relay_of("--context", "named", **everything) == named
    assert relay_of(**everything) == environment
    assert relay_of("--context", "named") == named
    assert relay_of("--context", "used", STRATA_CONTEXT="named") == used
    assert relay_of(STRATA_CONTEXT="named") == named
    assert relay_of() == used
    strata("context", "use")
    default = strata("get", "--help").stdout
    assert "ws://127.0.0.1:7447/strata" in default


@pytest.mark.parametrize("command", ["status", "bench", "conformance"])
def test_a_relay_named_as_an_argument_comes_from_the_environment_too(file, unused_tcp_port, command):
    """Otherwise `strata conformance` would write to the relay of the context in use."""
    url = f"ws://127.0.0.1:{unused_tcp_port}/environment"
    strata("context", "add", "used", "--relay", NOWHERE)
    strata("context", "use", "used")
    done = strata(command, STRATA_RELAY=url)
    assert url in done.stderr and NOWHERE not in done.stderr


def test_a_file_that_windows_has_saved_is_read(file):
    strata("context", "add", "home", "--relay", "wss://one.example/strata")
    saved = file.read_bytes()
    file.write_bytes(b"\xef\xbb\xbf" + saved.replace(b"\n", b"\r\n"))
    assert "one.example" in strata("context", "list").stdout
    file.write_text(saved.decode(), encoding="utf-16")
    shown = strata("context", "list")
    assert shown.exit_code == 2 and "the text is UTF-16" in shown.stderr


def test_a_path_that_is_not_utf_8_is_refused_in_words(file, tmp_path):
    latin = tmp_path / os.fsdecode(b"k\xe9.json")
    added = strata("context", "add", "home", "--relay", NOWHERE, "--identity", latin)
    assert (added.exit_code, type(added.exception)) == (2, SystemExit)
    assert "a context cannot keep a path that is not UTF-8" in added.stderr and not file.exists()
    for command in (["keygen", "--json", "--output", latin], ["channel-key", "--json", f"{latin}.c"]):
        made = strata(*command)
        assert made.exit_code == 0 and "k?.json" in made.stdout_bytes.decode()


def test_a_user_without_a_home_has_no_contexts(file, monkeypatch):
    for name in ("HOME", "XDG_CONFIG_HOME"):
        monkeypatch.delenv(name, raising=False)

    def nobody(uid):
        raise KeyError(uid)

    monkeypatch.setattr("pwd.getpwuid", nobody)
    assert strata("context", "list", "--json").stdout == ""
    done = strata("context", "add", "home", "--relay", NOWHERE)
    assert done.exit_code == 1 and "set HOME" in done.stderr
    done = strata("keygen")
    assert done.exit_code == 2 and "set HOME" in done.stderr and done.stdout == ""


def test_of_two_that_save_a_context_at_once_the_second_waits(file):
    """Both read the file before they write it: without waiting, the first one's context would be lost."""
    both_began = threading.Barrier(2, timeout=5)

    def add(name):
        both_began.wait()
        with ContextFile.changed_or_exit() as contexts:
            time.sleep(0.05)
            contexts.add(name, SavedContext(relay=NOWHERE))

    with ThreadPoolExecutor() as pool:
        list(pool.map(add, ["one", "two"]))
    assert set(ContextFile.read().contexts) == {"one", "two"}


def test_an_unknown_context_is_a_usage_error_with_the_nearest_name(file):
    strata("context", "add", "home", "--relay", NOWHERE)
    for done in (
        strata("subscribe", "--context", "hom"),
        strata("subscribe", STRATA_CONTEXT="hom"),
        strata("channel", "room", "--topic", "/a/1/b/proto", "--context", "hom"),
        strata("identity", "show", "--context", "hom"),
        strata("conformance", "--context", "hom"),
    ):
        assert done.exit_code == 2 and "the nearest is home" in done.stderr


def test_a_context_gives_the_identity_too(file, tmp_path, identities):
    key_file = tmp_path / "me.json"
    strata("context", "add", "home", "--relay", NOWHERE, "--identity", key_file)
    done = strata("publish", "--text", "x", "--context", "home")
    assert done.exit_code == 1 and str(key_file) in done.stderr
    elsewhere = {"STRATA_IDENTITY": str(tmp_path / "other")}
    done = strata("publish", "--text", "x", "--context", "home", **elsewhere)
    assert done.exit_code == 1 and str(key_file) in done.stderr
    done = strata("publish", "--text", "x", STRATA_CONTEXT="home", **elsewhere)
    assert done.exit_code == 1 and str(tmp_path / "other") in done.stderr


def test_a_relay_may_be_given_several_times_and_a_context_gives_one(file, tmp_path, identities):
    identities[0].save(tmp_path / "me.json")
    strata("context", "add", "home", "--relay", NOWHERE, "--identity", tmp_path / "me.json")
    done = strata("channel", "room", "--topic", "/chat/1/room/proto", "--context", "home", "--listen")
    assert done.exit_code == 1 and NOWHERE in done.stderr


def test_a_relative_configuration_folder_counts_as_none(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CONFIG_HOME", "relative")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert ContextFile.read().path == tmp_path / ".config" / "strata" / "contexts.json"


def test_contexts_are_kept_as_written(file):
    contexts = ContextFile.read()
    contexts.add("a", SavedContext(relay=NOWHERE, pins="/p"))
    contexts.use("a")
    contexts.save()
    again = ContextFile.read()
    assert (again.current, again.contexts) == ("a", {"a": SavedContext(relay=NOWHERE, pins="/p")})


def test_the_nearest_name():
    assert nearest("prd", ["prod", "staging"]) == "the nearest is prod"
    assert "list" in nearest("prd", [])
