"""The keys of every author, and the operator's statements about identities and origins."""
