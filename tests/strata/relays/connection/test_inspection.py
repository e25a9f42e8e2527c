"""Downgraded packets: restored as signed, credited with the findings, told from tampering (A-077)."""

from __future__ import annotations

import pytest
from blake3 import blake3
from msgspec import Raw
from strata.protocol import canonical, packets, wire
from strata.protocol.ids import Identity
from strata.protocol.provenance import Downgrade, served
from strata.relays.connection import Anchors, Options
from strata.relays.connection.inspection import Inspector
from strata.relays.connection.keyring import KeyRing
from strata.relays.connection.publishing import Publishing
from strata.relays.connection.queue import QueuedEvent
from strata.relays.connection.values import Published, Query, Statistics

from tests.support import alice

START = 1_760_000_000
ME = Identity.from_seed(b"\x51" * 32)


def media(origin="SOFTWARE"):
    header = {"origin_type": origin, "genesis_media_hash": None, "edit_history": []}
    reference = {"media_hash": packets.byte_hash(b"picture")}
    value = {
        "version": 1,
        "timestamp": START,
        "author_id": ME.did,
        "content": {"type": "POST", "media": [reference]},
        "provenance_header": header,
    }
    # Signed here instead of by `build`, which may require an attestation for such a claim.
    signed = canonical.encode(value)
    value["packet_id"] = packets.byte_hash(signed)
    value["signature"] = f"0x{ME.sign(signed).hex()}"
    return packets.Packet.parse(canonical.encode(value))


class Reader:
    def __init__(self):
        self.statistics = Statistics()
        self.inspector = Inspector(Query(), Options(), self.statistics)

    def read(self, raw, annotations=None):
        return self.inspector.inspect(QueuedEvent(Raw(raw), START, "c", True, annotations))


@pytest.fixture
def reader():
    return Reader()


def forms(packet, mode):
    downgrade = Downgrade("SOFTWARE", "UNKNOWN", "missing_client_attestation")
    form = served(packet.canonical, downgrade, mode=mode)
    return form.packet, canonical.parse(form.annotations)[0]


@pytest.mark.req("R-116", "R-339")
def test_what_comes_again_after_going_back_pushes_nothing_out_that_is_remembered():
    inspector = Inspector(Query(), Options(dedup_packets=4), Statistics())
    made = [packets.build(ME, {"type": "POST", "n": n}, timestamp=START) for n in range(8)]

    def passed(some, *, turn):
        events = [QueuedEvent(Raw(each.canonical), START, "c", True, turn=turn) for each in some]
        return [each.packet for each in map(inspector.inspect, events) if each is not None]

    assert passed(made[:6], turn=0) == made[:6]
    # The first two are forgotten; the others are not, though the first two come before them.
    assert passed(made, turn=1) == [*made[:2], *made[6:]]
    assert passed(made[6:], turn=1) == []


@pytest.mark.req("R-209", "R-212")
@pytest.mark.parametrize("mode", ["rewrite", "annotate"])
def test_a_downgrade_that_is_told_is_no_offence(reader, mode):
    raw, annotations = forms(media(), mode)
    delivery = reader.read(raw, annotations)
    assert delivery.packet == media() and delivery.origin_type == "UNKNOWN"
    assert reader.statistics.events_tampered == reader.statistics.events_invalid == 0


@pytest.mark.req("R-212")
def test_a_downgrade_that_is_not_told_is_found_out(reader):
    raw, _ = forms(media(), "rewrite")
    delivery = reader.read(raw)
    assert delivery.packet == media() and delivery.origin_type == "UNKNOWN"
    assert reader.statistics.events_tampered == 0


@pytest.mark.req("R-212")
def test_without_a_downgrade_the_claim_stands_as_it_is(reader):
    assert reader.read(media().canonical).origin_type == "SOFTWARE"
    assert reader.read(media("AI_MODEL").canonical).origin_type == "AI_MODEL"
    plain = packets.build(ME, {"type": "POST"}, timestamp=START)
    assert reader.read(plain.canonical).origin_type is None


