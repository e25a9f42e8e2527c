"""Which keys may sign for a DID, and when: a function of its identity packets and of time (RFC-0001 §5).

An author's **chain** begins with what is known in advance: the key inside a self-certifying DID, or documents
and keys that an operator has configured (R-056, R-060). The author's own packets continue it: `KEY_EVENT`
adds, rotates and revokes keys, `RECOVERY_APPROVAL` approves an event that a recovery key has signed, and
`DID_DOCUMENT` says what each key may do (decision 7). The state of a DID at a moment depends only on

    the packets, each with the second in which it was received, and the moment `at`.

It does not depend on the order in which the packets were passed in, nor on when the state was queried.

**Order.** Packets count in order of `received_at`. Within one second, the valid packet with the smallest
`packet_id` comes first, documents before events, then the smallest of the rest that is valid after it, and so
on. So a packet follows the one that introduced its signing key, or a key that it names (R-074, A-026), and a
document does not remove a key that it did not know of. A packet that never becomes valid is left out.

**Validity.** A packet is valid, or *holds*, if its members are well-formed (R-071) and its signature is by a
key of the chain that is valid in that second and may sign such a packet: for events and documents a signing
key with the right to assert (R-061, R-068), for events and approvals a declared recovery key (R-079, R-080);
never a revoked key.

**Effect.** A packet of a signing key takes effect in the second in which it is received. An event of a
recovery key is *pending* (R-084…R-088): it takes effect when it is `recovery_delay_seconds` old and has the
approval of `threshold` eligible keys, including its own signer. Approvals by keys that have been revoked in
the meantime no longer count. While the event is pending, any event of a signing key that names one of the
same keys overrides it permanently (A-030); a `REVOKE` of the key that it would introduce is a simple veto.

**Windows.** A key is valid from `valid_from` to `valid_until`, extended by the clock skew at both ends
(R-062), and until `revoked_at` without skew (R-076). Windows only shrink: no packet extends the life of a
key, no revocation is undone, and neither a key nor a key id is used twice.

**Roles.** When a document becomes the newest, it determines what each key may do; a key that it does not list
may do nothing. A key added later may do everything, and one that replaces another may do what that one could
(R-061, A-023).

**Two questions.** A relay asks whether to accept a packet *now*: everything it knows counts. A reader asks
whether a packet received *then* was rightly accepted: only what was known then counts (`ingest=False`), so
that a back-dated revocation does not rewrite history (A-028, A-029). A reader knows only the second of
receipt, so it accepts a packet that may have come first within its second.

**Conflict.** If one document has two successors, it is impossible to tell which is meant, and no key resolves
(R-054).

**Bounds.** A signature names no key, so a stranger's packet is tried with several. The number of keys that
can be alive at once is limited (`documents.MAX_METHODS`), and so are the number of dead keys tried in order
to give a better answer (`states.MAX_DEAD_KEYS_TRIED`) and the length of a chain (`MAX_CHAIN_EVENTS`).
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
