"""Any JSON value at any member of an accepted packet makes no later reader of it raise."""

from __future__ import annotations

import asyncio
import contextlib
import copy
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from strata.protocol import canonical, packets
from strata.protocol.documents import VerificationMethod, build_document, method_id
from strata.protocol.errors import InvalidPacket
from strata.protocol.ids import Identity
from strata.protocol.keys import (
    IDENTITY_TYPES,
    KeyChain,
    KeyRules,
    add_content,
    approval_content,
    document_content,
    revoke_content,
    rotate_content,
)
from strata.protocol.packets import Packet
from strata.protocol.provenance import ProvenanceTrust, restore, served
from strata.protocol.provenance.manifest import ClientKey, client_keys, manifest_content

from relayd.admission.budgets import TrustAct, TrustBudgets
from relayd.admission.checks import judge, to_store, trace
from relayd.admission.knowledge import Known
from relayd.faults import FaultLog
from relayd.http.identities import IdentityApi
from relayd.identity.bootstrap import BootstrapContents
from relayd.identity.directory import Identities
from relayd.store.declined import covers
from relayd.store.payers import NOBODY
from relayd.store.types import Declined, NewPacket
from tests.relayd.admission.admission_rig import ALICE, NOW, FakeLog, signed
from tests.support.made_origins import hardware_header, model_header, software_header

BOB = Identity(bytes(32))
KEY = method_id(ALICE.did)
ID = "0x" + "ab" * 32
ATTESTATION = {
    "attestation_id": "a1",
    "attestor_id": ALICE.did,
    "subject": "true",
    "target_packet": ID,
    "confidence": 0.5,
    "issued_at": NOW,
    "signature": "0x" + "00" * 64,
}
MANIFEST = manifest_content(ALICE.did, "app", [ClientKey("k", ALICE.public_key, 0, 0)])
DOCUMENT = build_document(
    ALICE.did, [VerificationMethod(method_id(ALICE.did), ALICE.public_key, valid_from=0)], created_at=0
)
TRUST = {"from": ALICE.did, "to": BOB.did, "strength": 0.9, "created_at": NOW, "context": "c"}
CONTENTS: dict[str, dict[str, Any]] = {
    "edge": {"type": "TRUST_EDGE", **TRUST},
    "revocation": {"type": "TRUST_REVOCATION", **TRUST},
    "correction": {"type": "CORRECTION", "target_packet": ID, "action": "retract", "created_at": NOW},
    "attestation": {"type": "ATTESTATION", "target_packet": ID, "attestation": ATTESTATION},
    "metric": {
        "type": "CONSENSUS_METRIC",
        "source_id": ALICE.did,
        "target_packet": ID,
        "observed_at": NOW,
        "metrics": {"m": 1},
    },
    "config": {
        "type": "CONFIG",
        "scope": "BOOTSTRAP_SNAPSHOT",
        "source_id": ALICE.did,
        "issued_at": 1,
        "expires_at": 2,
    },
    "descriptor": {
        "type": "RELAY_DESCRIPTOR",
        "relay_id": ALICE.did,
        "descriptor_version": 1,
        "ws_endpoint": "wss://x/strata",
    },
    "manifest": MANIFEST,
    "add": add_content(method_id(ALICE.did, "k"), BOB.public_key, valid_from=NOW),
    "rotate": rotate_content(method_id(ALICE.did, "k"), BOB.public_key, replaces=KEY, valid_from=NOW),
    "revoke": revoke_content(KEY, revoked_at=NOW),
    "approval": approval_content(ID, approved_at=NOW),
    "document": document_content(DOCUMENT),
    "media": {"type": "POST", "media": [{"media_hash": ID, "media_type": "a/b", "media_uris": ["x"]}]},
}
HEADERS = {
    "none": None,
    "software": software_header(),
    "model": model_header(),
    "hardware": hardware_header(),
}

json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**53) + 1, 2**53 - 1)
    | st.floats(allow_nan=False, allow_infinity=False, min_value=-1e9, max_value=1e9)
    | st.sampled_from([1e300, -1e-300, 0.5, 1e21])
    | st.text(max_size=8).filter(lambda text: text.isprintable())
    | st.sampled_from([ALICE.did, BOB.did, ID, "", "\0", "0x", "REPLACE", KEY, "recovery"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["type", "a", "key_ids", "signature", "client_id"]), inner, max_size=3
        )
    ),
    max_leaves=6,
)


def places(value: object, path: tuple[str | int, ...] = ()) -> list[tuple[str | int, ...]]:
    """The path of every member, at any depth."""
    found: list[tuple[str | int, ...]] = []
    members: list[tuple[str | int, object]] = []
    if isinstance(value, dict):
        members = list(value.items())
    elif isinstance(value, list):
        members = list(enumerate(value))
    for name, member in members:
        found.append((*path, name))
        found += places(member, (*path, name))
    return found


