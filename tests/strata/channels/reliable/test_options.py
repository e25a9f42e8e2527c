"""Every option: its default, its names, the values it refuses, its effect (channel.md §2)."""

from __future__ import annotations

import asyncio
import functools
from collections import Counter
from dataclasses import fields, replace
from typing import Any, get_type_hints

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from strata.channels.encryption import GroupKey, GroupKeyEncryption
from strata.channels.messaging import RelayNode
from strata.channels.persistence import MemoryPersistence
from strata.channels.rate_limit import RateLimitConfig
from strata.channels.reliable import (
    DEFAULT_RELIABLE_CHANNEL_CONFIG,
    DefaultReliableChannelOptions,
    InvalidConfiguration,
    MessageReceived,
    MessageSent,
    ReliableChannelConfig,
    ReliableMessageDelivered,
    ReliableMessageDeliveryError,
    ReliableMessageSent,
    SegmentDoesNotFit,
    configure,
    create_reliable_channel,
)
from strata.channels.reliable.client import make_channel, open_channel
from strata.channels.reliable.config import ALIASES as ALL_ALIASES
from strata.channels.reliable.options import ChannelOptions, ConfigOptions
from strata.channels.sds import Kind, SdsConfig
from strata.channels.segmentation import SegmentationConfig
from strata.channels.segmentation.messages import MAX_RECEIVED_SEGMENTS
from strata.protocol.ids import Identity
from strata.txrx import RelayEnd

from tests.support.channel_world import SWALLOW, TOPIC, Recorder, World, own_tasks, until, virtually

HOUR = 3600.0

DEFAULTS: dict[str, Any] = {
    "sds.acknowledgement_timeout_ms": 5000,
    "sds.max_retransmissions": 5,
    "sds.causal_history_size": 2,
    "sds.bloom_filter_size": 10_000,
    "sds.bloom_filter_error_rate": 0.001,
    "sds.possible_acks_threshold": 2,
    "sds.possible_ack_retry_factor": 2.0,
    "sds.lost_message_timeout_ms": 600_000,
    "sds.enable_repair": True,
    "sds.repair_t_min_ms": 30_000,
    "sds.repair_t_max_ms": 120_000,
    "sds.expected_participants": 1,
    "sds.max_repair_requests": 3,
    "sds.max_history": 10_000,
    "sds.sync_min_interval_ms": 30_000,
    "sds.sweep_in_buf_interval_ms": 5000,
    "retrieve_frequency_ms": 10_000,
    "process_task_min_elapse_ms": 1000,
    "query_on_connect": True,
    "force_query_threshold_ms": 300_000,
    "auto_start": True,
    "segmentation.segment_size_bytes": 102_400,
    "segmentation.enable_reed_solomon": False,
    "segmentation.parity_rate": 0.125,
    "segmentation.reassembly_timeout_ms": 600_000,
    "rate_limit.enabled": True,
    "rate_limit.epoch_size_ms": 600_000,
    "rate_limit.messages_per_epoch": None,
    "rate_limit.chunk_accounting": "first",
    "rate_limit.segments_per_epoch": None,
    "rate_limit.approach_threshold": 0.9,
    "encryption": None,
    "sent_event_on": "network",
}
"""The last column of the table of options."""

SECTIONS: dict[str, type[Any]] = {
    "sds": SdsConfig,
    "segmentation": SegmentationConfig,
    "rate_limit": RateLimitConfig,
}
ALIASES = {
    "retry_interval_ms": "sds.acknowledgement_timeout_ms",
    "max_retry_attempts": "sds.max_retransmissions",
    "causal_history_size": "sds.causal_history_size",
    "bloom_filter_size": "sds.bloom_filter_size",
    "sync_min_interval_ms": "sds.sync_min_interval_ms",
    "sweep_in_buf_interval_ms": "sds.sweep_in_buf_interval_ms",
}
FREE = [
    "sds.acknowledgement_timeout_ms",
    "sds.max_retransmissions",
    "sds.causal_history_size",
    "sds.bloom_filter_size",
    "sds.possible_acks_threshold",
    "sds.lost_message_timeout_ms",
    "sds.expected_participants",
    "sds.max_repair_requests",
    "sds.sync_min_interval_ms",
    "sds.sweep_in_buf_interval_ms",
    "segmentation.segment_size_bytes",
    "rate_limit.epoch_size_ms",
    "segmentation.reassembly_timeout_ms",
    "rate_limit.messages_per_epoch",
    "rate_limit.segments_per_epoch",
    "retrieve_frequency_ms",
    "process_task_min_elapse_ms",
    "force_query_threshold_ms",
    "retention_seconds",
    "query_window_ms",
    "max_inbox_messages",
]
"""Options that accept every whole number from 1 on."""

