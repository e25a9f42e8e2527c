"""Private messages are passed on as they are: nothing here reads, checks or trusts an encryption scheme."""

from __future__ import annotations

import pytest
from strata.channels.connecting import connect
from strata.protocol import packets
from strata.relays.connection import Options

START = 1_760_000_000


@pytest.mark.req("R-333")
@pytest.mark.parametrize(
    "encryption",
    [
        {"scheme": "x25519-xchacha20poly1305", "recipients": [{"id": "did:strata:a", "header": "h"}]},
        {"scheme": "x25519-xchacha20poly1305", "recipients": 7, "ciphertext": None},
        {"scheme": "something nobody knows"},
        {"scheme": {"not": "even text"}},
        "not even an object",
    ],
)
async def test_a_scheme_is_text_that_means_nothing_here(fake, identities, encryption):
    content = {"type": "MESSAGE", "encryption": encryption, "ciphertext": "AAAA"}
    packet = packets.build(identities[0], content, timestamp=START)
    async with connect(fake.url, options=Options(idle_timeout=0.05)) as relay:
        await relay.publish(packet)
        delivery = await anext(relay.subscribe(types=["MESSAGE"]))
    assert delivery.packet == packet and delivery.packet.content == content
