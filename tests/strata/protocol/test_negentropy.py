"""Set reconciliation: any two sets, frames of any size, and other implementations of the protocol.

The tests against nostr-tools run where `web/` has its packages (`make test` installs them). Those against
hoytech/negentropy, which is in no registry, run where `STRATA_NEGENTROPY` names a folder with
`Negentropy.js`.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from strata.protocol.negentropy import (
    MIN_FRAME_BYTES,
    PROTOCOL_VERSION,
    ItemSet,
    NegentropyError,
    Reconciler,
)

Item = tuple[int, bytes]
_HOYTECH = os.environ.get("STRATA_NEGENTROPY")
_NOSTR_TOOLS = Path(__file__).parents[3] / "web" / "node_modules" / "nostr-tools" / "lib" / "cjs" / "nip77.js"


def item(n: int, *, per_second: int = 7) -> Item:
    return 1_760_000_000 + n // per_second, hashlib.sha256(b"%d" % n).digest()


def compared(
    ours: set[Item], theirs: set[Item], *, max_frame_bytes: int = 0, shift: int = 0
) -> tuple[set[bytes], set[bytes], int, int]:
    """What the initiator has and needs, the number of rounds, and the bytes of all messages."""
    limits = {"max_frame_bytes": max_frame_bytes, "shift": shift}
    one, other = Reconciler(ItemSet(ours), **limits), Reconciler(ItemSet(theirs), **limits)
    message: bytes | None = one.initiate()
    have: list[bytes] = []
    need: list[bytes] = []
    rounds = size = 0
    while message is not None:
        rounds += 1
        assert rounds < 10_000
        answer = other.respond(message)
        size += len(message) + len(answer)
        if max_frame_bytes:
            assert len(answer) <= max_frame_bytes
            assert rounds == 1 or len(message) <= max_frame_bytes
        result = one.receive(answer)
        have += result.have
        need += result.need
        message = result.message
    assert len(set(need)) == len(need) or max_frame_bytes
    return set(have), set(need), rounds, size


def check(ours: set[Item], theirs: set[Item], **limits: int) -> tuple[int, int]:
    have, need, rounds, size = compared(ours, theirs, **limits)
    assert have == {each for _, each in ours - theirs}
    assert need == {each for _, each in theirs - ours}
    return rounds, size


_ids = st.integers(0, 400)


@given(st.sets(_ids), st.sets(_ids), st.integers(1, 50), st.integers(0, 100), st.booleans())
def test_any_two_sets(ours, theirs, per_second, shift, in_frames):
    check(
        {item(n, per_second=per_second) for n in ours},
        {item(n, per_second=per_second) for n in theirs},
        shift=shift,
        max_frame_bytes=MIN_FRAME_BYTES if in_frames else 0,
    )


@pytest.mark.parametrize("max_frame_bytes", [0, MIN_FRAME_BYTES, 20_000])
def test_large_sets_with_some_differences(max_frame_bytes):
    world = random.Random(7)
    everything = [item(n) for n in range(6000)]
    ours = set(world.sample(everything, 5700))
    theirs = set(world.sample(everything, 5700))
    check(ours, theirs, max_frame_bytes=max_frame_bytes)


def test_the_price_is_that_of_the_difference():
    """Ten of twenty thousand: some kilobytes and three rounds; equal sets cost one short exchange."""
    everything = {item(n) for n in range(20_000)}
    missing = {item(n) for n in range(0, 20_000, 2000)}
    rounds, size = check(everything, everything - missing)
    assert rounds <= 4
    assert size < 25_000
    rounds, size = check(everything, set(everything))
    assert rounds == 1
    assert size < 400


@pytest.mark.parametrize(
    "message",
    [b"", b"\x00", b"\x61\x81", b"\x61\x00\x00\x01\x00", b"\x61\x00\x21" + bytes(40), b"\x61\x00\x00\x03",
     b"\x61\x00\x00\x02\xff\xff\xff\xff\x7f", b"\x61" + b"\xff" * 30],
)  # fmt: skip
def test_what_is_no_message_is_refused(message):
    with pytest.raises(NegentropyError):
        Reconciler(ItemSet([item(1)])).respond(message)


@given(st.binary(max_size=300))
def test_any_bytes_are_answered_or_refused(noise):
    reconciler = Reconciler(ItemSet(map(item, range(100))), max_frame_bytes=MIN_FRAME_BYTES)
    for side in (reconciler.respond, reconciler.receive):
        try:
            side(bytes([PROTOCOL_VERSION]) + noise)
        except NegentropyError:
            pass


def test_another_version_is_answered_with_the_one_spoken_here():
    reconciler = Reconciler(ItemSet([]))
    assert reconciler.respond(b"\x62") == b"\x61"
    with pytest.raises(NegentropyError, match="version 2"):
        reconciler.receive(b"\x62")


@pytest.mark.parametrize(
    "items", [[(-1, bytes(32))], [(2**64 - 1, bytes(32))], [(1, b"short")], [item(1)] * 2]
)
def test_what_is_no_set_is_refused(items):
    with pytest.raises(ValueError, match="an item is"):
        ItemSet(items)
    with pytest.raises(ValueError, match="a frame"):
        Reconciler(ItemSet([]), max_frame_bytes=100)


# Other implementations.

_PEER = r"""
const file = process.argv[2], make = process.argv[3];
const lines = require('readline').createInterface({input: process.stdin});
const hex = u => Buffer.from(u).toString('hex');
let side, kind;
const say = o => console.log(JSON.stringify(o));
function made(items, limit) {
  const {Negentropy, NegentropyStorageVector} = require(file);
  const v = new NegentropyStorageVector();
  for (const [t, id] of items) v.insert(t, id);
  v.seal();
  return new Negentropy(v, make === 'hoytech' ? limit : limit || 60000);
}
(async () => {
  for await (const line of lines) {
    const ask = JSON.parse(line);
    if (ask.items) { side = made(ask.items, ask.limit); say({}); }
    else if (ask.initiate) say({message: await side.initiate()});
    else if (make === 'hoytech') {
      const [message, have, need] = await side.reconcile(ask.message);
      say({message, have, need});
    } else {
      const have = [], need = [];
      const message = side.reconcile(ask.message, i => have.push(i), i => need.push(i));
      say({message: message ?? null, have, need});
    }
  }
})();
"""


class OtherMake:
    """A process that runs another implementation, queried line by line."""

    def __init__(self, file: Path, make: str, script: Path) -> None:
        script.write_text(_PEER)
        self._process = subprocess.Popen(
            ["node", str(script), str(file), make],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def ask(self, **question: object) -> dict[str, list[str] | str | None]:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps(question) + "\n")
        self._process.stdin.flush()
        answer: dict[str, list[str] | str | None] = json.loads(self._process.stdout.readline())
        return answer

    def close(self) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(20)
        self._process.stdout.close()


CASES = [(0, 0), (1, 0), (31, 32), (200, 5), (3000, 40)]


def sets(count: int, missing: int) -> tuple[list[Item], list[Item]]:
    world = random.Random(count)
    everything = [item(n) for n in range(count + missing)]
    return sorted(world.sample(everything, count)), sorted(world.sample(everything, count))


@pytest.mark.parametrize(
    ("make", "file"),
    [
        pytest.param(
            "hoytech",
            Path(_HOYTECH or ".") / "Negentropy.js",
            marks=pytest.mark.skipif(
                _HOYTECH is None, reason="STRATA_NEGENTROPY names no folder with hoytech/negentropy"
            ),
        ),
        pytest.param(
            "nostr-tools",
            _NOSTR_TOOLS,
            marks=pytest.mark.skipif(not _NOSTR_TOOLS.exists(), reason="nostr-tools needs `npm ci` in web/"),
        ),
    ],
)
@pytest.mark.parametrize("limit", [0, MIN_FRAME_BYTES])
def test_against_another_make(make, file, limit, tmp_path):
    other = OtherMake(file, make, tmp_path / "peer.js")
    try:
        for count, missing in CASES:
            ours, theirs = sets(count, missing)
            items = [[at, each.hex()] for at, each in theirs]
            only_ours = {each.hex() for _, each in set(ours) - set(theirs)}
            only_theirs = {each.hex() for _, each in set(theirs) - set(ours)}
            reconciler = Reconciler(ItemSet(ours), max_frame_bytes=limit)
            # We initiate where the other implementation can respond: nostr-tools only initiates.
            if make == "hoytech":
                other.ask(items=items, limit=limit)
                message: bytes | None = reconciler.initiate()
                have: set[str] = set()
                need: set[str] = set()
                naive = Reconciler(ItemSet(theirs))
                while message is not None:
                    answer = bytes.fromhex(str(other.ask(message=message.hex())["message"]))
                    if not limit:
                        assert naive.respond(message) == answer  # the same bytes
                    result = reconciler.receive(answer)
                    have |= {each.hex() for each in result.have}
                    need |= {each.hex() for each in result.need}
                    message = result.message
                assert (have, need) == (only_ours, only_theirs)
            # The other implementation initiates.
            other.ask(items=items, limit=limit)
            first = str(other.ask(initiate=True)["message"])
            assert bytes.fromhex(first) == Reconciler(ItemSet(theirs)).initiate()
            have, need = set(), set()
            text: str | None = first
            while text:
                reply = other.ask(message=reconciler.respond(bytes.fromhex(text)).hex())
                have |= set(reply["have"] or ())
                need |= set(reply["need"] or ())
                text = str(reply["message"]) if reply["message"] else None
            assert (have, need) == (only_theirs, only_ours)
    finally:
        other.close()


def test_ids_whose_sums_agree_hide_a_difference_from_one_choice_of_borders_alone():
    ours = [(n, (1000 + n).to_bytes(32, "little")) for n in range(512)]
    theirs = list(ours)  # two ids in one sixteenth differ, but the sums are equal
    for place, number in ((70, 2**200 + 1070), (90, 1090 - 2**200 + 2**256)):
        theirs[place] = (place, number.to_bytes(32, "little"))

    def found(shift: int) -> int:
        asking, answering = Reconciler(ItemSet(ours), shift=shift), Reconciler(ItemSet(theirs))
        needed, message = 0, asking.initiate()
        while True:
            result = asking.receive(answering.respond(message))
            needed += len(result.need)
            if result.message is None:
                return needed
            message = result.message

    assert found(0) == 0
    assert {found(shift) for shift in range(1, 32)} == {0, 2}


def test_what_is_asked_of_a_range_costs_nothing_for_what_lies_before_it():
    class Unwalkable(list[tuple[int, bytes]]):
        def __iter__(self) -> Iterator[tuple[int, bytes]]:
            raise AssertionError("from the beginning of the set")

    items = ItemSet([(n, n.to_bytes(32, "big")) for n in range(1000)])
    expected = (items.fingerprint(900, 950), list(items.ids(998, 1000)))
    items._items = Unwalkable(items._items)
    assert (items.fingerprint(900, 950), list(items.ids(998, 1000))) == expected
