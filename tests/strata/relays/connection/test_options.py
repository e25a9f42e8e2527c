from __future__ import annotations

import ast
import itertools
import math
from dataclasses import fields
from pathlib import Path

import pytest
from strata.protocol import packets
from strata.protocol.provenance.serving import Downgrade, served
from strata.relays.connection import options as module
from strata.relays.connection.options import Options

from tests.support.made_packets import new_identity


def test_every_option_says_what_it_is():
    tree = ast.parse(Path(module.__file__).read_text())
    (body,) = (node.body for node in tree.body if isinstance(node, ast.ClassDef))
    documented = {
        node.target.id
        for node, after in itertools.pairwise(body)
        if isinstance(node, ast.AnnAssign)
        and isinstance(node.target, ast.Name)
        and isinstance(after, ast.Expr)
    }
    assert documented == {field.name for field in fields(Options)}


@pytest.mark.parametrize(
    "bad",
    [
        {"ack_timeout": 0},
        {"max_in_flight": -1},
        {"backoff_base": math.nan},
        {"backoff_base": 5, "backoff_cap": 1},
        {"page_events": 10, "queue_events": 9},
        {"dedup_packets": 1},
        {"relay_id": "relay_1"},
        {"relay_id": ""},
        {"proxy": "proxy.example:9050"},
        {"proxy": "ftp://proxy.example"},
        {"proxy": "socks5://:9050"},
        {"proxy": "socks5://proxy.example:99999"},
    ],
)
def test_what_cannot_work_is_refused(bad):
    with pytest.raises(ValueError, match=next(iter(bad))):
        Options(**bad)


@pytest.mark.parametrize(
    "bad",
    [{"capabilities": "publish"}, {"capabilities": (1,)}, {"capabilities": 1}, {"proxy": 1}, {"relay_id": 1}],
)
def test_what_is_of_another_type_is_refused(bad):
    with pytest.raises(TypeError, match=next(iter(bad))):
        Options(**bad)


@pytest.mark.parametrize("proxy", ["http://user:word@proxy.example", "socks5h://[::1]:9050/", "https://p:1"])
def test_what_can_work_is_accepted(proxy):
    options = Options(proxy=proxy, relay_id="did:strata:relay_1", capabilities=["subscribe"])  # type: ignore[arg-type]
    assert (options.proxy, options.capabilities) == (proxy, ("subscribe",))


def test_none_lifts_a_limit():
    assert Options(ping_interval=None, ping_timeout=None).ping_interval is None


def test_a_message_may_quote_nearly_all_of_its_packet_twice():
    """Else a stranger could have all readers leave a relay that serves unproven origins as signed."""
    largest, origin = 1_048_576, "X" * (1_048_576 - 700)
    packet = packets.build(
        new_identity(),
        {"type": "POST"},
        timestamp=1_760_000_000,
        provenance_header={"origin_type": origin, "client_attestation": {"a": 1}},
        max_bytes=largest,
    )
    finding = Downgrade(origin, "UNKNOWN", "unknown_origin_type").placed(packet.canonical)
    message = b"".join(served(packet.canonical, finding, mode="annotate"))
    assert 3 * largest - 4096 < len(message) < Options().max_message_bytes - 32_768
