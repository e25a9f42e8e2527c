"""A relay under everything that goes wrong, and the oracle that says whether it kept its promise."""
