"""The file of upstreams: its content, and every fault in it by name."""

from __future__ import annotations

from pathlib import Path

import pytest
from strata.protocol.ids import Identity

from relayd.config import ConfigurationError
from relayd.federation.peers_file import MAX_PEERS, read_peers
from relayd.federation.selection import stream_of

DID = Identity.from_seed(bytes(32)).did
LINE = f'[[peer]]\nurl = "wss://relay.example.net/strata"\nrelay_id = "{DID}"\n'


def written(folder: Path, text: str) -> Path:
    path = folder / "peers.toml"
    path.write_text(text)
    return path


def test_a_peer_is_a_url_and_a_did(tmp_path):
    (peer,) = read_peers(written(tmp_path, LINE + 'group = "g"\ntrust_received_at = false\n'))
    assert (peer.url, peer.relay_id, peer.group) == ("wss://relay.example.net/strata", DID, "g")
    assert peer.is_whole
    assert not peer.trust_received_at
    assert stream_of(peer) == "all"
    (part,) = read_peers(written(tmp_path, LINE + 'types = ["POST"]\n'))
    assert stream_of(part) == "types\nPOST\nauthors"
    assert read_peers(None) == ()
    windows = written(tmp_path, "")
    windows.write_bytes(b"\xef\xbb\xbf" + LINE.replace("\n", "\r\n").encode())
    assert [each.relay_id for each in read_peers(windows)] == [DID]
    windows.write_text(LINE, encoding="utf-16")
    with pytest.raises(ConfigurationError, match="the text is UTF-16"):
        read_peers(windows)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (LINE.replace("wss", "https"), "is not a ws:// or wss:// URL"),
        (LINE.replace(DID, "relay"), "relay is not a DID"),
        (LINE + LINE, "is named twice"),
        (LINE + 'group = "g"\nauthors = ["x"]\n', "only a part of it is read"),
        (LINE + "surprise = 1\n", "unknown field"),
        ('[[peer]]\nurl = "ws://a"\n', "missing required field"),
        ("[[peer", "peers.toml: "),
        ("#" + "x" * 1_048_576, "more than 1048576 bytes"),
        (
            "".join(LINE.replace(DID, DID[:-2] + f"{n:02}") for n in range(MAX_PEERS + 1)),
            "more than 64 peers",
        ),
    ],
)
def test_what_is_wrong_is_said(tmp_path, text, problem):
    with pytest.raises(ConfigurationError) as caught:
        read_peers(written(tmp_path, text))
    assert problem in "\n".join(caught.value.problems)


def test_a_relay_does_not_read_from_itself_and_a_file_that_is_not_there_is_a_fault(tmp_path):
    with pytest.raises(ConfigurationError, match="this relay itself"):
        read_peers(written(tmp_path, LINE), own_id=DID)
    with pytest.raises(ConfigurationError, match="No such file"):
        read_peers(tmp_path / "none.toml")
