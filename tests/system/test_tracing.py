"""Traces over real processes: one stores, another also sends, and a collector joins their spans."""

from __future__ import annotations

from pathlib import Path

from tests.support.bare_client import open_client
from tests.support.made_packets import ids_of, make, new_identity
from tests.support.otlp import ReceivedSpan, receiver
from tests.support.relay_process import RelayProcess, running
from tests.support.waiting import until


async def test_a_publish_is_followed_to_its_last_subscriber_in_another_process(
    tmp_path: Path, shared_database: str
):
    identity = new_identity()
    stored, live = make(identity, n=1), make(identity, n=2)
    with receiver() as collector:

        def relay(name: str) -> RelayProcess:
            database = shared_database
            return RelayProcess(
                tmp_path / name, database_url=database, tracing_url=collector.url, tracing_ratio=1
            )

        with running(relay("1")) as one, running(relay("2")) as two:
            async with open_client(one.ws) as writer, open_client(two.ws) as reader:
                assert (await writer.publish(stored))["type"] == "OK"
                for client in (writer, reader):
                    events, _ = await client.subscribe("s", {"authors": [identity.did]})
                    assert ids_of(events) == [stored.packet_id]
                    await client.barrier()
                assert (await writer.publish(live))["type"] == "OK"
                for client in (writer, reader):
                    assert ids_of(await client.events("s", 1)) == [live.packet_id]
                refused = make(identity, age=10**7)
                assert (await writer.publish(refused))["type"] == "ERROR"
            assert one.stop() == two.stop() == 0  # waiting spans are sent
            assert not one.complaints() and not two.complaints()
        spans = [span for span in collector.spans if span.trace_id == live.packet_id[2:34]]
        by_name: dict[str, list[ReceivedSpan]] = {}
        for span in sorted(spans, key=lambda span: span.began_at):
            by_name.setdefault(span.name, []).append(span)
        (root,) = by_name["publish"]
        (append,) = by_name["publish.append"]
        assert root.parent_id == "" and root.attributes["strata.packet_id"] == live.packet_id
        edges = [root.began_at]
        for name in ("publish.check", "publish.queue", "publish.append"):
            (part,) = by_name[name]
            assert part.parent_id == root.span_id and part.instance == root.instance
            assert part.began_at == edges[-1], "the parts touch"
            edges.append(part.ended_at)
        assert edges == sorted(edges) and edges[-1] <= root.ended_at
        fanouts = by_name["feed.fanout"]
        assert len({span.instance for span in fanouts}) == len(fanouts) == 2
        assert {span.attributes["relayd.batch.events"] for span in fanouts} == {1}
        (read,) = [span for span in by_name["feed.read"] if span.instance != root.instance]
        assert read.attributes["relayd.sequence"] == append.attributes["relayd.sequence"]
        assert {span.parent_id for span in (*fanouts, read)} == {append.span_id}
        (own,) = [span for span in fanouts if span.instance == root.instance]
        assert append.ended_at <= own.began_at and own.ended_at <= root.ended_at
        subscribes = {span.span_id: span for span in collector.named("subscribe")}
        assert len({span.instance for span in subscribes.values()}) == 2
        for page in collector.named("subscribe.page"):
            whole = subscribes[page.parent_id]
            assert whole.began_at <= page.began_at <= page.ended_at <= whole.ended_at
        assert sum(int(str(span.attributes["relayd.events"])) for span in subscribes.values()) == 2
        failed = [span for span in collector.named("publish") if span.has_failed]
        assert [span.attributes["strata.packet_id"] for span in failed] == [refused.packet_id]


async def test_a_relay_whose_collector_is_away_serves_as_ever(tmp_path: Path):
    identity = new_identity()
    with receiver() as collector:
        collector.status = 400
        relay = RelayProcess(tmp_path, tracing_url=collector.url, tracing_ratio=1)
        with running(relay) as relay:
            async with open_client(relay.ws) as client:
                answers = await client.publish_all([make(identity, n=n) for n in range(50)])
                assert {answer["type"] for answer in answers} == {"OK"}
                lost = {"outcome": "lost"}
                await until(lambda: relay.metric("relayd_trace_spans_total", **lost) > 0, "spans are lost")
            assert relay.stop() == 0
            assert relay.logged("traces_lost") >= 1 and not relay.complaints()
