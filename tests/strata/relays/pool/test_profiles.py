from __future__ import annotations

import random

import pytest
from strata.relays.pool.profiles import PROFILE_NOTICE, Profile, effective_profile, publish_delay


@pytest.mark.req("R-403")
def test_the_default_asks_for_nothing():
    from strata.relays.pool import PoolOptions

    assert PoolOptions().profile is Profile.STANDARD
    effective = effective_profile(Profile.STANDARD, relays=0, has_proxy=False)
    assert effective.profile is Profile.STANDARD and not effective.warnings
    assert publish_delay(effective, random=lambda: 0.5) == 0


@pytest.mark.req("R-404", "R-406", "R-407")
@pytest.mark.parametrize(
    ("stored", "relays", "proxy", "profile", "min_relays"),
    [
        ("SHIELDED", 3, False, "SHIELDED", 2),
        ("SHIELDED", 2, False, "SHIELDED", 2),
        ("SHIELDED", 1, False, "STANDARD", 1),
        ("HARDENED", 3, True, "HARDENED", 3),
        ("HARDENED", 2, True, "HARDENED", 2),
        ("HARDENED", 3, False, "SHIELDED", 2),
        ("HARDENED", 1, True, "STANDARD", 1),
        ("HARDENED", 1, False, "STANDARD", 1),
    ],
)
def test_what_circumstances_leave_of_a_profile(stored, relays, proxy, profile, min_relays):
    effective = effective_profile(Profile(stored), relays=relays, has_proxy=proxy)
    assert (effective.stored, effective.profile) == (stored, profile)
    assert effective.min_relays == min_relays
    assert bool(effective.warnings) == (stored != profile or (profile == "HARDENED" and relays < 3))
    assert effective.coarse_filters == (profile != "STANDARD")


@pytest.mark.req("R-405", "R-406")
@pytest.mark.parametrize(("profile", "low", "high"), [("SHIELDED", 0.2, 1.2), ("HARDENED", 0.8, 2.5)])
def test_the_delay_stays_in_its_bounds_and_reaches_them(profile, low, high):
    effective = effective_profile(Profile(profile), relays=3, has_proxy=True)
    delays = [publish_delay(effective, random=random.Random(7).random) for _ in range(3)]
    assert len(set(delays)) == 1, "a function of the random source alone"
    chance = random.Random(7)
    delays = [publish_delay(effective, random=chance.random) for _ in range(1000)]
    assert low <= min(delays) < low + 0.05 and high - 0.05 < max(delays) <= high


@pytest.mark.req("R-408", "R-334")
def test_the_notice_promises_nothing_and_names_the_costs():
    text = " ".join(effective_profile(Profile.HARDENED, relays=3, has_proxy=False).notice.split())
    for said in ("not impossible", "still see", "delay", "traffic", "SHIELDED is in force instead"):
        assert said in text
    assert "anonymous" not in PROFILE_NOTICE.lower() and "metadata-private" not in PROFILE_NOTICE.lower()
