"""Who is admitted, from where and how often."""

from __future__ import annotations

from typing import Any

import pytest
from websockets.datastructures import Headers

from relayd.access.gate import Access, Visitor
from relayd.access.limits import purse
from relayd.config import Settings
from relayd.moderation import Ban, Bans, SubjectKind

ALICE, BOB = "did:strata:alice", "did:strata:bob"


def access(**settings: Any) -> Access:
    return Access(Settings(**settings))


def visit(doors: Access, peer: str | None, headers: Headers | None = None, now: float = 0.0) -> Visitor:
    """A socket with its request, admitted."""
    visitor = Visitor()
    assert doors.arrive(visitor, peer, 1, now)
    doors.identify(visitor, headers or Headers(), now)
    return visitor


def judged(
    doors: Access, peer: str, headers: Headers | None = None, now: float = 0.0
) -> tuple[int, str] | None:
    turnaway = doors.judge(visit(doors, peer, headers, now), headers or Headers(), now)
    return None if turnaway is None else (turnaway.status, turnaway.reason)


@pytest.mark.req("R-316")
def test_a_session_is_charged_to_its_address_then_to_its_identity():
    doors = access()
    one, two, elsewhere = visit(doors, "192.0.2.1"), visit(doors, "192.0.2.1"), visit(doors, "192.0.2.2")
    assert one.charged is two.charged is not elsewhere.charged
    doors.authenticated(one, ALICE, 0.0)
    doors.authenticated(elsewhere, ALICE, 0.0)
    assert one.charged is elsewhere.charged is not two.charged
    doors.authenticated(one, BOB, 0.0)
    assert one.charged is not elsewhere.charged
    assert one.charged is not None
    assert one.charged.key == BOB


def published(visitor: Visitor, times: int, now: float = 0.0) -> int:
    """The number of PUBLISHes, of `times`, that pass."""
    assert visitor.charged is not None
    budget = purse("publish", (visitor.charged, *visitor.charged_too))
    assert budget is not None
    return sum(budget.take(now) for _ in range(times))


@pytest.mark.req("R-316", "R-321")
def test_many_identities_at_one_address_share_what_one_may_do():
    doors = access(publish_limit=40, anonymous_publish_limit=5)
    visitors = [visit(doors, "192.0.2.1") for _ in range(10)]
    for number, visitor in enumerate(visitors):
        doors.authenticated(visitor, f"did:strata:{number}", 0.0)
    assert sum(published(visitor, 40) for visitor in visitors) == 40
    elsewhere = visit(doors, "192.0.2.2")
    doors.authenticated(elsewhere, "did:strata:1", 0.0)
    assert published(elsewhere, 40) > 0, "the identity itself has not spent its own"
    for visitor in visitors:
        doors.leave(visitor, 0.0)
    again = visit(doors, "192.0.2.1")
    doors.authenticated(again, "did:strata:fresh", 0.0)
    assert published(again, 40) == 0, "nor does coming back as somebody new help"


@pytest.mark.req("R-316", "R-321")
def test_the_ceiling_is_a_setting():
    for identities, expected in ((0, 400), (3, 120)):
        doors = access(publish_limit=40, identities_per_address=identities)
        visitors = [visit(doors, "192.0.2.1") for _ in range(10)]
        for number, visitor in enumerate(visitors):
            doors.authenticated(visitor, f"did:strata:{number}", 0.0)
        assert sum(published(visitor, 40) for visitor in visitors) == expected


@pytest.mark.req("R-316")
@pytest.mark.parametrize(("spare", "expected"), [(True, 80), (False, 40)])
def test_members_and_peers_are_spared_their_address_if_the_operator_says_so(spare, expected):
    doors = access(members=(ALICE,), replication_peers=(BOB,), publish_limit=40, spare_members=spare)
    total = 0
    for did in (ALICE, BOB):
        visitor = visit(doors, "192.0.2.1")
        doors.authenticated(visitor, did, 0.0)
        total += published(visitor, 50)
        assert (visitor.workload is visitor.identity_quota) is spare
    assert total == expected


