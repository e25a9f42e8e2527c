"""Wrong arguments of a program are refused at once, by the argument's name."""

from __future__ import annotations

import asyncio
import math
from typing import Any, cast

import pytest
import strata
from strata.protocol import packets
from strata.relays.connection.values import Query
from strata.relays.pool import PoolSubscribeOptions

from tests.support.relays import AUTHOR

URL = "ws://127.0.0.1:1/strata"


@pytest.mark.parametrize(
    ("argument", "value", "error"),
    [
        ("authors", "alice", ValueError),
        ("authors", None, TypeError),
        ("authors", AUTHOR, TypeError),
        ("types", None, TypeError),
        ("types", [None], TypeError),
        ("types", b"POST", TypeError),
        ("packet_ids", [5], TypeError),
        ("since", 1795731334.5, TypeError),
        ("since", "now", TypeError),
        ("since", 2**53, ValueError),
        ("until", -(2**53), ValueError),
        ("received_since", 2**60, ValueError),
        ("received_until", 2**60, ValueError),
        ("since", True, TypeError),
        ("until", "x", TypeError),
        ("received_since", 1.5, TypeError),
        ("received_until", "x", TypeError),
        ("cursor", 5, TypeError),
        ("cursor_fallback_since", "x", TypeError),
        ("limit", 2.0, TypeError),
        ("limit", "3", TypeError),
        ("order", "up", ValueError),
        ("live", "no", TypeError),
        ("on_log_rest", print, TypeError),
    ],
)
def test_a_query_names_the_argument_that_is_wrong(argument, value, error):
    with pytest.raises(error, match=argument):
        Query.of(cast(Any, {"live": False, argument: value}))


def test_a_query_takes_what_a_lone_string_and_repeats_mean():
    query = Query.of({"authors": AUTHOR.did, "types": ["POST", "POST", "NOTE"]})
    assert (query.authors, query.types) == ((AUTHOR.did,), ("POST", "NOTE"))


def test_a_pool_has_no_cursor_of_one_relay():
    with pytest.raises(TypeError, match="'cursor'; PoolSubscribeOptions"):
        Query.of(cast(Any, {"cursor": "x"}), PoolSubscribeOptions)


@pytest.mark.parametrize("make", [strata.Options, strata.PoolOptions])
@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("publish_timeout", "5"),
        ("publish_timeout", True),
        ("max_in_flight", 1.5),
        ("max_in_flight", math.inf),
    ],
)
def test_an_option_of_another_type_is_refused(make, option, value):
    with pytest.raises(TypeError, match=option):
        make(**{option: value})


@pytest.mark.parametrize(
    "wrong",
    [{"capabilities": "publish"}, {"relay_id": 5}, {"proxy": 5}, {"resolve_keys": "no"}],
)
def test_options_of_a_connection_that_are_wrong_are_named(wrong):
    with pytest.raises(TypeError, match=next(iter(wrong))):
        strata.Options(**wrong)


@pytest.mark.parametrize("wrong", [{"relay": {}}, {"scores": "scores.db"}, {"ping_timeout": None}])
def test_options_of_a_pool_that_are_wrong_are_named(wrong):
    with pytest.raises(TypeError, match=next(iter(wrong))):
        strata.PoolOptions(**wrong)


def test_none_is_no_limit_for_any_time():
    none = cast(Any, None)
    options = strata.Options(publish_timeout=none, ack_timeout=none, history_timeout=none)
    assert options.publish_timeout == options.ack_timeout == options.history_timeout == math.inf


@pytest.mark.parametrize(
    "wrong", [{"identity": "did:strata:x"}, {"ssl": True}, {"options": {}}, {"options": strata.PoolOptions()}]
)
def test_connecting_names_the_argument_that_is_wrong(wrong):
    with pytest.raises(TypeError, match=next(iter(wrong))):
        strata.connect(URL, **wrong)


@pytest.mark.parametrize("wrong", [{"identity": 5}, {"ssl": True}, {"options": strata.Options()}])
def test_a_pool_names_the_argument_that_is_wrong(wrong):
    with pytest.raises(TypeError, match=next(iter(wrong))):
        strata.connect_pool([URL], **wrong)


@pytest.mark.parametrize("url", [None, b"ws://x", 5])
def test_a_url_is_a_string(url):
    with pytest.raises(TypeError, match="url must be a string"):
        strata.connect(url)
    with pytest.raises(TypeError, match="url must be a string"):
        strata.connect_pool([url])


async def test_a_pool_of_one_string_is_one_relay(fake, make):
    async with strata.connect_pool(fake.url) as relays:
        assert (await relays.publish(make(1))).packet_id == make(1).packet_id
        with pytest.raises(TypeError, match="positions"):
            relays.subscribe(positions=cast(Any, {fake.url: "cursor"}))
        with pytest.raises(TypeError, match="packet_id"):
            await relays.get(cast(Any, None))
    with pytest.raises(TypeError, match="relays must be URLs"):
        strata.connect_pool(cast(Any, 5))


async def test_a_pool_without_any_url_says_so_at_once():
    with pytest.raises(strata.ConnectionFailed, match="not a relay URL"):
        await strata.connect_pool(["ws://[::1", "localhost"]).open()


async def test_what_is_published_is_a_packet(fake, make):
    async with strata.connect(fake.url, identity=AUTHOR) as relay:
        for wrong in (make(1).canonical, {"type": "POST"}, None):
            with pytest.raises(TypeError, match="packet must be a Packet"):
                await relay.publish(cast(Any, wrong))
        with pytest.raises(TypeError, match="content must be a mapping"):
            await relay.post(cast(Any, "hello"))
        with pytest.raises(TypeError, match="packet_id"):
            await relay.get(cast(Any, 5))
        with pytest.raises(TypeError, match="on_log_reset"):
            relay.subscribe(on_log_reset=cast(Any, 5))
        for timeout in ("5", True):
            with pytest.raises(TypeError, match="timeout"):
                await relay.publish(make(1), timeout=cast(Any, timeout))
        with pytest.raises(ValueError, match="timeout"):
            await relay.publish(make(1), timeout=math.nan)


@pytest.mark.parametrize("timeout", [0, -1])
async def test_a_timeout_that_is_past_is_told_as_it_was_given(fake, make, timeout):
    async with strata.connect(fake.url) as relay:
        with pytest.raises(strata.RequestTimeout, match=f"within {timeout} s"):
            await relay.publish(make(1), timeout=timeout)


async def test_a_timeout_counts_the_time_that_a_publish_has_waited_for_its_turn(extended, make):
    extended.model.answer = lambda message: "silence"
    async with strata.connect(extended.url, options=strata.Options(max_in_flight=1)) as relay:
        first = asyncio.create_task(relay.publish(make(1), timeout=0.05))
        second = asyncio.create_task(relay.publish(make(2), timeout=0.25))
        for publishing, given in ((first, 0.05), (second, 0.25)):
            with pytest.raises(strata.RequestTimeout) as late:
                await publishing
            assert late.value.timeout == given


def test_content_is_a_mapping():
    with pytest.raises(TypeError, match="content must be a mapping"):
        packets.build(AUTHOR, cast(Any, []), timestamp=1)