@pytest.mark.req("R-212", "R-342")
@pytest.mark.parametrize(
    "annotations",
    [None, {}, {"provenance": 7}, {"provenance": {"original_provenance_header": 7}}, {"other": {}}],
)
def test_tampering_is_dropped_and_counted_apart(reader, annotations):
    raw, _ = forms(media(), "rewrite")
    assert reader.read(raw.replace(str(START).encode(), str(START + 1).encode()), annotations) is None
    assert (reader.statistics.events_tampered, reader.statistics.events_invalid) == (1, 0)


@pytest.mark.req("R-342")
def test_a_malformed_packet_is_a_forgery_only_if_its_id_fails(reader):
    """A packet that is malformed only by our rules may have been sent to the relay like that."""
    whole = packets.build(ME, {"type": "POST"}, timestamp=START)
    odd = {**whole.value, "content": {"type": 7}}
    unsigned = canonical.encode({name: odd[name] for name in odd.keys() - {"packet_id", "signature"}})
    opinion = canonical.encode({**odd, "packet_id": f"0x{blake3(unsigned).hexdigest()}"})
    assert reader.read(opinion) is None
    assert (reader.statistics.events_invalid, reader.statistics.events_forged) == (1, 0)
    assert reader.read(whole.canonical.replace(b"packet_id", b"forged_id")) is None
    assert reader.read(b"[]") is None
    assert (reader.statistics.events_invalid, reader.statistics.events_forged) == (3, 2)


@pytest.mark.req("R-212", "R-342")
def test_an_annotation_cannot_make_another_packet_of_it(reader):
    raw, annotations = forms(media(), "rewrite")
    annotations["provenance"]["original_provenance_header"]["origin_type"] = "HARDWARE_SECURE_ENCLAVE"
    assert reader.read(raw, annotations) is None
    assert reader.statistics.events_tampered == 1


@pytest.mark.req("R-116")
def test_the_same_packet_in_either_form_is_one_packet(reader):
    raw, annotations = forms(media(), "rewrite")
    assert reader.read(raw, annotations) is not None
    assert reader.read(media().canonical) is None
    assert reader.statistics.events_repeated == 1


@pytest.mark.req("R-209")
@pytest.mark.parametrize(
    ("annotations", "told"),
    [
        (None, None),
        ({"provenance": {"effective_origin_type": "UNKNOWN"}}, "UNKNOWN"),
        ({"provenance": {"effective_origin_type": 7}}, None),
        ({"provenance": []}, None),
    ],
)
def test_a_publisher_is_told_of_the_downgrade(annotations, told):
    publishing = Publishing(Options(), Statistics(), random=lambda: 0.5, outbox=[])
    handle = publishing.add("x", b"{}", timeout=10, now=0)
    ok = wire.Ok(packet_id="x", status="ACCEPTED", client_msg_id=handle, relay_annotations=annotations)
    assert publishing.receive_ok(ok)
    outcome = publishing.settled[0].outcome
    assert isinstance(outcome, Published) and outcome.downgraded_to == told


@pytest.mark.req("R-342")
def test_a_signature_that_fits_no_key_makes_no_forger_of_the_relay():
    """The relay may have accepted the packet by a key that has expired since, and that it may not serve."""
    keys = KeyRing(Anchors(rules=alice.RULES), max_authors=8, refresh_interval=300)
    keys.learn(alice.ALICE, None, asked_at=10.0)
    statistics = Statistics()
    inspector = Inspector(Query(), Options(), statistics, keys)
    candidate = inspector.read(QueuedEvent(Raw(alice.post(1).canonical), alice.T + 1, None, None))
    assert candidate is not None and inspector.judge(candidate) is None
    assert (statistics.events_tampered, statistics.events_forged) == (1, 0)


@pytest.mark.req("R-166", "R-168", "R-367")
@pytest.mark.parametrize("by_receipt", [True, False])
def test_a_packet_that_came_late_from_a_peer_was_asked_for(by_receipt):
    """A relay that filters by the time of receipt uses its own, but shows the earlier time of its peer."""
    packet = packets.build(ME, {"type": "POST", "text": "late"}, timestamp=START - 5000)
    statistics = Statistics()
    inspector = Inspector(Query(received_since=START), Options(), statistics)
    event = QueuedEvent(Raw(packet.canonical), START - 5000, "c", True, by_receipt=by_receipt)
    assert (inspector.read(event) is not None) is by_receipt
    assert statistics.events_unasked == (not by_receipt)
