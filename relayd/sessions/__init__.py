"""One peer: its socket, its messages, its identity, its limits and its subscriptions."""
