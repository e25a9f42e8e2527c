"""Datasets about channels: packets, messages, and figures by day."""

from __future__ import annotations

from strata_pipeline.datasets.dataset import Dataset

__all__ = ["ChannelDays", "ChannelMessages", "ChannelPackets", "Gaps", "Silences"]


class ChannelPackets(Dataset, schema="channel_packets"):
    """The packets of channels, each with the SDS message that it carries."""


class ChannelMessages(Dataset, schema="channel_messages"):
    """The content messages of channels, each listed once."""


class ChannelDays(Dataset, schema="channel_days"):
    """The figures of each channel and day."""


class Gaps(Dataset, schema="gaps"):
    """Messages that other messages name but no packet carries."""


class Silences(Dataset, schema="silences"):
    """Pairs of participants, one of whom acknowledged nothing from the other."""