NUMBERS = st.integers(1, 10**6)


def group_hook() -> GroupKeyEncryption:
    return GroupKeyEncryption("room", GroupKey(bytes(32)))


def look_up(config: ReliableChannelConfig, name: str) -> Any:
    section, _, member = name.rpartition(".")
    return getattr(getattr(config, section) if section else config, member)


# Defaults and names.


@pytest.mark.req("C-029")
@virtually
async def test_defaults_are_those_of_the_documents() -> None:
    channel = await World().open("alice")
    for name, value in DEFAULTS.items():
        for config in (DefaultReliableChannelOptions, configure(None), channel.config):
            assert look_up(config, name) == value, name
            assert type(look_up(config, name)) is type(value), name
    assert MAX_RECEIVED_SEGMENTS == 256
    assert DefaultReliableChannelOptions is DEFAULT_RELIABLE_CHANNEL_CONFIG == configure(None)
    assert channel.config.persistence is None


@pytest.mark.req("C-029")
def test_both_predefined_values_have_the_names_of_the_documents() -> None:
    from strata.channels import rate_limit, reliable

    assert isinstance(reliable.DefaultReliableChannelOptions, ReliableChannelConfig)
    assert rate_limit.DefaultRateLimitConfig == RateLimitConfig()


@settings(deadline=None)
@given(st.sampled_from(FREE), NUMBERS)
@pytest.mark.req("C-003")
def test_an_option_means_the_same_flat_with_its_section_and_in_a_configuration(name: Any, value: Any) -> None:
    section, _, member = name.rpartition(".")
    if section:
        given_as = ReliableChannelConfig(**{section: SECTIONS[section](**{member: value})})
    else:
        given_as = ReliableChannelConfig(**{member: value})
    wanted = configure(given_as)
    assert look_up(wanted, name) == value
    assert configure(None, options={member: value}) == wanted
    assert configure(None, options={name: value}) == wanted
    assert configure(None, options={member: value, name: value}) == wanted


@settings(deadline=None)
@given(st.dictionaries(st.sampled_from(FREE), NUMBERS), st.dictionaries(st.sampled_from(FREE), NUMBERS))
@pytest.mark.req("C-003")
def test_options_override_the_configuration_and_leave_the_rest_of_it_alone(held: Any, options: Any) -> None:
    config = configure(None, options=held)
    result = configure(config, options=options)
    for name in FREE:
        assert look_up(result, name) == options.get(name, held.get(name, look_up(configure(None), name)))


@settings(deadline=None)
@given(st.sampled_from(sorted(ALIASES)), NUMBERS, NUMBERS)
@pytest.mark.req("C-030")
def test_an_alias_sets_the_same_value_and_may_not_contradict(alias: Any, value: Any, other: Any) -> None:
    section, _, member = ALIASES[alias].rpartition(".")
    spellings = {alias, f"{section}.{alias}", member, ALIASES[alias]}
    for spelling in spellings:
        config = configure(None, options={spelling: value})
        assert look_up(config, ALIASES[alias]) == value
        assert config == configure(None, options={ALIASES[alias]: value})
        for second in spellings - {spelling}:
            both = {spelling: value, second: other}
            if value == other:
                assert configure(None, options=both) == config
            else:
                with pytest.raises(ValueError, match="twice"):
                    configure(None, options=both)