@pytest.mark.req("R-321")
def test_a_network_of_ipv6_addresses_has_not_as_many_shares_as_addresses():
    doors = access(anonymous_publish_limit=10)

    def passed(addresses: list[str]) -> int:
        return sum(published(visit(doors, address), 10) for address in addresses)

    assert passed([f"2001:db8:1:{n:x}::1" for n in range(100)]) == 4 * 10
    assert passed([f"2001:db8:{n:x}::1" for n in range(2, 200)]) == 60 * 10
    assert passed([f"2001:db9:{n:x}::1" for n in range(3)]) == 3 * 10


@pytest.mark.req("R-321")
def test_a_network_of_ipv6_addresses_holds_only_so_many_sockets():
    doors = access(max_connections_per_address=10, connection_limit=0)
    sockets = [Visitor() for _ in range(400)]
    taken = [doors.arrive(s, f"2001:db8:1:{n:x}::1", 1, 0.0) for n, s in enumerate(sockets)]
    assert sum(taken) == 2 * 4 * 10
    for socket in sockets:
        doors.leave(socket, 0.0)
    assert len(doors.addresses) == 0


@pytest.mark.req("R-321")
def test_what_is_remembered_of_a_whole_network_is_bounded_and_the_network_pays(monkeypatch):
    monkeypatch.setattr("relayd.access.accounts._MAX_IDLE", (50, 20, 10))
    doors = access(anonymous_publish_limit=10)
    total = 0
    for number in range(2000):
        visitor = visit(doors, f"2001:db8:{number // 100:x}:{number % 100:x}::1")
        total += published(visitor, 10)
        doors.leave(visitor, 0.0)
        assert len(doors.addresses) <= 83
    assert total == 64 * 10


@pytest.mark.req("R-321")
def test_sockets_that_come_too_often_are_told_so_and_then_dropped():
    """Before TLS, and before anything is read: the cost of a socket is charged when it is accepted."""
    doors = access(connection_limit=5, max_connections_per_address=0)
    came = []
    for _ in range(12):
        visitor = Visitor()
        came.append((doors.arrive(visitor, "192.0.2.1", 1, 0.0), visitor.knocks))
        doors.leave(visitor, 0.0)
    assert came == [(True, False)] * 5 + [(True, True)] * 5 + [(False, True)] * 2


@pytest.mark.req("R-321")
def test_no_address_takes_more_than_half_of_the_files():
    doors = access(max_connections_per_address=1000, connection_limit=0)
    doors.max_sockets = 100
    assert sum(doors.arrive(Visitor(), "192.0.2.1", n, 0.0) for n in range(80)) == 50
    assert doors.arrive(Visitor(), "192.0.2.2", 51, 0.0)


@pytest.mark.req("R-321")
def test_addresses_of_one_network_take_their_turn_at_the_database_together():
    doors = access()
    one, other, far = (visit(doors, a) for a in ("2001:db8:1:1::1", "2001:db8:1:2::1", "2001:db8:2:1::1"))
    assert one.reader is other.reader is not far.reader
    v4, same, local, here = (visit(doors, a) for a in ("192.0.2.1", "192.0.2.1", "127.0.0.1", "127.0.0.1"))
    assert v4.reader is same.reader
    assert local.reader is local.reader is not here.reader
    one.reader.used_database(2.0, 0.0)
    assert one.quota is not None
    assert [quota.read is not None and quota.read.is_full(0.0) for quota in one.quota.line] == [
        True,
        False,
        False,
    ]


@pytest.mark.req("R-318")
def test_anonymous_sessions_are_limited_more_tightly_by_default():
    doors = access()
    visitor = visit(doors, "192.0.2.1")

    def passes(name: str) -> int:
        budget = getattr(visitor.charged, name)
        return sum(budget.take(0.0) for _ in range(50_000))

    anonymous = {name: passes(name) for name in ("publish", "subscribe")}
    doors.authenticated(visitor, ALICE, 0.0)
    assert all(0 < anonymous[name] < passes(name) for name in anonymous)
    settings = Settings()
    assert 0 < settings.anonymous_backfill_limit_bytes < settings.backfill_limit_bytes


