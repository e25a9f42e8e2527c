"""The origins of the open sessions."""

from __future__ import annotations

from ipaddress import ip_address

from relayd.access.sources import Sources

HERE, THERE = ip_address("192.0.2.1"), ip_address("2001:db8::1")


def test_one_address_for_all_shows_once_there_are_enough():
    sources = Sources()
    for _ in range(15):
        sources.opened(HERE)
    assert (sources.share, sources.only) == (0.0, None)
    sources.opened(HERE)
    assert (sources.share, sources.only) == (1.0, HERE)
    for _ in range(4):
        sources.opened(THERE)
    assert (sources.share, sources.only) == (0.8, None)
    for _ in range(4):
        sources.closed(THERE)
    assert (sources.share, sources.only) == (1.0, HERE)


def test_nothing_is_kept_of_those_who_have_gone():
    sources = Sources()
    for address in (HERE, THERE, None):
        sources.opened(address)
        sources.closed(address)
    assert sources._sessions == {}
    assert sources.share == 0.0
