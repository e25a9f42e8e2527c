"""The work of `strata identity`: key files on this machine, identity packets on the relay.

A key file is written before the relay learns of its key. A power cut in between leaves an unused file; in the
other order it would cost the identity. The file is removed again only when the relay has refused the key
permanently: a temporary refusal may be of a second attempt, when the relay accepted the first and its answer
was lost.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Coroutine, Mapping, Sequence
from pathlib import Path

from strata.channels.connecting import Relay, connect
from strata.protocol import packets
from strata.protocol.documents import (
    DidDocument,
    RecoveryPolicy,
    VerificationMethod,
    build_document,
    key_multibase,
    method_id,
)
from strata.protocol.errors import RequestRefused, RequestTimeout, Retry, StrataError
from strata.protocol.ids import Identity
from strata.protocol.keys import (
    IDENTITY_TYPES,
    KeyChain,
    KeyRules,
    KeyState,
    approval_content,
    document_content,
    revoke_content,
    rotate_content,
)
from strata.protocol.times import moment
from strata.relays.connection import Options, Published
from strata.tools.cli import output
from strata.tools.cli.keytable import chain_lines, chain_record, find_key, full_key_id, pending_events
from strata.tools.cli.running import run
from strata.tools.cli.target import load_identity, save_identity

__all__ = ["approve", "create", "document", "revoke", "rotate", "show"]

_OPTIONS = Options(connect_timeout=5.0)
_NONCE_BYTES = 16


def create(
    path: Path,
    recovery: int,
    threshold: int | None,
    *,
    relay: str,
    pins: Path | None,
    timeout: float,
    as_json: bool,
) -> None:
    """Make an identity and its recovery keys, and publish the document that names the recovery keys."""
    paths = [
        path,
        *(path.with_name(f"{path.stem}-recovery-{n}{path.suffix}") for n in range(1, recovery + 1)),
    ]
    if standing := next((p for p in paths if p.exists()), None):
        output.fail(f"{standing} exists already and is not replaced; choose another file with --output")
    identity = Identity.generate()
    save_identity(identity, path)
    for recovery_path in paths[1:]:
        save_identity(Identity.generate().speaking_for(identity.did), recovery_path)
    if recovery:
        document(path, paths[1:], threshold, relay=relay, pins=pins, timeout=timeout, as_json=as_json)
    elif as_json:
        output.write_record({"did": identity.did, "path": str(path)})
    else:
        output.write_line(identity.did)
        output.write_key_file(path)
        output.write_line(f"next: publish something with: strata publish --identity {path} --text hello")


def document(
    path: Path,
    recovery_paths: Sequence[Path],
    threshold: int | None,
    *,
    relay: str,
    pins: Path | None,
    timeout: float,
    as_json: bool,
) -> None:
    """Publish the first document of a DID. It names the DID's own key and the recovery keys."""
    identity = _load(path)
    recovery = [_load(recovery_path) for recovery_path in recovery_paths]
    if any(key.did != identity.did for key in recovery):
        output.misuse(f"a recovery key speaks for another DID than {path}")
    threshold = threshold or len(recovery) // 2 + 1

    async def work() -> int:
        try:
            async with connect(relay, identity=identity, pins=pins, options=_OPTIONS) as connection:
                chain = await _chain_of(connection, identity.did)
                if chain.head is not None:
                    raise ValueError("the DID has a document already, and only the first one names new keys")
                made = _first_document(chain, recovery, threshold)
                published = await _publish(connection, identity, document_content(made), timeout)
        except (StrataError, asyncio.CancelledError):
            output.note(
                "the document is not known to be published; the key files stand; try again with:\n"
                f"  strata identity document --identity {path} --threshold {threshold} --relay {relay} "
                + " ".join(f"--recovery-key {recovery_path}" for recovery_path in recovery_paths)
            )
            raise
        _tell_document(made, published, threshold, path, recovery_paths, as_json=as_json)
        return 0

    run(_within(timeout, work()))