@settings(deadline=None)
@given(NUMBERS)
@pytest.mark.req("C-030")
def test_an_epoch_in_seconds_is_the_same_in_milliseconds(seconds: Any) -> None:
    for spelling in ("epoch_period_sec", "rate_limit.epoch_period_sec"):
        config = configure(None, options={spelling: seconds})
        assert look_up(config, "rate_limit.epoch_size_ms") == seconds * 1000
        assert configure(None, options={spelling: seconds, "epoch_size_ms": seconds * 1000}) == config
        with pytest.raises(ValueError, match="twice"):
            configure(None, options={spelling: seconds, "epoch_size_ms": seconds})


@pytest.mark.req("C-030")
def test_the_aliases_of_the_documents_change_a_channel() -> None:
    options: dict[str, Any] = {"retry_interval_ms": 1, "max_retry_attempts": 7}
    config = channel_on_nothing(options).config
    assert config.sds == SdsConfig(acknowledgement_timeout_ms=1, max_retransmissions=7)


class _Deaf:
    """Enough of a node to make a channel that is never opened."""

    defaults: object = None


def channel_on_nothing(options: dict[str, Any], **more: Any) -> Any:
    return make_channel(_Deaf(), "room", TOPIC, "alice", options=options, **more)  # type: ignore[arg-type]


@pytest.mark.req("C-003")
@settings(deadline=None)
@given(st.text(max_size=30))
def test_unknown_option_names_are_refused(name: Any) -> None:
    known = {each.name for kind in SECTIONS.values() for each in fields(kind)}
    known |= {each.name for each in fields(ReliableChannelConfig)} | set(ALL_ALIASES)
    if name.rpartition(".")[2] not in known:
        for spelling in (name, f"sds.{name}", f"nonsense.{name}"):
            with pytest.raises(ValueError, match="no option is called"):
                configure(None, options={spelling: 1})


@pytest.mark.req("C-003")
@pytest.mark.parametrize(
    "name",
    [
        "acknowledgementTimeoutMS",
        "segmentation.acknowledgementTimeoutMs",
        "segmentation.acknowledgement_timeout_ms",
        "sds.segment_size_bytes",
        "rate_limit.auto_start",
        "sds.auto_start",
        "nonsense.auto_start",
        "sds.",
        ".",
    ],
)
def test_an_option_in_another_section_is_unknown(name: Any) -> None:
    with pytest.raises(ValueError, match="no option is called"):
        configure(None, options={name: 1})


@pytest.mark.req("C-003")
@virtually
async def test_a_hook_may_be_given_in_each_place_and_the_channels_are_equal() -> None:
    world = World()
    hook = group_hook()
    by_argument = await world.open("alice", encryption=hook)
    by_config = await world.open("bob", config=ReliableChannelConfig(encryption=hook))
    by_option = await create_reliable_channel(
        world.node("carol"), "room", TOPIC, "carol", options={"encryption": hook}
    )
    assert by_argument.config == by_config.config == by_option.config
    channels = (by_argument, by_config, by_option)
    heard = [Recorder(channel) for channel in channels]
    for channel in channels:
        await channel.send(channel.sender_id.encode())
    await until(lambda: [each.count(MessageReceived) for each in heard] == [2, 2, 2])


@virtually
async def test_a_store_has_one_home_whatever_it_is_called() -> None:
    store = MemoryPersistence()
    for name in ("persistence", "sds.persistence", "segmentation.persistence", "history_backend"):
        assert configure(None, options={name: store}).persistence is store
    with pytest.raises(ValueError):
        configure(None, options={"sds.persistence": store, "segmentation.persistence": MemoryPersistence()})


# Which settings apply.


@pytest.mark.req("C-031")
@virtually
async def test_a_node_has_defaults_and_a_channel_overrides_them() -> None:
    defaults = ReliableChannelConfig(
        sds=SdsConfig(acknowledgement_timeout_ms=7000),
        segmentation=SegmentationConfig(segment_size_bytes=1000),
        rate_limit=RateLimitConfig(messages_per_epoch=9),
    )
    world = World()
    world.node("alice", defaults=defaults)
    plain = await world.open("alice")
    assert plain.config.sds == defaults.sds
    assert plain.config.segmentation == defaults.segmentation
    assert plain.config.rate_limit == defaults.rate_limit
    own = ReliableChannelConfig(sds=SdsConfig(max_retransmissions=1))
    channel = await world.open("alice", "other", "/test/1/other/proto", config=own, segment_size_bytes=2000)
    assert channel.config.sds == own.sds
    assert look_up(channel.config, "segmentation.segment_size_bytes") == 2000
    assert channel.config.rate_limit == defaults.rate_limit
    await plain.send(b"x" * 2500)
    await until(lambda: len(world.node("alice").contents) == 3)