def test_a_restricted_identity_gains_nothing_by_authenticating():
    doors = access(anonymous_publish_limit=2)
    doors.restricted = frozenset({ALICE})
    visitor = visit(doors, "192.0.2.1")
    doors.authenticated(visitor, ALICE, 0.0)
    assert visitor.charged is not None and visitor.charged.publish is not None
    assert [visitor.charged.publish.take(0.0) for _ in range(3)] == [True, True, False]
    doors.restricted = frozenset()
    doors.leave(visitor, 0.0)
    again = visit(doors, "192.0.2.1")
    doors.authenticated(again, ALICE, 0.0)
    assert again.charged is not None and again.charged.publish is not None
    assert all(again.charged.publish.take(0.0) for _ in range(3))


def test_this_machine_has_no_limits_by_default():
    doors = access()
    for peer in ("127.0.0.1", "::1", "::ffff:127.0.0.1"):
        visitor = visit(doors, peer)
        assert visitor.charged is None
        doors.authenticated(visitor, ALICE, 0.0)
        assert visitor.charged is None


@pytest.mark.req("R-321")
@pytest.mark.parametrize("name", ["X-Forwarded-For", "Forwarded"])
def test_a_proxy_on_this_machine_that_nobody_declared_brings_no_freedom(name):
    doors = access()
    headers = Headers({name: "192.0.2.1"})
    one, other = Visitor(), Visitor()
    for visitor, is_news in ((one, True), (other, False)):
        assert doors.arrive(visitor, "127.0.0.1", 1, 0.0)
        assert doors.identify(visitor, headers, 0.0) is is_news
    assert one.charged is not None
    assert one.charged is other.charged
    assert one.charged.key == "127.0.0.1"


@pytest.mark.req("R-321")
def test_behind_a_trusted_proxy_each_client_counts_for_itself():
    doors = access(trusted_proxies=("127.0.0.1",))
    one = visit(doors, "127.0.0.1", Headers({"X-Forwarded-For": "192.0.2.1"}))
    other = visit(doors, "127.0.0.1", Headers({"X-Forwarded-For": "192.0.2.2"}))
    local = visit(doors, "127.0.0.1", Headers({"X-Forwarded-For": "127.0.0.1"}))
    keys = [visitor.charged and visitor.charged.key for visitor in (one, other, local)]
    assert keys == ["192.0.2.1", "192.0.2.2", "127.0.0.1"]
    assert visit(doors, "127.0.0.1").charged is None  # it speaks for no client


@pytest.mark.req("R-321")
def test_a_trusted_proxy_that_names_nobody_is_limited_itself():
    doors = access(trusted_proxies=("10.0.0.1",))
    one, other = visit(doors, "10.0.0.1"), visit(doors, "10.0.0.1")
    assert one.charged is other.charged is not None


@pytest.mark.req("R-321")
def test_a_spoofed_header_buys_no_second_budget():
    doors = access()
    one = visit(doors, "192.0.2.1")
    spoofed = visit(doors, "192.0.2.1", Headers({"X-Forwarded-For": "203.0.113.7"}))
    assert spoofed.charged is one.charged
    trusting = access(trusted_proxies=("10.0.0.1",))
    ignored = visit(trusting, "10.0.0.1", Headers({"Forwarded": "for=203.0.113.7"}))
    assert ignored.charged is not None
    assert ignored.charged.key == "10.0.0.1"


@pytest.mark.req("R-321")
def test_one_address_holds_only_so_many_sessions():
    doors = access(max_connections_per_address=2)
    kept = [visit(doors, "192.0.2.1") for _ in range(2)]
    assert judged(doors, "192.0.2.1") == (429, "address_limit")
    assert judged(doors, "192.0.2.2") is None
    for visitor in kept:
        doors.leave(visitor, 0.0)
    assert judged(doors, "192.0.2.1") is None


