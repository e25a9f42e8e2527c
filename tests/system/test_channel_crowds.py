"""A crowd on a real relay: all receive everything, at a cost that does not grow for each of them."""

from __future__ import annotations

import os

from benches.channel_crowd import talk
from tests.support.relay_process import RelayProcess

PEOPLE = int(os.environ.get("STRATA_CROWD", "20"))
"""200 is the promised size: all within a minute on two cores, and at most a gigabyte."""


async def test_a_crowd_hears_all_that_it_says(relay: RelayProcess) -> None:
    """Each message once: with every filter at its full size this took 850 MB for forty people."""
    crowd = await talk(relay.ws, relay.ready["metrics"], PEOPLE, timeout=60.0 + 3 * PEOPLE)
    assert crowd.deliveries == PEOPLE * (PEOPLE - 1)
    # 32 KB for each pair at forty people is 50 MB, and 25 KB at two hundred a gigabyte.
    assert crowd.sent_bytes <= PEOPLE * (PEOPLE - 1) * 25_000