@pytest.mark.req("C-033")
@virtually
async def test_the_profile_of_2025_sets_three_values() -> None:
    channel = await World().open("alice", profile="2025")
    assert channel.config.sds == SdsConfig(
        acknowledgement_timeout_ms=30_000, max_retransmissions=10, causal_history_size=200
    )
    assert replace(channel.config, sds=SdsConfig()) == configure(None)
    with pytest.raises(ValueError):
        configure(None, profile="1999")


@pytest.mark.req("C-033")
def test_the_profile_of_js_waku_sets_its_pace_and_its_form() -> None:
    config = configure(None, profile="js-waku")
    assert config.sds == SdsConfig(acknowledgement_timeout_ms=30_000, max_retransmissions=10)
    assert config.segmentation == SegmentationConfig(segmentation="auto")
    assert configure(None, profile="js-waku", options={"segmentation": "off"}).sds == config.sds


@pytest.mark.req("C-033")
def test_an_option_is_stronger_than_the_profile() -> None:
    config = configure(None, profile="2025", options={"max_retry_attempts": 3})
    assert config.sds == SdsConfig(
        acknowledgement_timeout_ms=30_000, max_retransmissions=3, causal_history_size=200
    )


@pytest.mark.req("C-033")
@virtually
async def test_a_channel_asks_for_a_profile_and_gets_it_whatever_its_nodes_defaults() -> None:
    world = World()
    world.node("alice", defaults=ReliableChannelConfig(sds=SdsConfig(max_retransmissions=2)))
    channel = await world.open("alice", profile="2025")
    assert channel.config.sds is not None
    assert channel.config.sds.acknowledgement_timeout_ms == 30_000
    assert channel.config.sds.max_retransmissions == 10
    assert channel.config.sds.causal_history_size == 200


# What is refused.

NOT_NEGATIVE = [
    name
    for name, value in DEFAULTS.items()
    if type(value) in (int, float) or name.endswith(("messages_per_epoch", "segments_per_epoch"))
]


@pytest.mark.req("C-032")
@pytest.mark.parametrize("name", NOT_NEGATIVE)
@virtually
async def test_a_negative_number_is_refused_at_creation(name: Any) -> None:
    world = World()
    for value in (-1, -0.5):
        with pytest.raises(ValueError):
            await world.open("alice", **{name.rpartition(".")[2]: value})
    assert own_tasks() == set()


@pytest.mark.req("C-032")
def test_what_is_not_a_number_is_refused() -> None:
    taken = []
    for name in NOT_NEGATIVE:
        try:
            configure(None, options={name: float("nan")})
        except ValueError:
            continue
        taken.append(name)
    assert taken == []


@pytest.mark.req("C-032")
@pytest.mark.parametrize(
    "name",
    [
        "acknowledgement_timeout_ms",
        "possible_ack_retry_factor",
        "retrieve_frequency_ms",
        "query_window_ms",
        "retention_seconds",
    ],
)
def test_a_time_without_end_is_refused_and_not_found_out_at_the_first_message(name: str) -> None:
    with pytest.raises(ValueError, match="finite"):
        configure(None, options={name: float("inf")})