@pytest.mark.req("R-321")
def test_sockets_that_say_nothing_are_bounded_too():
    doors = access(max_connections_per_address=2)
    sockets = [Visitor() for _ in range(5)]
    assert [doors.arrive(socket, "192.0.2.1", 1, 0.0) for socket in sockets] == [True] * 4 + [False]
    for socket in sockets:
        doors.leave(socket, 61.0)  # until then the address is remembered for having opened five
    assert len(doors.addresses) == 0
    assert doors.arrive(Visitor(), "192.0.2.1", Settings().max_connections, 0.0)
    assert not doors.arrive(Visitor(), "192.0.2.1", Settings().max_connections + 1025, 0.0)


@pytest.mark.req("R-317", "R-321")
def test_one_address_connects_only_so_often():
    doors = access(connection_limit=3, max_connections_per_address=0)
    assert [judged(doors, "192.0.2.1") for _ in range(3)] == [None] * 3
    turnaway = doors.judge(visit(doors, "192.0.2.1"), Headers(), 0.0)
    assert turnaway is not None
    assert (turnaway.status, turnaway.reason, turnaway.retry_after) == (429, "connection_rate", 20)
    assert judged(doors, "192.0.2.1", now=20.0) is None


@pytest.mark.req("R-321")
@pytest.mark.parametrize(
    ("origins", "expected"),
    [
        ([], None),
        (["https://good.example"], None),
        (["HTTPS://Good.Example"], None),
        (["https://good.example:443"], None),
        (["https://good.example:80"], (403, "origin")),
        (["https://good.example/"], (403, "origin")),
        (["https://user@good.example"], (403, "origin")),
        (["https://good.example:8443"], (403, "origin")),
        (["https://good.example.evil.example"], (403, "origin")),
        (["http://good.example"], (403, "origin")),
        (["null"], (403, "origin")),
        ([""], (403, "origin")),
        (["https://good.example", "https://evil.example"], (403, "origin")),
    ],
)
def test_pages_of_other_origins_are_refused_where_origins_are_listed(origins, expected):
    headers = Headers([("Origin", origin) for origin in origins])
    assert judged(access(allowed_origins=("https://good.example",)), "192.0.2.1", headers) == expected
    assert judged(access(), "192.0.2.1", headers) is None


@pytest.mark.req("R-321")
@pytest.mark.parametrize(
    ("origin", "host", "expected"),
    [
        ("http://192.0.2.9:7447", "192.0.2.9:7447", None),
        ("https://192.0.2.9", "192.0.2.9", None),
        ("http://[2001:db8::1]:7447", "[2001:db8::1]:7447", None),
        ("http://localhost:7447", "localhost:7447", None),
        ("https://relay.example", "10.0.0.1", None),  # a proxy sends its own Host
        ("http://192.0.2.9", "192.0.2.9:80", None),
        ("http://[2001:db8::1]", "[2001:DB8:0::1]", None),
        ("http://relay.example", "10.0.0.1", None),
        ("http://192.0.2.9:7447", "192.0.2.9", (403, "origin")),
        ("http://192.0.2.9:7447", "192.0.2.8:7447", (403, "origin")),
        ("ftp://192.0.2.9", "192.0.2.9", (403, "origin")),
        ("http://evil.example:7447", "evil.example:7447", (403, "origin")),  # a name that was pointed here
        ("http://localhost.evil.example", "localhost.evil.example", (403, "origin")),
        ("https://relay.example:8443", "relay.example", (403, "origin")),
        ("null", "null", (403, "origin")),
    ],
)
def test_the_relays_own_page_may_connect_whatever_origins_are_listed(origin, host, expected):
    settings: dict[str, Any] = {
        "allowed_origins": ("https://good.example",),
        "public_url": "wss://Relay.example/strata",
    }
    headers = Headers([("Origin", origin), ("Host", host)])
    assert judged(access(**settings), "192.0.2.1", headers) == expected
    assert judged(access(**settings, console=False), "192.0.2.1", headers) == (403, "origin")


