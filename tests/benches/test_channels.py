"""The benchmarks of channels, briefly: they run, check themselves, and report what they measured."""

from __future__ import annotations

import json
import sys
import xml.etree.ElementTree as ET

import pytest

from benches import channel_convergence, channel_engine
from benches.__main__ import main
from benches.channel_convergence import Run, converge, summarise
from benches.channel_engine import measure_engines
from benches.channel_plot import plot
from benches.channels import plan_of
from benches.measures import BRIEF, FULL
from benches.peer import BenchError

TALKS = ["sent to received", "sent to acknowledged", "sent again"]
BLOB = [
    "sent to received",
    "sent to acknowledged",
    "peak memory of the sender",
    "peak memory of the receiver",
]
CONVERGED = [
    "last send to all agreeing, p50",
    "last send to all agreeing, p95",
    "published for each message",
]
MEASURES = {
    "channels": [f"{name}: {what}" for name in ("twoway", "oneway") for what in TALKS]
    + [f"0.3 MB: {what}" for what in BLOB]
    if sys.platform == "linux"
    else [],
    "convergence": [f"{loss} % lost: {what}" for loss in (0, 10) for what in CONVERGED],
    "crowd": [
        f"5 people say one thing each: {what}" for what in ("everybody has everything", "sent by the relay")
    ],
    "pace": [f"idle syncs of {people} people, in all" for people in (2, 10, 100)],
    "engine": [f"{what}, history of {size}" for size in (100, 300) for what in ("pushed", "received")],
}


@pytest.mark.parametrize("bench", MEASURES)
def test_each_benchmark_of_channels_runs_and_reports(bench: str, capsys: pytest.CaptureFixture[str]) -> None:
    code = main(["--brief", "--json", bench])
    out, err = capsys.readouterr()
    assert code == 0, err
    measures = json.loads(out)["measures"]
    assert [measure["name"] for measure in measures] == MEASURES[bench]
    for measure in measures:
        assert measure["bench"] == bench
        assert measure["unit"]
        assert measure["limit"] > 0
        assert measure["limit_name"]
        assert measure["ratio"] == pytest.approx(measure["value"] / measure["limit"])
        assert (measure["met"] is None) == (measure["target"] is None)


def test_nothing_is_sent_again_where_nothing_is_lost() -> None:
    run = converge(1, 0.0, messages=20)
    assert run.retransmissions == run.repairs == run.retrievals == 0
    # Each goes to both relays, and so does each sync.
    assert run.publishes >= 2 * 20
    assert 0 < run.agreed_after <= run.settled_after < 10


def test_a_run_is_repeated_by_its_seed() -> None:
    assert converge(3, 0.3, messages=15) == converge(3, 0.3, messages=15)
    assert converge(3, 0.3, messages=15) != converge(4, 0.3, messages=15)


def test_a_run_that_never_agrees_is_void(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channel_convergence, "_agree", lambda simulation: False)
    monkeypatch.setattr(channel_convergence, "_GIVE_UP_SECONDS", 1.0)
    with pytest.raises(BenchError, match="seed 5: no agreement after 1 virtual"):
        converge(5, 0.0, messages=2)


def made_run(seed: int, agreed_after: float, retransmissions: int) -> Run:
    return Run(
        seed=seed,
        loss=0.1,
        agreed_after=agreed_after,
        settled_after=2 * agreed_after,
        retransmissions=retransmissions,
        syncs=10,
        repairs=0,
        retrievals=5,
        publishes=30,
        bytes_published=4_000,
    )


def test_a_summary_is_by_message_and_by_delivery() -> None:
    summary = summarise([made_run(number, float(number), 2) for number in range(20)], messages=10)
    assert (summary["agreed_p50"], summary["agreed_p95"], summary["agreed_most"]) == (10, 19, 19)
    assert (summary["settled_p50"], summary["settled_p95"]) == (20, 38)
    assert summary["retransmissions_per_message"] == pytest.approx(0.2)
    assert summary["syncs_per_message"] == pytest.approx(1)
    assert summary["bytes_per_message"] == pytest.approx(400)
    assert summary["bytes_per_delivery"] == pytest.approx(100)


def test_the_plot_is_well_formed_and_shows_every_run() -> None:
    runs = {loss: [made_run(number, number * (1 + loss), 1) for number in range(5)] for loss in (0.0, 0.3)}
    drawn = plot(
        {loss: [run.agreed_after for run in found] for loss, found in runs.items()},
        [summarise(found) for found in runs.values()],
    )
    picture = ET.fromstring(drawn)
    paths = [each.get("d", "") for each in picture.iter() if each.tag.endswith("path")]
    curves = [path for path in paths if path.count("V") > 1]
    assert [path.count("V") for path in curves] == [5, 5]
    texts = [each.text for each in picture.iter() if each.tag.endswith("text")]
    assert {"0 % lost", "30 % lost"} <= set(texts)


def test_the_engines_report_each_size_of_history() -> None:
    figures = list(measure_engines((50, 120)))
    assert [figure["messages"] for figure in figures] == [50, 120]
    for figure in figures:
        assert figure["pushed_per_second"] > 0
        assert figure["received_per_second"] > 0
        # The default filter has 17,976 bytes, and all of it travels.
        assert figure["message_bytes"] > 17_976


def test_engines_that_lose_a_message_are_void(monkeypatch: pytest.MonkeyPatch) -> None:
    receive = channel_engine._Side.receive
    lost: list[bytes] = []

    def lossy(side: channel_engine._Side, wire: list[bytes], now: int) -> None:
        if not lost and len(wire) > 1:
            lost.append(wire[-1])
            wire = wire[:-1]
        receive(side, wire, now)

    monkeypatch.setattr(channel_engine._Side, "receive", lossy)
    with pytest.raises(BenchError, match=r"received|sent again"):
        list(measure_engines((100,)))


def test_a_brief_run_does_less() -> None:
    assert plan_of(BRIEF).messages < plan_of(FULL).messages
    assert plan_of(FULL).blob_bytes == 10_000_000
    assert plan_of(FULL).histories == channel_engine.SIZES
    assert plan_of(FULL).losses == channel_convergence.LOSSES
    assert plan_of(FULL).seeds >= 20


def test_the_benchmark_of_absences_runs_and_reports(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--brief", "--json", "absence"]) == 0
    measures = json.loads(capsys.readouterr().out)["measures"]
    assert [measure["name"] for measure in measures] == [
        f"{size} {what}"
        for size in (100, 300)
        for what in ("missed, read", "said before, joined to first heard")
    ]