@pytest.mark.req("C-032")
@pytest.mark.parametrize(
    "options",
    [
        {"bloom_filter_error_rate": 0},
        {"bloom_filter_error_rate": 1.5},
        {"parity_rate": 0},
        {"parity_rate": 1.01},
        {"approach_threshold": 0},
        {"approach_threshold": 1.01},
        {"possible_ack_retry_factor": 0.9},
        {"repair_t_min_ms": 120_000},
        {"repair_t_max_ms": 30_000},
        {"repair_t_min_ms": 5, "repair_t_max_ms": 4},
        {"acknowledgement_timeout_ms": 0},
        {"causal_history_size": 0},
        {"bloom_filter_size": 0},
        {"sweep_in_buf_interval_ms": 0},
        {"segment_size_bytes": 0},
        {"reassembly_timeout_ms": 0},
        {"epoch_size_ms": 0},
        {"messages_per_epoch": 0},
        {"segments_per_epoch": 0},
        {"max_inbox_messages": 0},
        {"max_inbox_bytes": 0},
        {"query_window_ms": 0},
        {"retention_seconds": 0},
        {"chunk_accounting": "every"},
        {"sent_event_on": "paper"},
        {"sender_binding": "rope"},
        {"hand_over": "twice"},
        {"max_history": 200_000},
        {"max_queued": 10},
        {"max_unacknowledged": 20_000},
    ],
    ids=str,
)
@virtually
async def test_a_value_that_cannot_work_is_refused_at_creation(options: Any) -> None:
    world = World()
    with pytest.raises(ValueError):
        await world.open("alice", **options)
    assert own_tasks() == set() and world.node("alice").subscribed == []


@pytest.mark.req("C-032")
@settings(deadline=None)
@given(st.integers(0, 10**6), st.integers(0, 10**6))
def test_repair_times_are_refused_exactly_when_they_leave_no_room(t_min: Any, t_max: Any) -> None:
    options = {"repair_t_min_ms": t_min, "repair_t_max_ms": t_max}
    if t_max > t_min:
        assert look_up(configure(None, options=options), "sds.repair_t_max_ms") == t_max
    else:
        with pytest.raises(ValueError):
            configure(None, options=options)


@pytest.mark.req("C-032")
@pytest.mark.req("C-288")
@pytest.mark.parametrize(
    ("members", "error"),
    [
        (("alice",), ValueError),
        (("did:strata:alice", ""), ValueError),
        (None, TypeError),
        ((1,), TypeError),
        (b"did:strata:alice", TypeError),
    ],
)
def test_members_that_are_no_authors_are_refused(members: Any, error: type[Exception]) -> None:
    """A channel with such members would hear nobody, and say nothing about it."""
    for make in (ReliableChannelConfig, RelayEnd):
        with pytest.raises(error, match="members"):
            make(members=members)


@pytest.mark.parametrize("members", ["did:strata:alice", ["did:strata:alice"], {"did:strata:alice": 1}])
def test_one_member_is_a_member_and_not_its_letters(members: Any) -> None:
    for made in (ReliableChannelConfig(members=members), RelayEnd(members=members)):
        assert made.members == ("did:strata:alice",)


@pytest.mark.parametrize("hook", [object(), "key", type("OneWay", (), {"encrypt": bytes})()])
@virtually
async def test_what_is_no_hook_is_refused_at_creation(hook: Any) -> None:
    with pytest.raises(InvalidConfiguration):
        await World().open("alice", encryption=hook)


# The effect of some of them.


@pytest.mark.req("C-034")
@virtually
async def test_with_no_sync_interval_no_sync_is_ever_sent() -> None:
    for interval, expected in ((0, False), (30_000, True)):
        world = World()
        alice, bob = await world.pair(sync_min_interval_ms=interval)
        heard = Recorder(bob)
        await alice.send(b"acknowledge me")
        await until(functools.partial(heard.count, MessageReceived))
        await asyncio.sleep(2 * HOUR)
        kinds = Counter(each.kind for node in world.nodes.values() for each in node.sendings)
        assert (kinds[Kind.SYNC] > 0) is expected
        for node in world.nodes.values():
            node.unplug()
        await alice.close()
        await bob.close()


class _LimitedRelays:
    """Relays that report how large a packet they take, and get no other calls."""

    is_connected = True
    seats = (1, 1)
    max_packet_bytes: int | None = 256 * 1024


