"""Every attack of the hostile bench, briefly, against one real relay.

Each must have reached the relay: the relay answered, or it read every byte sent. Afterwards it serves an
honest peer, and holds nothing for peers that have gone.
"""

from __future__ import annotations

import re
import ssl
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from benches.attacks import ATTACKS, PROXIES, TLS_ATTACKS, Attack, Gang
from benches.besieged import Cost, Summary, calmest, summary
from benches.honest import Service
from relayd.tls import write_dev_certificates
from tests.support.bare_client import open_client
from tests.support.made_packets import make, new_identity
from tests.support.relay_process import RelayProcess, http_get, running
from tests.support.waiting import until

pytestmark = pytest.mark.skipif(
    sys.platform != "linux", reason="only Linux lets a program bind any loopback address"
)

HELD = ("relayd_connections", "relayd_subscriptions", "relayd_subscriptions_behind", "relayd_publish_queue")
RECEIVED = "relayd_received_bytes_total"
SOURCES = ["127.0.2.1"]
SETTINGS: dict[str, Any] = {
    "unlimited_addresses": "127.0.0.1/32",
    "trusted_proxies": PROXIES,
    "forwarded_header": "forwarded",
    "metrics_listen": "127.0.0.1:0",
    "handshake_timeout": 1.0,
}


@pytest.fixture(scope="module")
def attacked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RelayProcess]:
    with running(RelayProcess(tmp_path_factory.mktemp("relay"), **SETTINGS)) as relay:
        yield relay
        assert relay.is_running(), relay.last_words()


@pytest.fixture(scope="module")
def attacked_with_tls(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RelayProcess]:
    folder = tmp_path_factory.mktemp("relay-tls")
    made = write_dev_certificates(folder / "certs", ())
    with running(RelayProcess(folder, **SETTINGS, tls_cert=made.cert, tls_key=made.key)) as relay:
        yield relay
        assert relay.is_running(), relay.last_words()


def scrape(relay: RelayProcess) -> dict[str, float]:
    """Every series without labels."""
    _, _, body = http_get(relay.ready["metrics"])
    return {name: float(value) for name, value in re.findall(r"^(\w+) (\S+)$", body.decode(), re.M)}


async def check(relay: RelayProcess, name: str, attack: Attack) -> None:
    before, complaints = scrape(relay), relay.complaints()
    async with Gang(relay.ws, {name: attack}, 1, 0.02, SOURCES) as gang:
        ledger = gang.ledger

        def read() -> float:
            return scrape(relay)[RECEIVED] - before[RECEIVED]

        def has_reached() -> bool:
            sent = ledger.sent_bytes
            return ledger.deeds[name] > 0 and (ledger.answers[name] > 0 or read() >= sent > 0)

        await until(has_reached, "the attack has reached the relay")
    options: dict[str, Any] = {"ssl": trusting()} if relay.ws.startswith("wss") else {}
    async with open_client(relay.ws, **options) as honest:
        assert (await honest.publish(make(new_identity())))["type"] == "OK"
    left: dict[str, float] = {}

    def nothing_is_left() -> bool:
        left.update(scrape(relay))
        return all(left[series] <= before[series] for series in HELD)

    await until(nothing_is_left, "the relay holds nothing for those who have gone", 20.0)
    assert relay.complaints() == complaints


def trusting() -> ssl.SSLContext:
    context = ssl.create_default_context()
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context


@pytest.mark.parametrize("name", list(ATTACKS))
async def test_an_attack_reaches_the_relay_and_leaves_nothing_there(attacked: RelayProcess, name: str):
    await check(attacked, name, ATTACKS[name])


@pytest.mark.parametrize("name", TLS_ATTACKS)
async def test_an_attack_on_tls_reaches_the_relay_and_leaves_nothing_there(
    attacked_with_tls: RelayProcess, name: str
):
    await check(attacked_with_tls, name, TLS_ATTACKS[name])


async def test_an_attack_that_does_nothing_is_found_out(attacked: RelayProcess):
    async def idle(attacker: object) -> None:
        return

    with pytest.raises(AssertionError, match="has reached"):
        async with Gang(attacked.ws, {"idle": idle}, 1, 0.01) as gang:
            await until(lambda: gang.ledger.deeds["idle"], "it has reached the relay", 0.1)


def service(*seconds: float, lost: int = 0) -> Service:
    return Service(sorted(seconds), sorted(seconds), lost, 0)


def cost(attack: str, alone: Service, beside: Service, recovered: bool = True) -> Cost:
    return Cost(attack, 1, 1, 1, 1, 1.0, 1.0, 1.0, (0, 0, 0), alone, beside, recovered)


def test_the_summary_holds_each_kind_against_the_median_alone():
    def one(attack: str, alone: float, beside: float) -> Cost:
        return cost(attack, service(alone), service(beside))

    found = summary([one("a", 0.004, 0.009), one("a", 0.005, 0.006), one("b", 0.080, 0.010)])
    assert found == Summary(alone=5.0, beside=9.0, worst=10.0, kinds=2, held=2)
    assert summary([one("a", 0.005, 0.006), one("a", 0.005, 0.011)]).held == 0


def test_of_several_goes_the_calmest_counts_and_nothing_lost_is_hidden():
    goes = [
        cost("a", service(0.004), service(0.050)),
        cost("a", service(0.030), service(0.009)),
        cost("a", service(0.008), service(0.020, lost=2), recovered=False),
        cost("a", service(0.008), service(lost=1)),
    ]
    found = calmest(goes)
    assert (found.alone.answers, found.beside.answers) == ([0.004], [0.009])
    assert found.beside.unanswered == 2
    assert not found.recovered
    assert calmest(goes[:2]).recovered
