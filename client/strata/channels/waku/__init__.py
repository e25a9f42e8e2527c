"""Channels over Waku: a messaging node that uses the REST interface of a Waku node (nwaku).

`node` is the messaging node, `messages` has the JSON of the interface and the hashes of Waku messages, and
`http` makes HTTP requests.
"""

from __future__ import annotations

from strata.channels.waku.http import WakuRefused, WakuUnreachable
from strata.channels.waku.messages import shard_of, waku_message_hash
from strata.channels.waku.node import WakuNode

__all__ = ["WakuNode", "WakuRefused", "WakuUnreachable", "shard_of", "waku_message_hash"]
