"""Which keys speak for a DID, and when: a function of its identity packets and of time (RFC-0001 §5).

An author's **chain** begins with what is known beforehand: the key inside a self-certifying DID, or documents
and keys that an operator has configured (R-056, R-060). The author's own packets carry it on: `KEY_EVENT`
adds, rotates and revokes keys, `RECOVERY_APPROVAL` agrees to an event that a recovery key has signed,
`DID_DOCUMENT` says what each key may do (decision 7). All that is known of a DID at a moment follows from

    the packets, each with the second in which it was received, and the moment `at`,

and from nothing else: neither from the order in which they were handed over nor from when anybody looked.

**Order.** Packets count in order of `received_at`. Within one second the one with the smallest `packet_id`
that holds comes first, documents before events, then the smallest of the rest that holds after it, and so
on. So a packet follows the one that introduced its signing key, or a key it names (R-074, A-026), and a key
is not silenced by a document that knew nothing of it. One that never holds is kept out.

**Holding.** A packet holds if its members are whole (R-071) and its signature is by a key of the chain that
is valid in that second and may sign it: for events and documents a signing key with the right to assert
(R-061, R-068), for events and approvals a declared recovery key (R-079, R-080), never a revoked one.

**Effect.** What a signing key says takes effect in the second it is received. What a recovery key says is
*pending* (R-084…R-088): it takes effect once it is `recovery_delay_seconds` old and `threshold` eligible
keys agree, its own signer among them, whichever comes last. Keys revoked meanwhile no longer agree. As long
as it is pending, any event by a signing key that names one of the same keys overrides it for good (A-030);
a `REVOKE` of the key that it would introduce is a plain veto.

**Windows.** A key is valid from `valid_from` to `valid_until`, give or take the clock skew (R-062), and up to
`revoked_at` without it (R-076). Windows only shrink: no packet makes a key live longer, no revocation is
taken back, and neither a key nor a key id is given out twice.

**Roles.** The newest document says what each key may do when it comes; a key it does not list is out. A key
added after it may do everything, one that replaces another does what that one did (R-061, A-023).

**Two questions.** A relay asks whether to accept a packet *now*: all it knows counts. A reader asks whether
one received *then* was rightly accepted: only what was known then counts (`ingest=False`), so that no
back-dated revocation rewrites history (A-028, A-029). A reader knows only the second of
receipt: a packet that may have come first within its second is accepted.

**Conflict.** Two successors of one document leave no way to tell which is meant: no key resolves (R-054).

**Bounds.** A signature names no key, so a stranger's packet is tried against several. How many can be alive
at once is limited (`documents.MAX_METHODS`), and so is how many dead ones are tried for the sake of a better
answer (`states.MAX_DEAD_KEYS_TRIED`) and how long a chain grows (`MAX_CHAIN_EVENTS`).
"""

from __future__ import annotations

from strata.protocol.keys.chain import KeyChain
from strata.protocol.keys.ledger import MAX_CHAIN_EVENTS
from strata.protocol.keys.statements import (
    IDENTITY_TYPES,
    KeyEvent,
    PublishedDocument,
    RecoveryApproval,
    Statement,
    add_content,
    approval_content,
    document_content,
    read_statement,
    revoke_content,
    rotate_content,
)
from strata.protocol.keys.states import (
    DEFAULT_CLOCK_SKEW_SECONDS,
    KeyRules,
    KeyStanding,
    KeyState,
    Use,
    allowed_clock_skew,
)

__all__ = [
    "DEFAULT_CLOCK_SKEW_SECONDS",
    "IDENTITY_TYPES",
    "MAX_CHAIN_EVENTS",
    "KeyChain",
    "KeyEvent",
    "KeyRules",
    "KeyStanding",
    "KeyState",
    "PublishedDocument",
    "RecoveryApproval",
    "Statement",
    "Use",
    "add_content",
    "allowed_clock_skew",
    "approval_content",
    "document_content",
    "read_statement",
    "revoke_content",
    "rotate_content",
]