@pytest.mark.req("C-035")
async def test_a_segment_of_250_kib_is_refused_on_a_relay_that_takes_256() -> None:
    node = RelayNode(_LimitedRelays(), identity=Identity.from_seed(bytes(32)))  # type: ignore[arg-type]
    arguments = (node, "room", TOPIC, "alice")
    options: dict[str, Any] = {"segment_size_bytes": 250 * 1024, "auto_start": False}
    before = len(asyncio.all_tasks())
    with pytest.raises(SegmentDoesNotFit) as caught:
        await create_reliable_channel(*arguments, options=options)
    largest = caught.value.largest
    assert caught.value.segment_size_bytes == 250 * 1024
    assert 150_000 < largest < 256 * 1024 * 3 // 4  # base64 takes up a quarter of the packet
    assert len(asyncio.all_tasks()) == before
    with pytest.raises(SegmentDoesNotFit):
        await create_reliable_channel(*arguments, options=options | {"segment_size_bytes": largest + 1})
    channel = await create_reliable_channel(*arguments, options=options | {"segment_size_bytes": largest})
    await channel.close()
    await node.close()


@pytest.mark.req("C-033", "C-035")
async def test_the_preset_of_2025_opens_on_a_relay_with_segments_that_fit() -> None:
    node = RelayNode(_LimitedRelays(), identity=Identity.from_seed(bytes(32)))  # type: ignore[arg-type]
    arguments = (node, "room", TOPIC, "alice")
    channel = await create_reliable_channel(*arguments, profile="2025", auto_start=False)
    assert channel.config.sds is not None and channel.config.segmentation is not None
    assert channel.config.sds.causal_history_size == 200
    fitted = channel.config.segmentation.segment_size_bytes
    assert 90_000 < fitted < 102_400
    await channel.close()
    with pytest.raises(SegmentDoesNotFit) as caught:  # this size was set explicitly
        await create_reliable_channel(
            *arguments, profile="2025", segment_size_bytes=fitted + 1, auto_start=False
        )
    assert caught.value.largest == fitted
    await node.close()


@pytest.mark.req("C-035")
@pytest.mark.parametrize("hooked", [False, True])
@virtually
async def test_the_largest_segment_fits_however_much_is_around_it(hooked: Any) -> None:
    limit = 120_000
    hook = group_hook() if hooked else None
    settings: dict[str, Any] = {"causal_history_size": 50, "encryption": hook}
    world = World()
    names = ["a" * 256, "b" * 256]
    for name in names:
        world.node(name, largest=limit)
    with pytest.raises(SegmentDoesNotFit) as caught:
        await world.open(names[0], "r" * 256, segment_size_bytes=limit, **settings)
    largest = caught.value.largest
    with pytest.raises(SegmentDoesNotFit):
        await world.open(names[0], "r" * 256, segment_size_bytes=largest + 1, **settings)
    talking = [await world.open(name, "r" * 256, segment_size_bytes=largest, **settings) for name in names]
    heard = Recorder(talking[1])
    for number in range(60):
        await talking[0].send(b"%d" % number)
    await until(lambda: heard.count(MessageReceived) == 60)
    whole = b"x" * largest
    await talking[0].send(whole * 3)
    await until(lambda: heard.count(MessageReceived) == 61)
    sizes = [len(each.envelope.payload) for node in world.nodes.values() for each in node.sendings]
    assert limit - 40_000 < max(sizes) <= limit


@pytest.mark.req("C-036")
@virtually
async def test_without_retransmissions_the_error_comes_after_one_timeout() -> None:
    world = World()
    world.node("alice").answer = lambda _: SWALLOW
    alice = await world.open("alice", max_retransmissions=0)
    told = Recorder(alice)
    await alice.send(b"into the void")
    await until(lambda: told.count(MessageSent))
    sent_at = world.now
    await until(lambda: told.count(ReliableMessageDeliveryError))
    assert 4.9 <= world.now - sent_at <= 6.1
    await asyncio.sleep(HOUR)
    assert len(world.node("alice").contents) == 1
    assert told.count(MessageSent) == told.count(ReliableMessageDeliveryError) == 1


@virtually
async def test_the_timeout_and_the_number_of_retransmissions_are_those_set() -> None:
    world = World()
    world.node("alice").answer = lambda _: SWALLOW
    alice = await world.open("alice", retry_interval_ms=20_000, max_retry_attempts=3)
    told = Recorder(alice)
    await alice.send(b"into the void")
    await until(lambda: told.count(ReliableMessageDeliveryError))
    assert 80 <= world.now <= 85
    assert len(world.node("alice").contents) == 4


