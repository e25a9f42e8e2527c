"""What is known about channels: their packets, their messages, and what became of them by day."""

from __future__ import annotations

from strata_pipeline.datasets.dataset import Dataset

__all__ = ["ChannelDays", "ChannelMessages", "ChannelPackets", "Gaps", "Silences"]


class ChannelPackets(Dataset, schema="channel_packets"):
    """The packets of channels, each with the SDS message it carries."""


class ChannelMessages(Dataset, schema="channel_messages"):
    """The content messages, each once."""


class ChannelDays(Dataset, schema="channel_days"):
    """The figures of each channel and day."""


class Gaps(Dataset, schema="gaps"):
    """Messages that are named and nowhere to be found."""


class Silences(Dataset, schema="silences"):
    """Who acknowledged nothing of whom."""