@st.composite
def junk(draw: st.DrawFn) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """The content and header of a packet of any type, with junk at one or two members, or beside them."""
    whole: dict[str, Any] = {
        "content": copy.deepcopy(draw(st.sampled_from(list(CONTENTS.values())))),
        "header": copy.deepcopy(draw(st.sampled_from(list(HEADERS.values())))),
    }
    for _ in range(draw(st.integers(1, 2))):
        known = [path for path in places(whole) if len(path) > 1 and path != ("content", "type")]
        more = [
            ("content", name)
            for name in ("strength", "reason", "note", "observed_at", "media", "recovery_policy")
        ]
        *parents, last = draw(st.sampled_from(known + more))
        holder: Any = whole
        with contextlib.suppress(TypeError, KeyError, IndexError):  # earlier junk may have taken its place
            for parent in parents:
                holder = holder[parent]
            holder[last] = draw(json_values)
    return whole["content"], whole["header"]


class Reading:
    """All code in the relay that reads a packet after it was accepted."""

    def __init__(self) -> None:
        self.caught: list[str] = []

    async def all(self, packet: Packet, new: NewPacket) -> None:
        faults = FaultLog(self.caught.append)
        log = FakeLog()
        entry = log.append(new, NOW)
        assert entry is not None
        assert Packet.read(new.body) == packet
        by_feed, by_read = (Identities(log, BootstrapContents(), KeyRules(), faults=faults) for _ in range(2))
        by_feed.observe([entry])
        await by_read.open()
        await by_read.load(dict.fromkeys([packet.author_id], NOBODY))
        for identities in (by_feed, by_read):
            (await identities.resolve(packet.author_id)).candidates(NOW + 1)
            manifest = identities.manifest(packet.author_id)
            list(client_keys(manifest, NOW, 300) if manifest is not None else ())
            api = IdentityApi(
                identities, BootstrapContents(), by_key=log_by_key, declined=Declined, clock=lambda: NOW + 1
            )
            answer = await api.respond(f"/did/{packet.author_id}")
            assert answer is not None and answer.status in (200, 404)
        budgets = TrustBudgets(log, dict.fromkeys(TrustAct, 9), clock=lambda: NOW, faults=faults)
        again = signed(ALICE, {"type": "TRUST_REVOCATION", "from": ALICE.did, "n": 1})
        await budgets.take(again)
        budgets.observe([entry])
        await budgets.close()
        covers(Declined(media_hashes=frozenset({"0x"}), authors=frozenset({"x"})), new)
        if packet.content_type in IDENTITY_TYPES:
            KeyChain.replay(ALICE.did, [(packet, NOW)]).keys(NOW + 10**6)
        assert not self.caught


async def log_by_key(key: bytes, *_: object) -> None:
    return None


@pytest.mark.slow
@pytest.mark.req("R-039", "R-253")
@settings(max_examples=150, deadline=None)
@given(junk())
def test_junk_in_a_packet_that_is_accepted_makes_no_reader_raise(made: tuple[dict[str, Any], Any]):
    content, header = made
    try:
        packet = signed(ALICE, content, provenance_header=header)
        chain = KeyChain.genesis(ALICE.did, rules=KeyRules())
        known = Known(0, chain if packet.content_type in IDENTITY_TYPES else None)
        judge(packet, known, NOW)
        downgrade = trace(packet, known, ProvenanceTrust(), NOW)
    except InvalidPacket:
        return
    new = to_store(packet, downgrade)
    if downgrade is not None:
        form = served(new.body, downgrade)
        annotations: Any = canonical.parse(form.annotations)[0]
        assert restore(form.packet, annotations)[0] == packet
    asyncio.run(Reading().all(packet, new))


def nested(levels: int) -> Any:
    value: Any = 1.5
    for _ in range(levels):
        value = {"a": value}
    return value


@pytest.mark.req("R-321")
@pytest.mark.parametrize("name", CONTENTS)
@pytest.mark.parametrize("levels", [62, 200, 500])
def test_readers_go_as_deep_as_any_relay_may_take(name: str, levels: int):
    content = {**CONTENTS[name], "reasons": nested(levels)}
    if name == "metric":
        content["observed_at"] = nested(levels)
    value = {
        "version": 1,
        "timestamp": NOW,
        "author_id": ALICE.did,
        "content": content,
        **({"provenance_header": software_header()} if name == "media" else {}),
    }
    text = canonical.encode(value, max_depth=512)
    value |= {"packet_id": packets.byte_hash(text), "signature": f"0x{ALICE.sign(text).hex()}"}
    packet = Packet.parse(canonical.encode(value, max_depth=512), max_depth=512)
    asyncio.run(Reading().all(packet, to_store(packet, None)))
    if name == "revoke":
        log = FakeLog()
        entry = log.append(to_store(packet, None), NOW)
        assert entry is not None
        identities = Identities(log, BootstrapContents(), KeyRules())
        identities.observe([entry])
        chain = identities.chain(ALICE.did)
        assert chain is not None and not chain.candidates(NOW + 1)
