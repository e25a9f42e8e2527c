"""Every setting of a channel, under every name that the documents have used for it (channel.md §2)."""

# Core: no I/O, no clock, no randomness (held by tests/test_layout.py).

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal, cast

from strata.channels.encryption import Encryption
from strata.channels.messaging.node import MessagingNode
from strata.channels.persistence.interface import Persistence
from strata.channels.rate_limit.proof import ProofProvider
from strata.channels.rate_limit.values import RateLimitConfig
from strata.channels.reliable.naming import check_device
from strata.channels.sds import SdsConfig
from strata.channels.segmentation.splitting import SegmentationConfig
from strata.channels.spelling import in_camel_case, snake_case
from strata.relays.arguments import authors_of

__all__ = [
    "ALIASES",
    "DEFAULT_RELIABLE_CHANNEL_CONFIG",
    "PROFILES",
    "DefaultReliableChannelOptions",
    "ReliableChannelConfig",
    "configure",
]


@in_camel_case(sds_config="sds", segmentation_config="segmentation", rate_limit_config="rate_limit")
@dataclass(frozen=True, slots=True, kw_only=True)
class ReliableChannelConfig:
    """Settings of one channel; times are in milliseconds. None as a section means the node's or the default.

    Raises `ValueError` on construction for an unusable value (C-032).
    """

    sds: SdsConfig | None = None
    segmentation: SegmentationConfig | None = None
    rate_limit: RateLimitConfig | None = None
    """Shared by all channels of a transport identity (C-234); the first channel that opens sets it."""
    encryption: Encryption | None = None
    persistence: Persistence | None = None
    """None: memory, which is lost when the process ends (C-251)."""

    node: MessagingNode | None = None
    channel_id: str | None = None
    content_topic: str | None = None

    retrieve_frequency_ms: int = 10_000
    """How often the store is queried for missing messages; 0: never (C-163)."""
    process_task_min_elapse_ms: int = 1_000
    """The shortest time between two rounds of retransmissions, syncs and sweeps (C-080). Received messages
    are handled when they arrive."""
    query_on_connect: bool = True
    force_query_threshold_ms: int = 300_000
    """A store that becomes available is queried for missed messages if the last query was longer ago than
    this, and after every reconnection (C-170)."""
    query_window_ms: int = 30 * 86_400_000
    """How far such a query looks back at most (C-173)."""
    join: Literal["history", "now"] = "history"
    """Which past messages a participant that is new to the channel receives: all, or with `now` none. With
    `now`, no message waits for an earlier one either."""
    since: int | None = None
    """A new participant receives messages sent since this time, in Unix seconds, and none from before."""
    auto_start: bool = True
    sent_event_on: Literal["network", "participants"] = "network"
    """When `reliable:message:sent` is reported: once the transport has all chunks, or once a participant has
    (C-051)."""
    send_request_id: bool = True
    """Whether segments carry the request id, so that the receiver's events name it (C-187)."""
    sender_binding: Literal["off", "did"] = "off"
    """`did`: a message whose sender id is a DID, or a device of one (`DID#device`), must be signed by that
    DID, and the channel's own sender id is such a device (C-287)."""
    device: str | None = None
    """The name of this device among its person's devices. With `sender_binding="did"` the sender id is
    `DID#device`; None makes a name and keeps it in the store."""
    members: tuple[str, ...] = ()
    """The authors to listen to, if they are known (C-288): the same for all channels of a node on one topic.
    Messages of other authors that these name are fetched anyway."""
    retention_seconds: int | None = None
    """How long stores should keep this channel's messages; None leaves it to them (C-295)."""
    proof_provider: ProofProvider | None = None
    """Makes the proof of each transmission if the transport requires one (C-236)."""

    receive: bool = True
    """False for a channel that only sends: received messages update its state but are not kept to be read."""
    hand_over: Literal["at_most_once", "at_least_once", "once", "again"] = "at_most_once"
    """What a crash does to a message that the program is processing. `at_most_once`: the message is never
    handed over again, and a crash can lose it. `at_least_once`: the message is handed over again until it is
    acknowledged (`ReliableChannel.ack`). `once` and `again` are older names of these two."""
    auto_ack: bool = True
    """With `at_least_once`: a message is acknowledged when its handlers have returned, or when the program
    asks for the next one. False: only by `ack`."""
    drain_timeout_ms: int = 10_000
    """How long `stop`, `close` and the end of `async with` wait for messages to go out."""
    max_inbox_messages: int = 10_000
    """The most messages kept for a program that does not take them; at this number the channel reads no
    further."""
    max_inbox_bytes: int = 64 << 20

    def __post_init__(self) -> None:
        object.__setattr__(self, "members", authors_of("members", self.members))
        object.__setattr__(self, "hand_over", _HAND_OVER.get(self.hand_over, self.hand_over))
        if not self.drain_timeout_ms >= 0:
            raise ValueError("drain_timeout_ms must not be negative")
        for name in ("retrieve_frequency_ms", "process_task_min_elapse_ms", "force_query_threshold_ms"):
            if not getattr(self, name) >= 0:  # NaN fails this too
                raise ValueError(f"{name} must not be negative")
        for name in ("query_window_ms", "max_inbox_messages", "max_inbox_bytes"):
            if not getattr(self, name) >= 1:
                raise ValueError(f"{name} must be at least 1")
        if self.retention_seconds is not None and self.retention_seconds < 1:
            raise ValueError("retention_seconds must be at least 1")
        for name in ("retrieve_frequency_ms", "query_window_ms", "retention_seconds"):
            if getattr(self, name) == math.inf:  # dates and waits are computed from them
                raise ValueError(f"{name} must be finite")
        if self.device is not None:
            check_device(self.device)
        if self.since is not None and (self.join == "now" or self.since < 0):
            raise ValueError("since is a time in Unix seconds, for join='history'")
        for name, allowed in _CHOICES.items():
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name} must be one of {', '.join(allowed)}")
        if self.rate_limit is not None and self.sds is not None:
            if self.rate_limit.max_queued < self.sds.max_unacknowledged:
                raise ValueError("rate_limit.max_queued must be at least sds.max_unacknowledged")


