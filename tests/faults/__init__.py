"""A relay under all kinds of faults, and the oracle that decides whether it kept its promises."""