@pytest.mark.parametrize(
    ("listed", "origin"),
    [
        ("https://app.example:443", "https://app.example"),
        ("http://APP.example:80", "http://app.example"),
        ("https://bücher.example", "https://xn--bcher-kva.example"),
        ("https://[2001:DB8:0:0::1]:443", "https://[2001:db8::1]"),
        ("null", "null"),
    ],
)
def test_origins_are_compared_as_browsers_write_them(listed, origin):
    other = Headers({"Origin": "https://other.example"})
    doors = access(allowed_origins=(listed,))
    assert judged(doors, "192.0.2.1", Headers({"Origin": origin})) is None
    assert judged(doors, "192.0.2.1", other) == (403, "origin")
    if origin == "null":
        return
    place = listed.partition("://")[2]
    own = access(allowed_origins=("https://good.example",), public_url=f"wss://me@{place}/strata")
    assert judged(own, "192.0.2.1", Headers({"Origin": origin, "Host": "x"})) is None
    assert judged(own, "192.0.2.1", other) == (403, "origin")


def test_a_reload_changes_grants_and_origins_and_keeps_what_is_spent():
    doors = access(anonymous_publish_limit=1)
    visitor = visit(doors, "192.0.2.1")
    assert visitor.charged is not None and visitor.charged.publish is not None
    assert visitor.charged.publish.take(0.0)
    doors.reload(Settings(require_auth=("publish",), allowed_origins=("https://good.example",)))
    assert doors.grants.anonymous == {"subscribe"}
    assert judged(doors, "192.0.2.1", Headers({"Origin": "https://evil.example"})) == (403, "origin")
    assert not visitor.charged.publish.take(0.0)


@pytest.mark.req("R-330")
def test_the_log_names_no_address_unless_asked_to():
    def shown(**settings: object) -> dict[str, str]:
        doors = access(**settings)
        return doors.shown(visit(doors, "192.0.2.77"))

    assert shown() == {}
    assert shown(log_addresses="truncated") == {"client_address": "192.0.2.77"}  # truncated by the log
    assert shown(log_addresses="full") == {"full_address": "192.0.2.77"}
    assert access(log_addresses="full").shown(Visitor()) == {}


def test_open_sessions_see_by_the_revision_that_they_must_follow():
    doors = access()
    page, program = visit(doors, "192.0.2.1"), visit(doors, "192.0.2.2")
    assert doors.judge(page, Headers({"Origin": "https://Good.example"}), 0.0) is None
    assert doors.judge(program, Headers(), 0.0) is None
    before = doors.revision
    doors.restricted = frozenset()
    assert doors.revision == before, "nothing has changed"
    doors.restricted = frozenset({ALICE})
    assert doors.revision > before
    for origin, taken in (("https://GOOD.example", True), ("https://evil.example", False)):
        before = doors.revision
        doors.reload(Settings(allowed_origins=(origin,)))
        assert doors.revision > before
        assert (doors.takes_origin(page), doors.takes_origin(program)) == (taken, True)


def test_a_visitor_keeps_little_of_what_it_calls_its_origin():
    doors, visitor = access(), visit(access(), "192.0.2.1")
    headers = Headers([("Origin", f"https://{n}.example/" + "x" * 5000) for n in range(50)])
    assert doors.judge(visitor, headers, 0.0) is None
    assert sum(map(len, visitor.origins)) <= 600
    doors.reload(Settings(allowed_origins=("https://0.example",)))
    assert not doors.takes_origin(visitor)


def test_an_identity_is_moved_to_the_quota_it_is_due():
    doors = access(anonymous_publish_limit=2)
    visitor = visit(doors, "192.0.2.1")
    doors.authenticated(visitor, ALICE, 0.0)
    usual = visitor.charged
    doors.reconsider(visitor, ALICE, 0.0)
    assert visitor.charged is usual
    doors.restricted = frozenset({ALICE})
    doors.reconsider(visitor, ALICE, 0.0)
    assert visitor.charged is not usual and visitor.charged is not None
    assert visitor.charged.publish is not None and visitor.charged.publish.excess(0.0).limit == 2
    nobody = Visitor()
    doors.reconsider(nobody, ALICE, 0.0)
    assert nobody.charged is None, "an address without limits stays without"