_CHOICES = {
    "sent_event_on": ("network", "participants"),
    "sender_binding": ("off", "did"),
    "hand_over": ("at_most_once", "at_least_once"),
    "join": ("history", "now"),
}
_HAND_OVER: Mapping[str, Literal["at_most_once", "at_least_once"]] = {
    "once": "at_most_once",
    "again": "at_least_once",
}
_SECTIONS: dict[str, type[Any]] = {
    "sds": SdsConfig,
    "segmentation": SegmentationConfig,
    "rate_limit": RateLimitConfig,
}
_SECTION_OF = {each.name: section for section, kind in _SECTIONS.items() for each in fields(kind)}
_PLAIN = {each.name for each in fields(ReliableChannelConfig)} - set(_SECTIONS)

ALIASES: Mapping[str, str] = {
    "retry_interval_ms": "acknowledgement_timeout_ms",
    "max_retry_attempts": "max_retransmissions",
    "history_backend": "persistence",
    "epoch_period_sec": "epoch_size_ms",
}
"""Older names of options (C-030); `epoch_period_sec` is still in seconds."""

PROFILES: Mapping[str, Mapping[str, int | str]] = {
    "2025": {"acknowledgement_timeout_ms": 30_000, "max_retransmissions": 10, "causal_history_size": 200},
    "js-waku": {"acknowledgement_timeout_ms": 30_000, "max_retransmissions": 10, "segmentation": "auto"},
}
"""Presets (C-033). A js-waku participant postpones its sync whenever it receives anything. A channel that
repeats every five seconds hears from it late, and considers messages undelivered that have arrived."""