@virtually
async def test_a_channel_that_only_sends_keeps_in_step_and_keeps_nothing_to_read() -> None:
    world = World()
    alice, bob = await world.open("alice", receive=False), await world.open("bob")
    told, heard = Recorder(alice), Recorder(bob)
    await alice.send(b"hello")
    await bob.send(b"hello yourself")
    await until(lambda: told.count(ReliableMessageDelivered) and heard.count(ReliableMessageDelivered))
    assert told.count(MessageReceived) == 0 and alice.sync_status().inbox == 0
    assert alice.log() == bob.log() and len(alice.log()) == 2


@pytest.mark.parametrize("sends", [True, False])
@virtually
async def test_the_request_id_travels_only_if_wanted(sends: Any) -> None:
    world = World()
    alice, bob = await world.pair(send_request_id=sends)
    heard = Recorder(bob)
    request_id = await alice.send(b"hello")
    await until(lambda: heard.count(MessageReceived))
    assert world.node("alice").contents[0].segment.request_id == (request_id if sends else None)


@virtually
async def test_a_retention_is_asked_of_the_stores() -> None:
    world = World()
    alice, bob = await world.open("alice", retention_seconds=3600), await world.open("bob")
    heard = Recorder(bob)
    await alice.send(b"for an hour")
    await until(lambda: heard.count(MessageReceived))
    assert {each.envelope.retention_seconds for each in world.node("alice").sendings} == {3600}


@virtually
async def test_what_counts_as_sent_can_be_set() -> None:
    world = World()
    network, people = await world.open("alice"), await world.open("bob", sent_event_on="participants")
    world.node("alice").answer = world.node("bob").answer = lambda _: SWALLOW
    told = [Recorder(network), Recorder(people)]
    await network.send(b"x")
    await people.send(b"x")
    await asyncio.sleep(HOUR)
    assert [each.count(ReliableMessageSent) for each in told] == [1, 0]


# Typed keywords.


NAMED_BY_THE_CALL = {"node", "channel_id", "content_topic"}


def test_the_keywords_are_the_settings_of_the_configuration_and_its_sections() -> None:
    expected = get_type_hints(ReliableChannelConfig)
    for name in (*SECTIONS, *NAMED_BY_THE_CALL):
        del expected[name]
    for kind in SECTIONS.values():
        hints = get_type_hints(kind)
        hints.pop("persistence", None)  # SdsConfig's own; in the document the name is a channel option
        assert not expected.keys() & hints.keys(), "a flat name has one meaning"
        expected |= hints
    own = {"config", "profile", "encoder", "decoder", "rng"}
    hints = get_type_hints(ChannelOptions)
    assert {name: hint for name, hint in hints.items() if name not in own} == expected
    assert own <= hints.keys() and hints.keys() - {"config"} == get_type_hints(ConfigOptions).keys()


@virtually
async def test_every_keyword_opens_a_channel_and_a_wrong_one_is_refused() -> None:
    given: dict[str, Any] = {
        name: look_up(DEFAULT_RELIABLE_CHANNEL_CONFIG, f"{section}.{name}" if section else name)
        for section, kind in (("", ReliableChannelConfig), *SECTIONS.items())
        for name in (each.name for each in fields(kind))
        if section or name not in {*SECTIONS, *NAMED_BY_THE_CALL}
    }
    own: dict[str, Any] = {"config": None, "profile": None, "encoder": None, "decoder": None, "rng": None}
    channel = open_channel(_Deaf(), "room", TOPIC, "alice", **given, **own)  # type: ignore[arg-type]
    assert channel.config == DEFAULT_RELIABLE_CHANNEL_CONFIG
    assert {*given, *own} == get_type_hints(ChannelOptions).keys()
    with pytest.raises(InvalidConfiguration, match="no option is called 'recieve'"):
        open_channel(_Deaf(), "room", TOPIC, "alice", recieve=True)  # type: ignore[arg-type, call-arg]
    with pytest.raises(InvalidConfiguration, match="given twice"):
        make_channel(_Deaf(), "room", TOPIC, "alice", options={"sds.max_history": 5}, max_history=6)  # type: ignore[arg-type]