def test_a_member_that_is_one_no_more_shares_the_ceiling_of_its_address():
    doors = access(members=(ALICE,), identities_per_address=1)
    visitor = visit(doors, "192.0.2.1")
    doors.authenticated(visitor, ALICE, 0.0)
    assert visitor.is_spared and visitor.ceiling is None
    for settings, spared in (
        ({"members": (BOB,)}, False),
        ({"members": (ALICE,)}, True),
        ({"members": (ALICE,), "spare_members": False}, False),
    ):
        before = doors.revision
        doors.reload(Settings(**settings, identities_per_address=1))
        assert doors.revision > before
        doors.reconsider(visitor, ALICE, 0.0)
        assert (visitor.is_spared, visitor.ceiling is None) == (spared, spared)


@pytest.mark.req("R-316", "R-321")
def test_a_socket_that_ends_gives_back_what_it_held_once_however_often_it_is_told():
    """A listener that closes during a handshake reports it, and so does the socket."""
    doors = access(max_connections_per_address=2, connection_limit=0)
    first, second = visit(doors, "192.0.2.1"), visit(doors, "192.0.2.1")
    for visitor in (first, second):
        doors.authenticated(visitor, ALICE, 0.0)
    held = (second.quota, second.identity_quota, second.ceiling)
    for _ in range(3):
        doors.leave(first, 0.0)
    assert [quota.holders for quota in held if quota is not None] == [1, 1, 1]
    assert first.quota is None and first.identity_quota is None and first.ceiling is None
    assert not first.is_spared
    doors.leave(second, 0.0)
    assert [quota.holders for quota in held if quota is not None] == [0, 0, 0]
    assert len(doors.addresses) == len(doors.identities) == 0


@pytest.mark.req("R-316")
def test_an_identity_that_authenticates_anew_gives_back_the_one_before():
    doors = access()
    visitor = visit(doors, "192.0.2.1")
    doors.authenticated(visitor, ALICE, 0.0)
    before = visitor.identity_quota, visitor.ceiling
    doors.authenticated(visitor, BOB, 0.0)
    assert [quota.holders for quota in before if quota is not None] == [0, 0]
    after = visitor.identity_quota, visitor.ceiling
    assert [quota.holders for quota in after if quota is not None] == [1, 1]


def test_a_client_behind_a_proxy_gives_back_the_place_that_it_had_under_another_address():
    doors = access(trusted_proxies=("10.0.0.0/8",), forwarded_header="X-Forwarded-For")
    visitor = visit(doors, "192.0.2.7")
    proxied = visit(doors, "10.0.0.1", Headers({"X-Forwarded-For": "192.0.2.8"}))
    assert visitor.quota is not None and proxied.quota is not None
    doors.identify(proxied, Headers({"X-Forwarded-For": "192.0.2.9"}), 0.0)
    assert str(proxied.address) == "192.0.2.9" and proxied.quota.holders == 1
    doors.leave(proxied, 0.0)
    doors.leave(visitor, 0.0)
    assert not [each for quotas in doors.addresses._tiers for each in quotas.holders()]


def banned(*networks: str) -> Bans:
    return Bans.at(
        1, [Ban(SubjectKind.NETWORK, network, "", "did:strata:op", None, 0) for network in networks]
    )


@pytest.mark.req("R-186")
def test_whom_a_ruling_keeps_out_and_when_open_sessions_have_to_hear_of_it():
    doors = access()
    before = doors.revision
    assert doors.ban(frozenset({ALICE}), banned("192.0.2.0/24")) and doors.revision == before + 1
    assert judged(doors, "192.0.2.1") == (403, "banned")
    assert judged(doors, "198.51.100.1") is None
    assert doors.is_banned_author(ALICE) and not doors.is_banned_author(BOB)
    # The same ban again, or a narrower one, is no reason to check every session.
    assert not doors.ban(frozenset({ALICE}), banned("192.0.2.0/24"))
    assert not doors.ban(frozenset({ALICE}), banned()) and doors.revision == before + 1
    assert judged(doors, "192.0.2.1") is None
    assert doors.ban(frozenset({ALICE, BOB}), banned()) and doors.revision == before + 2
    assert doors.ban(frozenset({ALICE, BOB}), banned("198.51.100.0/24")) and doors.revision == before + 3