def rotate(
    path: Path,
    new_path: Path,
    replaces: str | None,
    *,
    reason: str | None,
    relay: str,
    pins: Path | None,
    timeout: float,
    as_json: bool,
) -> None:
    """Replace a key with a new one."""
    identity = _load(path)

    async def work() -> int:
        async with connect(relay, identity=identity, pins=pins, options=_OPTIONS) as connection:
            chain = await _chain_of(connection, identity.did)
            own = _own_key(chain, identity)
            old = _replaced(chain, own, replaces)
            new = Identity.generate().speaking_for(identity.did)
            content = rotate_content(
                method_id(identity.did, key_multibase(new.public_key)),
                new.public_key,
                replaces=old.key_id,
                valid_from=_now(),
                reason=reason,
            )
            save_identity(new, new_path)
            try:
                published = await _publish(connection, identity, content, timeout)
            except (StrataError, asyncio.CancelledError) as error:
                if isinstance(error, RequestRefused) and error.retry is Retry.NEVER:
                    await asyncio.to_thread(new_path.unlink)
                else:
                    output.note(
                        f"{new_path} is kept: see with `strata identity show` whether the relay knows it"
                    )
                raise
        next_step = (
            _after_proposal(published, relay)
            if own.recovery
            else f"sign with {new_path} from now on; once every device does, delete {path}"
        )
        _tell_event(identity.did, published, next_step, as_json=as_json, path=new_path)
        return 0

    run(_within(timeout, work()))


def revoke(
    path: Path,
    key_id: str,
    at: str,
    *,
    reason: str | None,
    yes: bool,
    relay: str,
    pins: Path | None,
    timeout: float,
    as_json: bool,
) -> None:
    """Revoke a key permanently."""
    identity = _load(path)
    try:
        revoked_at = moment(at, time.time())
    except ValueError as error:
        output.misuse(error)

    async def work() -> int:
        async with connect(relay, identity=identity, pins=pins, options=_OPTIONS) as connection:
            chain = await _chain_of(connection, identity.did)
            own = _own_key(chain, identity)
            now = _now()
            pending = {event.key_id for event in pending_events(chain, now).values()}
            target = find_key(chain, now, key_id)
            if target is None and full_key_id(identity.did, key_id) not in pending:
                raise ValueError(f"{identity.did} has no key {key_id}; see: strata identity show")
            left = set(chain.candidates(now)) - {target.public_key if target else b""}
            if not left and not yes:
                raise ValueError(
                    "no key would be left to sign with; rotate first (strata identity rotate), or add --yes"
                )
            name = full_key_id(identity.did, key_id) if target is None else target.key_id
            content = revoke_content(name, revoked_at=revoked_at, reason=reason)
            published = await _publish(connection, identity, content, timeout)
        next_step = (
            _after_proposal(published, relay)
            if own.recovery
            else "tell the other relays you use: they learn of it from this packet alone"
        )
        _tell_event(identity.did, published, next_step, as_json=as_json)
        return 0

    run(_within(timeout, work()))


def approve(
    path: Path,
    event: str,
    *,
    note: str | None,
    recovery_delay: int,
    relay: str,
    pins: Path | None,
    timeout: float,
    as_json: bool,
) -> None:
    """Agree to a pending recovery."""
    output.require_packet_id(event)
    identity = _load(path)

    async def work() -> int:
        published: Published | None = None
        still = True
        try:
            async with (
                asyncio.timeout(timeout),
                connect(relay, identity=identity, pins=pins, options=_OPTIONS) as connection,
            ):
                content = approval_content(event, approved_at=_now(), note=note)
                published = await _publish(connection, identity, content, timeout)
                chain = await _chain_of(connection, identity.did, recovery_delay)
                still = chain.is_pending(event, _now())
        except (StrataError, TimeoutError) as error:
            if published is None:
                if isinstance(error, TimeoutError):
                    raise _timed_out(timeout) from None
                raise
            why = f": {error}" if isinstance(error, StrataError) else ""
            output.note(f"the approval is published; the relay did not say what is still missing{why}")
        next_step = (
            f"see what is still missing with: strata identity show {identity.did} --relay {relay}"
            if still
            else "nothing: the event waits for nothing more"
        )
        _tell_event(identity.did, published, next_step, as_json=as_json)
        return 0

    run(work())


def show(
    did: str | None,
    path: Path | None,
    *,
    recovery_delay: int,
    relay: str,
    pins: Path | None,
    timeout: float,
    as_json: bool,
) -> None:
    """Print the keys of a DID, by default that of the key file. The key file, if one is given, authenticates
    where the relay requires it."""
    if did is not None:
        output.require_did(did)
    reader = None if path is None else _load(path)
    whose = did or (reader.did if reader else "")

    async def work() -> int:
        async with connect(relay, identity=reader, pins=pins, options=_OPTIONS) as connection:
            chain = await _chain_of(connection, whose, recovery_delay)
        now = _now()
        if as_json:
            output.write_record(chain_record(chain, now))
        else:
            for line in chain_lines(chain, now):
                output.write_line(output.harmless(line))
        return 0 if chain.is_resolvable and chain.conflict is None else 1

    run(_within(timeout, work()))


# Key files and keys


def _load(path: Path) -> Identity:
    return load_identity(path, made_by="strata identity create")