DEFAULT_RELIABLE_CHANNEL_CONFIG = ReliableChannelConfig(
    sds=SdsConfig(), segmentation=SegmentationConfig(), rate_limit=RateLimitConfig()
)
"""All defaults, with sections filled in (C-029)."""
DefaultReliableChannelOptions = DEFAULT_RELIABLE_CHANNEL_CONFIG
"""The name in the documents."""


@dataclass(slots=True)
class _Given:
    """Options under their canonical names, by section; the section "" is the configuration itself."""

    by_section: dict[str, dict[str, Any]] = field(default_factory=dict)

    def set(self, name: str, value: Any) -> None:
        section, _, member = snake_case(name).rpartition(".")
        section = section.removesuffix("_config")
        member, value = _canonical(member, value)
        if not section:
            section = "" if member in _PLAIN else _SECTION_OF.get(member, "?")
        elif member == "persistence" and section in ("sds", "segmentation"):
            section = ""
        kind = _SECTIONS.get(section)
        known = member in _PLAIN if section == "" else kind is not None and _has(kind, member)
        if not known:
            raise ValueError(f"no option is called {name!r}")
        held = self.by_section.setdefault(section, {})
        if member in held and held[member] != value:
            raise ValueError(f"{name} is given twice, as {held[member]!r} and {value!r}")
        held[member] = value


def configure(
    config: ReliableChannelConfig | None,
    *,
    defaults: ReliableChannelConfig | None = None,
    profile: str | None = None,
    options: Mapping[str, object] | None = None,
    settings: Mapping[str, object] | None = None,
    encryption: Encryption | None = None,
) -> ReliableChannelConfig:
    """Return the settings in force, with sections filled in.

    From lowest to highest precedence: the defaults, the node's `defaults`, the preset `profile`, the
    channel's `config`, and `options` with `settings`. `options` is a mapping of names, old or new, with or
    without their section: both `acknowledgement_timeout_ms` and `sds.acknowledgement_timeout_ms` work
    (C-003). `settings` has only canonical names. Raises `ValueError` for an unknown option or profile, for
    an option that is given twice with different values, and for unusable values.
    """
    own = config or ReliableChannelConfig()
    node = defaults or ReliableChannelConfig()
    if profile is not None and profile not in PROFILES:
        raise ValueError(f"no profile is called {profile!r}; there is {', '.join(PROFILES)}")
    preset, given = _Given(), _Given()
    for name, value in PROFILES.get(profile or "", {}).items():
        preset.set(name, value)
    for option, chosen_value in (*(options or {}).items(), *(settings or {}).items()):
        given.set(option, chosen_value)
    if encryption is not None:
        given.set("encryption", encryption)
    merged: dict[str, Any] = {}
    for section, kind in _SECTIONS.items():
        chosen = getattr(own, section)
        if chosen is None:
            chosen = replace(getattr(node, section) or kind(), **preset.by_section.get(section, {}))
        merged[section] = replace(chosen, **given.by_section.get(section, {}))
    for name in ("encryption", "node", "channel_id", "content_topic"):
        if getattr(own, name) is None:
            merged[name] = getattr(node, name)
    merged["persistence"] = _persistence(own) or _persistence(node)
    merged |= given.by_section.get("", {})
    return replace(own, **merged)


def _persistence(config: ReliableChannelConfig) -> Persistence | None:
    """The store of a configuration, from either place. Raises `ValueError` for two different ones."""
    inner = None if config.sds is None else cast("Persistence | None", config.sds.persistence)
    if config.persistence is not None and inner not in (None, config.persistence):
        raise ValueError("persistence is given twice, as sds.persistence too")
    return config.persistence or inner


def _canonical(name: str, value: Any) -> tuple[str, Any]:
    if name == "epoch_period_sec":
        value = value * 1000
    return ALIASES.get(name, name), value


def _has(kind: type[Any], name: str) -> bool:
    return any(each.name == name for each in fields(kind))
