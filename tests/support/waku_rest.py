"""The REST interface of a Waku node, as in nwaku, over a network and an archive in memory.

Paths, bodies, statuses and quirks follow the sources of nwaku at 7d1c6ab (December 2025): an answer with
messages removes them from the node's cache, the cache holds fifty, a topic that is not subscribed is a 404 (a
400 for filters), pages of the store are in order of time in both directions, hashes are hex.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

__all__ = ["WakuNetwork", "WakuRest"]

CAPACITY = 50


@dataclass
class Archived:
    """A message and its place in the store."""

    pubsub_topic: str
    message: dict[str, Any]

    @property
    def hash(self) -> str:
        message = self.message
        parts = (
            self.pubsub_topic.encode(),
            base64.b64decode(message["payload"]),
            message["contentTopic"].encode(),
            base64.b64decode(message.get("meta", "")),
            message["timestamp"].to_bytes(8, "big"),
        )
        return "0x" + hashlib.sha256(b"".join(parts)).hexdigest()


class WakuNetwork:
    """What all nodes share."""

    def __init__(self, *, clusters: int = 1, shards: int = 8) -> None:
        self.cluster, self.shards = clusters, shards
        self.archive: list[Archived] = []
        self.nodes: list[WakuRest] = []

    def shard(self, content_topic: str) -> str:
        _, application, version, *_ = content_topic.split("/")
        digest = hashlib.sha256((application + version).encode()).digest()
        return f"/waku/2/rs/{self.cluster}/{int.from_bytes(digest[24:]) % self.shards}"

    def publish(self, pubsub_topic: str, message: dict[str, Any]) -> None:
        if not message.get("ephemeral"):
            self.archive.append(Archived(pubsub_topic, message))
        for node in self.nodes:
            node.hears(pubsub_topic, message)


@dataclass
class WakuRest:
    """One node, on its own port. `refuse` may answer a request instead: a status and a text."""

    network: WakuNetwork
    requests: list[tuple[str, str, Any]] = field(default_factory=list)
    refuse: Callable[[str, str], tuple[int, str] | None] = lambda method, path: None
    health: Any = field(default_factory=lambda: {"nodeHealth": "READY", "protocolsHealth": []})
    lose_answers: int = 0
    """The number of answers that are made and not sent."""
    page_limit: int = 100
    deaf: bool = False
    url: str = ""

    def __post_init__(self) -> None:
        self._cache: list[tuple[str, dict[str, Any]]] = []
        self._subscribed: set[str] = set()
        self._server: asyncio.Server | None = None
        self.network.nodes.append(self)

    async def start(self, port: int = 0) -> None:
        """Listen; subscriptions of an earlier run are forgotten."""
        self._cache.clear()
        self._subscribed.clear()
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", port)
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def stop(self) -> None:
        """Stop listening."""
        assert self._server is not None
        self._server.close()
        await self._server.wait_closed()

    def hears(self, pubsub_topic: str, message: dict[str, Any]) -> None:
        known = self._subscribed & {pubsub_topic, message["contentTopic"]}
        if known and self._server is not None and self._server.is_serving() and not self.deaf:
            self._cache = [*self._cache, (pubsub_topic, message)][-CAPACITY:]

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
            method, target, _ = head[0].split(" ")
            lengths = [line.partition(":")[2] for line in head if line.lower().startswith("content-length")]
            body = await reader.readexactly(int(lengths[0])) if lengths else b""
            asked = json.loads(body) if body else None
            if target != "/health":
                self.requests.append((method, target, asked))
            status, answer = self.refuse(method, target) or self._answer(method, target, asked)
            if self.lose_answers and method == "GET" and "/messages/" in target:
                self.lose_answers -= 1
                return
            text = answer if isinstance(answer, str) else json.dumps(answer)
            writer.write(
                f"HTTP/1.1 {status} X\r\nContent-Length: {len(text.encode())}\r\n"
                f"Content-Type: application/json\r\nConnection: close\r\n\r\n{text}".encode()
            )
            await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    def _answer(self, method: str, target: str, body: Any) -> tuple[int, Any]:
        parts = urlsplit(target)
        match method, parts.path.split("/")[1:]:
            case "GET", ["health"]:
                return 200, self.health
            case "POST", ["relay", "v1", *_, "subscriptions"]:
                self._subscribed |= set(body)
                return 200, "OK"
            case "DELETE", ["relay", "v1", *_, "subscriptions"]:
                self._subscribed -= set(body)
                return 200, "OK"
            case "POST", ["filter", "v2", "subscriptions"]:
                self._subscribed |= set(body["contentFilters"])
                return 200, {"requestId": body["requestId"], "statusDesc": ""}
            case "DELETE", ["filter", "v2", "subscriptions"]:
                self._subscribed -= set(body["contentFilters"])
                return 200, {"requestId": body["requestId"], "statusDesc": ""}
            case "GET", ["relay", "v1", *_, "messages", topic]:
                return self._drain(unquote(topic), 404)
            case "GET", ["filter", "v2", "messages", topic]:
                return self._drain(unquote(topic), 400)
            case "POST", ["relay", "v1", "auto", "messages"]:
                self.network.publish(self.network.shard(body["contentTopic"]), body)
                return 200, "OK"
            case "POST", ["relay", "v1", "messages", topic]:
                if unquote(topic) not in self._subscribed:
                    return 400, f"Failed to publish: Node not subscribed to topic: {unquote(topic)}"
                self.network.publish(unquote(topic), body)
                return 200, "OK"
            case "POST", ["lightpush", "v3", "message"]:
                message = body["message"]
                topic = body.get("pubsubTopic") or self.network.shard(message["contentTopic"])
                self.network.publish(topic, message)
                return 200, {"relayPeerCount": 3}
            case "GET", ["store", "v3", "messages"]:
                return 200, self._store({name: values[0] for name, values in parse_qs(parts.query).items()})
        return 404, ""

    def _drain(self, topic: str, otherwise: int) -> tuple[int, Any]:
        if topic not in self._subscribed:
            return otherwise, f"Not subscribed to topic: {topic}"
        found = [message for at, message in self._cache if topic in (at, message["contentTopic"])]
        self._cache = [each for each in self._cache if each[1] not in found]
        return 200, found

    def _store(self, query: dict[str, str]) -> dict[str, Any]:
        found = sorted(self.network.archive, key=lambda each: (each.message["timestamp"], each.hash))
        if "hashes" in query:
            found = [each for each in found if each.hash in query["hashes"].split(",")]
        else:
            topics = query["contentTopics"].split(",")
            found = [
                each
                for each in found
                if each.message["contentTopic"] in topics
                and each.pubsub_topic == query["pubsubTopic"]
                and each.message["timestamp"] >= int(query.get("startTime", 0))
            ]
        forward = query.get("ascending", "true") == "true"
        if not forward:
            found.reverse()
        if "cursor" in query:
            hashes = [each.hash for each in found]
            found = found[hashes.index(query["cursor"]) + 1 :]
        size = min(int(query.get("pageSize", 20)), self.page_limit)
        page, more = found[:size], len(found) > size
        answer: dict[str, Any] = {"requestId": "", "statusCode": 200, "statusDesc": "OK"}
        if more:
            answer["paginationCursor"] = page[-1].hash
        if not forward:
            page.reverse()  # in order of time, in both directions
        answer["messages"] = [
            {"messageHash": each.hash, "message": each.message, "pubsubTopic": each.pubsub_topic}
            for each in page
        ]
        return answer