def _first_document(chain: KeyChain, recovery: Sequence[Identity], threshold: int) -> DidDocument:
    """The document with the present keys of the DID and the recovery keys."""
    now = _now()
    methods = [
        VerificationMethod(key.key_id, key.public_key, key.valid_from, key.valid_until, key.revoked_at)
        for key in chain.keys(now)
    ]
    for identity in recovery:
        key_id = method_id(chain.did, key_multibase(identity.public_key))
        methods.append(
            VerificationMethod(key_id, identity.public_key, now, recovery=True, custody=identity.custody)
        )
    return build_document(chain.did, methods, created_at=now, recovery_policy=RecoveryPolicy(threshold))


def _own_key(chain: KeyChain, identity: Identity) -> KeyState:
    """The state of the file's key as the relay knows it. Raises `ValueError` if the DID has no such key."""
    own = next((key for key in chain.keys(_now()) if key.public_key == identity.public_key), None)
    if own is None:
        raise ValueError("at this relay the key in the file is none of the DID's; see: strata identity show")
    return own


def _replaced(chain: KeyChain, own: KeyState, replaces: str | None) -> KeyState:
    """The key that a rotation replaces: the one named, else the one that signs, unless it is a recovery key;
    then the DID's only live key. Raises `ValueError` for an unknown key, and if several could be meant."""
    now = _now()
    if replaces is not None:
        if (found := find_key(chain, now, replaces)) is None:
            raise ValueError(f"{chain.did} has no key {replaces}; see: strata identity show")
        return found
    if not own.recovery:
        return own
    live = [key for key in chain.keys(now) if key.public_key in chain.candidates(now)]
    if len(live) != 1:
        raise ValueError("several keys could be meant; say which with --replaces; see: strata identity show")
    return live[0]


# The relay


async def _within(timeout: float, work: Coroutine[object, object, int]) -> int:
    try:
        async with asyncio.timeout(timeout):
            return await work
    except TimeoutError:
        raise _timed_out(timeout) from None


def _timed_out(timeout: float) -> RequestTimeout:
    return RequestTimeout("what was asked of the relay", timeout)


async def _chain_of(connection: Relay, did: str, recovery_delay: int | None = None) -> KeyChain:
    """The key chain of a DID, built from the relay's packets and verified here."""
    rules = KeyRules() if recovery_delay is None else KeyRules(recovery_delay_seconds=recovery_delay)
    found = [
        (delivery.packet, delivery.received_at)
        async for delivery in connection.fetch(authors=did, types=sorted(IDENTITY_TYPES))
    ]
    return KeyChain.replay(did, found, rules=rules)


async def _publish(
    connection: Relay, identity: Identity, content: Mapping[str, object], timeout: float
) -> Published:
    # A packet's id does not cover its signer, and two keys may sign the same content in the same second.
    nonce = secrets.token_urlsafe(_NONCE_BYTES)
    packet = packets.build(identity, content, timestamp=_now(), nonce=nonce)
    return await connection.publish(packet, timeout=timeout)


def _now() -> int:
    return int(time.time())


# What is printed


def _tell_document(
    made: DidDocument,
    published: Published,
    threshold: int,
    path: Path,
    recovery_paths: Sequence[Path],
    *,
    as_json: bool,
) -> None:
    if as_json:
        record = {
            "did": made.did,
            "path": str(path),
            "recovery_paths": [str(recovery_path) for recovery_path in recovery_paths],
            "threshold": threshold,
            "did_doc_hash": made.hash,
            "packet_id": published.packet_id,
        }
        output.write_record(record)
        return
    output.write_line(made.did)
    output.write_key_file(path)
    for recovery_path in recovery_paths:
        output.write_line(f"recovery key: {recovery_path}")
    output.write_line(
        f"next: move the recovery keys to separate places, away from {path}; "
        f"{threshold} of {len(recovery_paths)} of them bring the identity back if it is lost"
    )


def _tell_event(
    did: str, published: Published, next_step: str, *, as_json: bool, path: Path | None = None
) -> None:
    if as_json:
        record: dict[str, object] = {
            "did": did,
            "packet_id": published.packet_id,
            "received_at": published.received_at,
            "queued": published.queued,
        }
        output.write_record(record if path is None else record | {"path": str(path)})
        return
    output.write_line(f"{did}\nevent: {published.packet_id}")
    if path is not None:
        output.write_key_file(path)
    output.write_line(f"next: {next_step}")


def _after_proposal(published: Published, relay: str) -> str:
    approving = f"strata identity approve {published.packet_id} --relay {relay} --identity FILE"
    return f"it waits for the recovery delay; let the other recovery keys agree with: {approving}"
