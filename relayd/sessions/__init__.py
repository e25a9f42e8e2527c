"""One peer: its socket, its messages, who it is, how much it may ask for, and what it is sent."""
