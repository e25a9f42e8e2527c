"""Write what two implementations must agree on: `python -m tests.web.vectors` renews web/vectors/*.json.

Each file is made by the Python implementation and read by the TypeScript tests; a Python test checks that the
files are current. They hold what is accepted and what is refused, with code and detail, and whole
conversations of a client with a relay, frame by frame.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from msgspec import Raw
from strata.protocol import auth, canonical, ids, packets, wire
from strata.protocol.canonical import DEEPEST
from strata.protocol.errors import ErrorCode, IdentityError, InvalidInput, InvalidMessage, retry_advice
from strata.protocol.ids import Identity
from strata.protocol.packets import Packet
from strata.protocol.provenance.serving import Downgrade, restore, served
from strata.relays.backoff import after_retry_after, full_jitter

from tests.web.cases import ACCEPTED_TEXTS, CONTENTS, REFUSED_BYTES, REFUSED_TEXTS, T
from tests.web.transcripts import transcripts
from tests.web.verdicts import verdict
from tests.web.worlds import key_chains

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "web/vectors"
KNOWN: dict[str, Any] = json.loads((ROOT / "tests/strata/protocol/vectors.json").read_text("utf-8"))

__all__ = ["FOLDER", "files", "main"]

ME = Identity.from_seed(bytes(range(32)))


def canonical_forms() -> object:
    """JSON texts, each with its canonical form or with the reason why it has none."""
    accepted = [
        {"text": text, "canonical": canonical.canonicalize(text.encode()).decode()} for text in ACCEPTED_TEXTS
    ]
    refused = [{"text": text} | verdict(canonical.canonicalize, text.encode()) for text in REFUSED_TEXTS]
    unreadable = [{"hex": raw.hex()} | verdict(canonical.canonicalize, raw) for raw in REFUSED_BYTES]
    cases: list[Any] = [*accepted, *refused, *unreadable]
    assert all("canonical" in case or case["code"] for case in cases)
    return {"texts": cases, "numbers": [_number(sample) for sample in KNOWN["numbers"]]}


def _number(sample: dict[str, Any]) -> dict[str, object]:
    text = sample["text"]
    beyond = text is not None and text.lstrip("-").isdecimal() and abs(int(text)) > canonical.MAX_SAFE_INTEGER
    refused = "number_out_of_range" if text is None else "integer_out_of_range" if beyond else None
    return {"double": sample["double"], "text": text, "detail": refused}


def identities() -> object:
    """DIDs, the keys in them, and texts that are not DIDs."""
    dids = [
        *(key["did"] for key in KNOWN["keys"]),
        *(key["bare_did"] for key in KNOWN["keys"] if "bare_did" in key),
        "did:strata:relay_1",
        "did:ngo:example",
        "did:strata:",
        "did:strata:a:",
        "did:Strata:x",
        "strata:x",
        "",
        "did:strata:z6Mk",
        "did:strata:z0OIl",
        "did:strata:%41",
        "did:strata:%4",
        "did:strata:a b",
        "did:x:é",
        "did:strata:" + "a" * 1013,
        "did:strata:" + "a" * 1014,
        "did:strata:z" + "1" * 47,
        "did:x:a\n",
    ]
    return {
        "dids": [{"did": did, "is_did": ids.is_did(did), "public_key": _key_of(did)} for did in dids],
        "keys": [{name: key[name] for name in ("seed", "did")} for key in KNOWN["keys"]],
        "base58": [
            {"hex": data.hex(), "text": ids.base58_encode(data)}
            for data in (b"", b"\0", b"\0\0\1", b"hello", bytes(range(40)), b"\xff" * 34)
        ],
    }


def _key_of(did: str) -> str | None:
    try:
        key = ids.public_key_from_did(did)
    except IdentityError:
        return None
    return None if key is None else key.hex()


def packet_forms() -> object:
    """Packets as they are built, and packets as they arrive, with the verdicts of `Packet.parse`."""
    built = []
    for content, options in CONTENTS:
        packet = packets.build(ME, content, timestamp=T, **options)
        built.append(
            {
                # As text: a reader of this file must not lose a member on the way.
                "content": json.dumps(content, ensure_ascii=False),
                "options": json.dumps(options, ensure_ascii=False),
                "canonical": packet.canonical.decode(),
                "packet_id": packet.packet_id,
                "size_bytes": packet.size_bytes,
            }
        )
    arriving = [{"raw": raw} | _arrival(raw) for raw in _arriving()]
    return {"seed": ME.seed.hex(), "timestamp": T, "built": built, "arriving": arriving}


def _sealed(members: dict[str, Any]) -> str:
    body = {name: value for name, value in members.items() if name not in ("packet_id", "signature")}
    signed = canonical.encode(body, max_depth=DEEPEST)
    seal = {"packet_id": packets.byte_hash(signed), "signature": "0x" + ME.sign(signed).hex()}
    return canonical.encode(seal | members, max_depth=DEEPEST).decode()


def _arriving() -> list[str]:
    good: dict[str, Any] = {
        "version": 1,
        "timestamp": T,
        "author_id": ME.did,
        "content": {"type": "POST", "text": "x"},
    }

    def content(**members: Any) -> dict[str, Any]:
        return good | {"content": good["content"] | members}

    media = "0x" + "cd" * 32
    other = Identity.from_seed(bytes(32))
    sealed = _sealed(good)
    changes: list[dict[str, Any]] = [
        good,
        good | {"version": 2},
        good | {"version": True},
        good | {"version": "1"},
        good | {"timestamp": 1.5},
        good | {"timestamp": None},
        good | {"timestamp": 1e21},
        good | {"author_id": "alice"},
        good | {"author_id": 5},
        good | {"content": []},
        good | {"content": {}},
        good | {"content": {"type": 5}},
        good | {"nonce": 5},
        good | {"nonce": None},
        good | {"expires_at": "soon"},
        good | {"expires_at": None},
        good | {"expires_at": 1},
        good | {"attestations": {}},
        good | {"attestations": [1]},
        good | {"attestations": []},
        good | {"consensus_metrics": {}},
        good | {"consensus_metrics": {"a": 1}},
        good | {"consensus_metrics": []},
        good | {"provenance_header": []},
        good | {"provenance_header": {"genesis_media_hash": "0xAB"}},
        good | {"provenance_header": {"edit_history": [{"resulting_media_hash": 5}]}},
        good | {"provenance_header": {"edit_history": [5]}},
        good | {"packet_id": "0x" + "00" * 32},
        good | {"packet_id": "0x" + "AB" * 32},
        good | {"packet_id": 5},
        good | {"signature": "0x00"},
        good | {"signature": "0x" + "0" * 127 + "g"},
        good | {"signature": "0x" + "0" * 128},
        good | {"signature": "0x" + other.sign(b"x").hex().upper()},
        good | {"author_id": other.did},
        good | {"author_id": "did:strata:relay_1"},
        content(text=5),
        content(text=None),
        content(thread_ref="x"),
        content(thread_ref=media),
        content(media=[]),
        content(media={}),
        content(media=[{"media_hash": media}]),
        content(media=[{"media_hash": media}]) | {"provenance_header": {"origin_type": "UNKNOWN"}},
        content(media=[{"media_hash": media, "size_bytes": "5"}]) | {"provenance_header": {}},
        content(media=[{"media_hash": media, "media_uris": [5]}]) | {"provenance_header": {}},
        content(media=[{"media_hash": media, "media_type": 5}]) | {"provenance_header": {}},
        content(media=[5]) | {"provenance_header": {}},
        content(**{"__proto__": 5}),
        good | {"__proto__": {}},
        good | {"10": 1, "9": 2, "1": 3},
        content(deep=_nested(61)),
        content(deep=_nested(62)),
    ]
    spelled = json.dumps(json.loads(sealed), indent=1)
    texts = [
        "[]",
        "5",
        "{}",
        sealed[:-1],
        sealed.replace('"version":1', '"version":1,"version":1'),
        spelled,
        sealed.replace('"version":1', '"version":1.0'),
        sealed.replace("1760000000", "1760000000000000000000"),
        sealed.replace('"text":"x"', '"text":"y"'),
        sealed.replace('"text":"x"', '"text":"\\u0078"'),
        '{"__proto__":' + sealed + "}",
        sealed + " ",
        sealed + "x",
    ]
    return [*map(_sealed, changes), *texts]


def _nested(depth: int) -> object:
    return [_nested(depth - 1)] if depth else []


def _arrival(raw: str) -> dict[str, object]:
    found: dict[str, Any] = {"parse": verdict(Packet.parse, raw.encode())}
    found["read"] = verdict(Packet.read, raw.encode())
    if found["read"] == {"code": None, "detail": None}:
        packet = Packet.read(raw.encode())
        found["packet_id"] = packet.packet_id
        found["verify"] = verdict(packet.verify)
    return found


def authentication() -> object:
    """Challenges, whether they may be signed, and the AUTH that answers them."""
    relay = Identity.from_seed(b"\x07" * 32).did
    good = "AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh8="
    cases: list[tuple[str, str, str | None]] = [
        (good, relay, None),
        (good, relay, relay),
        (good, relay, ME.did),
        (good, "relay", None),
        (good, "", relay),
        (good[:-4], relay, None),
        (good[:-1], relay, None),
        (good.replace("A", "-", 1), relay, None),
        (good.replace("A", ":", 1), relay, None),
        (" " + good, relay, None),
        (good + "\n", relay, None),
        ("A" * 1024, relay, None),
        ("A" * 1028, relay, None),
        ("", relay, None),
        ("did:strata:x", relay, None),
        ("A" * 43 + "=", relay, None),
        ("A" * 42 + "==", relay, None),
        ("A" * 40 + "====", relay, None),
        ("é" * 44, relay, None),
        ("A" * 20 + "=" + "A" * 23, relay, None),
    ]
    checks = []
    for challenge, server_id, expected in cases:
        message = wire.AuthChallenge(challenge=challenge, server_id=server_id, expires_at=T)

        checks.append(
            {
                "challenge": challenge,
                "server_id": server_id,
                "expected": expected,
                "detail": verdict(auth.check_challenge, message, expected)["detail"],
            }
        )
    taken = wire.AuthChallenge(challenge=good, server_id=relay, expires_at=T)
    answer = auth.answer_challenge(taken, ME, capabilities=["publish"], client_msg_id="a1")
    return {
        "checks": checks,
        "answer": {
            "seed": ME.seed.hex(),
            "signing_input": auth.signing_input(good, relay).hex(),
            "challenge": json.loads(wire.encode(taken)),
            "auth": json.loads(wire.encode(answer)),
        },
    }


def always(draw: float) -> Callable[[], float]:
    """A random source that always gives this value."""
    return lambda: draw


def retries() -> object:
    """What to do about each code, and how long to wait."""
    codes = [*(str(code) for code in ErrorCode), "no_such_code", "", "constructor", "__proto__"]
    draws = (0.0, 0.25, 0.5, 0.999)
    return {
        "advice": [
            {"code": code, "retry_after": after, "retry": retry_advice(code, after).value}
            for code in codes
            for after in (None, 0, 7)
        ],
        "after": [
            {
                "retry_after": after,
                "draw": draw,
                "delay": after_retry_after(after, random=always(draw)),
            }
            for after in (-5, 0, 1, 60, 3600, 2**40)
            for draw in draws
        ],
        "jitter": [
            {
                "attempt": attempt,
                "draw": draw,
                "delay": full_jitter(attempt, base=0.5, cap=30, random=always(draw)),
            }
            for attempt in (0, 1, 2, 5, 6, 40, 5000)
            for draw in draws
        ],
    }


def provenance() -> object:
    """Packets as relays serve them, and what a reader restores."""
    media = [{"media_hash": "0x" + "ab" * 32}]
    header = {
        "origin_type": "HARDWARE_SECURE_ENCLAVE",
        "client_attestation": {"a": 1},
        "edit_history": [],
        "__proto__": {"x": 1},
    }
    claiming = packets.build(ME, {"type": "POST", "media": media}, timestamp=T, provenance_header=header)
    modest = packets.build(
        ME,
        {"type": "POST"},
        timestamp=T,
        provenance_header={"origin_type": "SOFTWARE"},
        allow_unattested=True,
    )
    plain = packets.build(ME, {"type": "POST", "text": "x"}, timestamp=T)
    cases: list[tuple[str, dict[str, Any] | None]] = [(plain.canonical.decode(), None)]
    for packet, drops in ((claiming, True), (claiming, False), (modest, False)):
        claimed = str(packet.value["provenance_header"]["origin_type"])  # type: ignore[index]
        finding = Downgrade(claimed, "UNKNOWN", "missing_proof", drops)
        for mode in ("rewrite", "annotate"):
            form = served(packet.canonical, finding, mode=mode)
            annotations = json.loads(form.annotations)
            cases += [(form.packet.decode(), annotations), (form.packet.decode(), None)]
            lying = {"provenance": annotations["provenance"] | {"effective_origin_type": "AI_MODEL"}}
            foreign = {"provenance": annotations["provenance"] | {"original_provenance_header": {"a": 1}}}
            cases += [(form.packet.decode(), lying), (form.packet.decode(), foreign)]
            cases += [(form.packet.decode(), {"provenance": "odd"}), (form.packet.decode(), {})]
        changed = packet.canonical.decode().replace('"POST"', '"PEST"')
        cases.append((changed, annotations))
    return [{"raw": raw, "annotations": notes} | _restored(raw, notes) for raw, notes in cases]


def _restored(raw: str, notes: Mapping[str, object] | None) -> dict[str, object]:
    try:
        packet, origin = restore(raw.encode(), notes)
    except InvalidInput as refusal:
        return {"code": str(refusal.code), "detail": refusal.detail}
    return {"packet_id": packet.packet_id, "origin_type": origin, "canonical": packet.canonical.decode()}


def signatures() -> object:
    """Ed25519 edge cases: every implementation has the same verdict."""
    return [
        {name: vector[name] for name in ("name", "public_key", "message", "signature", "valid")}
        for vector in KNOWN["ed25519"]
    ]


def messages() -> object:
    """Frames from a relay, and whether a client can read them."""
    packet = packets.build(ME, {"type": "POST", "text": 'a "quoted" \\ {brace} [bracket]'}, timestamp=T)
    event = wire.encode(
        wire.Event(packet=Raw(packet.canonical), received_at=T, subscription_id="s", cursor="c")
    )
    texts = [
        event.decode(),
        event.decode().replace(",", " ,\n").replace(":", " : ", 1),
        "",
        "[]",
        "{}",
        "5",
        '{"type":5}',
        '{"type":"EVENT"}',
        '{"type":"NOPE"}',
        '{"type":"OK","packet_id":"0x","status":"ACCEPTED"}',
        '{"type":"OK","packet_id":"0x","status":"A","duplicate":null,"client_msg_id":null,"x":[{"a":"}"}]}',
        '{"type":"OK","packet_id":5,"status":"ACCEPTED"}',
        '{"type":"OK","packet_id":"0x"}',
        '{"type":"OK","packet_id":"0x","status":"x","duplicate":1}',
        '{"type":"OK","packet_id":"0x","status":"x"',
        '{"type":"OK","packet_id":"0x","status":"x"} x',
        '{"type":"OK" "packet_id":"0x"}',
        "{'type':'OK'}",
        '{"type":"ERROR","code":"x","reason":"y","retry_after":"5"}',
        '{"type":"ERROR","code":"x","reason":"y"}',
        '{"type":"ERROR","code":"x","reason":"y","retry_after":5,"remaining":0,"window_seconds":60}',
        '{"type":"ERROR","code":"x","reason":"y","retry_after":1.5,"remaining":0.25,"window_seconds":0.5}',
        '{"type":"ERROR","code":"x","reason":"y","retry_after":true}',
        '{"type":"ERROR","code":"x","reason":"y","max_bytes":1.5}',
        '{"type":"AUTH_OK","author_id":"a","capabilities":["x"]}',
        '{"type":"AUTH_OK","author_id":"a","capabilities":[5]}',
        '{"type":"END_OF_HISTORY","subscription_id":"s","complete":true,"cursor":null}',
        '{"type":"END_OF_HISTORY","subscription_id":"s","complete":"yes"}',
        '{"type":"EVENT","packet":{}}',
        '{"type":"EVENT","packet":{},"received_at":5,"relay_annotations":[]}',
        '{"type":"EVENT","packet":{},"received_at":5,"relay_annotations":{"a":1}}',
    ]
    found = []
    for text in texts:
        try:
            message = wire.decode_relay_message(text)
        except InvalidMessage as refusal:
            found.append({"frame": text, "detail": refusal.detail, "valid": False})
        else:
            raw = bytes(message.packet).decode() if isinstance(message, wire.Event) else None
            found.append({"frame": text, "valid": True, "packet": raw})
    return found


def files() -> dict[str, str]:
    """The text of each file by its name."""
    made = {
        "canonical": canonical_forms(),
        "identities": identities(),
        "packets": packet_forms(),
        "ed25519": signatures(),
        "auth": authentication(),
        "retry": retries(),
        "provenance": provenance(),
        "keychains": key_chains(),
        "messages": messages(),
        "transcripts": transcripts(),
    }
    return {f"{name}.json": _written(value) + "\n" for name, value in made.items()}


def _written(value: object, depth: int = 0) -> str:
    """JSON with one line for each case."""
    if depth < 2 and isinstance(value, list) and value:
        return "[\n" + ",\n".join(_written(item, 2) for item in value) + "\n]"
    if depth < 2 and isinstance(value, dict):
        members = (f"{json.dumps(name)}: {_written(item, depth + 1)}" for name, item in value.items())
        return "{\n" + ",\n".join(members) + "\n}"
    return json.dumps(value, ensure_ascii=True, separators=(",", ":"))


def main() -> int:
    """Write the files."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    for name, text in files().items():
        (FOLDER / name).write_text(text, "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
