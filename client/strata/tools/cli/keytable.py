"""The keys of a DID as text and as a record, and the names by which users refer to a key."""

from __future__ import annotations

from strata.protocol.documents import key_multibase, method_id, spelled_key
from strata.protocol.keys import KeyChain, KeyEvent, KeyStanding, KeyState, Use, read_statement
from strata.tools.cli.output import utc

__all__ = ["chain_lines", "chain_record", "find_key", "full_key_id", "pending_events"]


def find_key(chain: KeyChain, at: int, name: str) -> KeyState | None:
    """The key with this id, or with this name (the part of an id after the #)."""
    full = full_key_id(chain.did, name)
    keys = chain.keys(at)
    exact = next((key for key in keys if key.key_id == full), None)
    return exact or next((key for key in keys if key.public_key == spelled_key(full)), None)


def full_key_id(did: str, name: str) -> str:
    """The id of the key with this name."""
    return name if "#" in name else method_id(did, name)


def pending_events(chain: KeyChain, at: int) -> dict[str, KeyEvent]:
    """The events that have not taken effect yet, by packet id."""
    found, pending = {}, chain.pending(at)
    for packet, _ in chain.events:
        if packet.packet_id in pending:
            statement = read_statement(packet)
            assert isinstance(statement, KeyEvent), "nothing else is ever pending"
            found[packet.packet_id] = statement
    return found


def _roles(key: KeyState) -> list[str]:
    if key.recovery:
        return ["recovery"]
    roles = {"packets": key.may(Use.PACKET), "auth": key.may(Use.AUTH)}
    return [role for role, given in roles.items() if given]


def chain_record(chain: KeyChain, at: int) -> dict[str, object]:
    """Everything known about a DID, for programs."""
    skew, pending = chain.rules.clock_skew_seconds, chain.pending(at)
    return {
        "did": chain.did,
        "at": at,
        "conflict": chain.conflict,
        "did_doc_hash": chain.head.hash if chain.head else None,
        "keys": [
            {
                "key_id": key.key_id,
                "public_key_multibase": key_multibase(key.public_key),
                "state": key.standing(at, skew).value,
                "valid_from": key.valid_from,
                "valid_until": key.valid_until,
                "revoked_at": key.revoked_at,
                "roles": _roles(key),
                "custody": key.custody,
                "introduced_by": key.introduced_by,
            }
            for key in chain.keys(at)
        ],
        "events": [
            {"packet_id": packet.packet_id, "type": packet.content_type, "received_at": received_at}
            | ({"pending": True} if packet.packet_id in pending else {})
            for packet, received_at in chain.events
        ],
    }


def chain_lines(chain: KeyChain, at: int) -> list[str]:
    """Everything known about a DID, for people, with the commands that approve or stop a pending event."""
    skew = chain.rules.clock_skew_seconds
    lines = [chain.did]
    if not chain.is_resolvable:
        return [*lines, "the relay knows no key of this DID"]
    if chain.conflict is not None:
        lines.append(f"CONFLICT: {chain.conflict}; nothing this DID signs is accepted")
    elif chain.head is not None:
        lines.append(f"document: {chain.head.hash}")
    rows = [("state", "may sign", "from", "until", "key")]
    for key in chain.keys(at):
        ends = [end for end in (key.valid_until, key.revoked_at) if end is not None]
        rows.append(
            (
                key.standing(at, skew).value.replace("_", " "),
                ", ".join(_roles(key)) or "nothing",
                utc(key.valid_from) if key.valid_from else "always",
                utc(min(ends)) if ends else "open",
                key.key_id.partition("#")[2],
            )
        )
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines += [
        "  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip() for row in rows
    ]
    for packet_id, event in pending_events(chain, at).items():
        name = event.key_id.partition("#")[2]
        lines.append(f"pending: {event.event} of {name} by event {packet_id}")
        lines.append(f"  agree: strata identity approve {packet_id} --identity RECOVERY_KEY_FILE")
        if event.event != "REVOKE":
            lines.append(f"  stop:  strata identity revoke {name}")
    if not any(key.standing(at, skew) is KeyStanding.VALID and key.may(Use.PACKET) for key in chain.keys(at)):
        lines.append("no key can sign at the moment")
    return lines
