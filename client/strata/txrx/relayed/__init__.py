"""The same two ends over a relay: `relay:wss://…#/topic`, an addition to the document.

The messages of a reliable channel (docs/guides/channels.md) carry the bytes of each session to the other
end, in order, even if connections break and relays fail. The session on top of it is the same as over
sockets: `send` waits for the acknowledgement of the receiver, not of any participant.

    Hello    kind 0, session, stream                              who receives? sent until answered
    Welcome  kind 1, session, receiver                            this receiver does; session 0: to everybody
    Data     kind 2, session, receiver, stream, number, bytes     a piece of the sender's stream
    Answer   kind 3, session, receiver, bytes                     whole frames to the sender
    Bye      kind 4, session, receiver                            the sender has closed

Each message begins with "STRX" and the kind in one byte; the numbers after it have 8 bytes each, big endian.
A sender begins a new stream with each connection. It numbers its streams from 1, and the pieces of each from
0.

A receiver takes a new random name each time it begins to serve, so that it never mistakes the traffic of an
earlier receiver, which a relay may still hold, for its own. It begins with a Welcome to everybody: a sender
with nothing pending forgets the receiver before, which may have been killed. So does a sender whose relay was
away. Pending messages stay with that receiver, because only it can tell whether it took them. A topic must
have only one receiver; a second one would also answer.
"""

from strata.txrx.relayed.line import RelayEnd
from strata.txrx.relayed.receiving import RelayRx, serve_relay
from strata.txrx.relayed.sending import RelayTx

__all__ = ["RelayEnd", "RelayRx", "RelayTx", "serve_relay"]
