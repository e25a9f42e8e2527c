"""From the log to subscribers: filters compiled, the interest index, fan-out and catching up."""
