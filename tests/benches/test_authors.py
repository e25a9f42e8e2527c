"""The authors and packets that represent a case in the benchmarks are of that case."""

from __future__ import annotations

import time

import pytest
from strata.protocol.packets import Packet
from strata.protocol.provenance import Downgrade

from benches.authors import (
    TRUST,
    chain_of,
    client_manifest,
    crowded_chain,
    of_model,
    of_software,
    sign_by_new_keys,
    sign_key_events,
    sign_plain,
)
from relayd.admission.checks import judge, trace
from relayd.admission.knowledge import Known

NOW = int(time.time())


@pytest.mark.parametrize("events", [1, 3, 50])
def test_a_chain_has_as_many_events_and_one_live_key(events: int) -> None:
    chain, packet = chain_of(events, NOW)
    assert len(chain.events) == events
    assert len(chain.candidates(NOW)) == 1
    chain.verify(packet, NOW)


def test_a_crowded_chain_tries_the_signer_last() -> None:
    chain, packet = crowded_chain(16, NOW)
    assert len(chain.candidates(NOW)) == 16
    [*_, last] = chain.candidates(NOW)
    assert judge(packet, Known(0, chain=chain), NOW) is False
    assert chain.keys(NOW)[0].public_key == last


def test_every_identity_signs_with_the_key_of_its_event() -> None:
    events = sign_key_events(0, 4)
    packets = sign_by_new_keys(0, 8, authors=4)
    assert [packet.author_id for packet in packets] == 2 * [event.author_id for event in events]
    assert {event.content["event"] for event in events} == {"ADD", "ROTATE"}
    assert not {event.author_id for event in events} & {
        packet.author_id for packet in sign_plain(0, 4, authors=4)
    }
    assert len({packet.packet_id for packet in packets}) == 8


@pytest.mark.parametrize("make", [of_software, of_model])
def test_origins_are_proved(make: object) -> None:
    assert callable(make)
    packet: Packet = make(NOW)
    manifest = client_manifest(NOW)
    for known in (Known(0), Known(0, manifests={manifest.author_id: manifest})):
        found: Downgrade | None = trace(packet, known, TRUST, NOW)
        assert found is None