@pytest.mark.req("R-316")
def test_a_member_that_is_restricted_is_spared_nothing():
    doors = access(members=(ALICE,), spare_members=True)
    visitor = visit(doors, "192.0.2.1")
    doors.authenticated(visitor, ALICE, 0.0)
    spared = []
    for restricted in ((), (ALICE,), ()):
        doors.restricted = frozenset(restricted)
        doors.reconsider(visitor, ALICE, 0.0)
        spared.append((visitor.is_spared, visitor.ceiling is None))
    assert spared == [(True, True), (False, False), (True, True)]


@pytest.mark.req("R-316", "R-317")
@pytest.mark.parametrize(
    ("setting", "kind", "who"),
    [
        ("anonymous_publish_limit", "publish", "address"),
        ("anonymous_subscribe_limit", "subscribe", "address"),
        ("anonymous_backfill_limit_bytes", "backfill", "address"),
        ("auth_limit", "auth", "address"),
        ("connection_limit", "connect", "address"),
        ("connection_limit", "knock", "address"),
        ("publish_limit", "publish", "identity"),
        ("subscribe_limit", "subscribe", "identity"),
        ("backfill_limit_bytes", "backfill", "identity"),
        ("publish_limit", "publish", "ceiling"),
        ("subscribe_limit", "subscribe", "ceiling"),
        ("backfill_limit_bytes", "backfill", "ceiling"),
        ("anonymous_publish_limit", "publish", "restricted"),
        ("anonymous_subscribe_limit", "subscribe", "restricted"),
        ("anonymous_backfill_limit_bytes", "backfill", "restricted"),
    ],
)
def test_each_limit_is_what_its_setting_says(setting, kind, who):
    doors = access(**{setting: 7}, limit_window_seconds=35, identities_per_address=3)
    doors.restricted = frozenset({BOB})
    visitor = visit(doors, "192.0.2.1")
    doors.authenticated(visitor, BOB if who == "restricted" else ALICE, 0.0)
    quota = {"address": visitor.quota, "ceiling": visitor.ceiling}.get(who, visitor.identity_quota)
    excess = getattr(quota, kind).excess(0.0)
    assert (excess.limit, excess.window_seconds) == (21 if who == "ceiling" else 7, 35)


@pytest.mark.parametrize("share", ["loop_share", "read_share"])
def test_shares_of_the_process_are_what_their_settings_say(share):
    doors = access(**{"loop_share": 0.0, "read_share": 0.0, share: 0.25})
    visitor = visit(doors, "192.0.2.1")
    doors.authenticated(visitor, ALICE, 0.0)
    for quota in (visitor.quota, visitor.identity_quota):
        assert quota is not None
        budgets = {"loop_share": quota.loop, "read_share": quota.read}
        assert [name for name, budget in budgets.items() if budget is not None] == [share]


def test_an_undeclared_proxy_is_told_of_once_and_a_declared_one_never():
    forwarded = Headers({"X-Forwarded-For": "192.0.2.8"})
    doors, declared = access(), access(trusted_proxies=("127.0.0.1",))
    told = []
    for each in (doors, declared):
        for headers in (Headers(), forwarded, forwarded):
            visitor = Visitor()
            assert each.arrive(visitor, "127.0.0.1", 1, 0.0)
            told.append(each.identify(visitor, headers, 0.0))
    assert told == [False, True, False, False, False, False]
    elsewhere = Visitor()  # a client that has limits anyway needs no warning
    fresh = access()
    assert fresh.arrive(elsewhere, "192.0.2.1", 1, 0.0) and not fresh.identify(elsewhere, forwarded, 0.0)


def test_the_last_socket_that_the_system_has_room_for_is_taken():
    doors = access()
    assert doors.arrive(Visitor(), "192.0.2.1", doors.max_sockets, 0.0)
    assert not doors.arrive(Visitor(), "192.0.2.1", doors.max_sockets + 1, 0.0)
