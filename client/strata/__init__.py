"""strata: signed packets and connections to Strata relays."""
