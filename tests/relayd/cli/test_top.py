"""The output of `relayd top` for two scrapes."""

from __future__ import annotations

import socket
import threading

import pytest
from typer.testing import CliRunner

from relayd.cli import app
from relayd.cli.scraped import Scraped, metrics_url, scrape
from relayd.cli.top import Look, figures, table
from relayd.config import Settings


def scraped(accepted: float, fast: float, slow: float) -> Scraped:
    return Scraped(
        (
            ("relayd_build_info", {"version": "1.2"}, 1.0),
            ("relayd_connections", {}, 3.0),
            ("relayd_publishes_total", {"outcome": "accepted"}, accepted),
            ("relayd_publishes_total", {"outcome": "rate_limited"}, 4.0),
            ("relayd_publish_seconds_bucket", {"le": "0.01"}, fast),
            ("relayd_publish_seconds_bucket", {"le": "0.1"}, fast + slow),
            ("relayd_publish_seconds_bucket", {"le": "+Inf"}, fast + slow),
            ("relayd_log_bytes", {}, 2.0**20),
        )
    )


def test_rates_and_latencies_are_those_between_two_looks():
    before, now = Look(scraped(10, 100, 0), at=5.0), Look(scraped(30, 110, 90), at=9.0)
    found = figures(now, before)
    assert (found["version"], found["sessions"]) == ("1.2", 3)
    assert (found["accepted_per_second"], found["refused_per_second"]) == (5.0, 0.0)
    assert (found["publish_p50_seconds"], found["publish_p99_seconds"]) == (0.1, 0.1)
    assert found["commit_p99_seconds"] is None
    shown = table(found)
    assert "publish p99 seconds" in shown and "100 ms" in shown and "1.0 MiB" in shown


def test_nothing_that_grew_makes_no_latency():
    look = Look(scraped(1, 1, 1), at=0.0)
    assert figures(Look(look.scraped, at=1.0), look)["publish_p50_seconds"] is None


def test_where_the_metrics_are():
    assert metrics_url(Settings()) == "http://127.0.0.1:7447/metrics"
    assert metrics_url(Settings(host="::", metrics_listen="[::1]:9")) == "http://[::1]:9/metrics"
    assert metrics_url(Settings(host="0.0.0.0", port=1)) == "http://127.0.0.1:1/metrics"


def test_the_relay_is_asked_and_no_proxy(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer():
            peer, _ = server.accept()
            with peer:
                peer.recv(4096)
                peer.sendall(
                    b'HTTP/1.1 200 OK\r\nConnection: close\r\n\r\nrelayd_build_info{version="1"} 1\n'
                )

        threading.Thread(target=answer, daemon=True).start()
        found = scrape(f"http://127.0.0.1:{server.getsockname()[1]}/metrics")
    assert found.by("relayd_build_info", "version") == {"1": 1.0}


def test_somebody_who_speaks_no_http_is_no_relay():
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer():
            peer, _ = server.accept()
            with peer:
                peer.recv(4096)
                peer.sendall(b"SSH-2.0-x\r\n")

        thread = threading.Thread(target=answer)
        thread.start()
        with pytest.raises(ValueError, match="BadStatusLine"):
            scrape(f"http://127.0.0.1:{server.getsockname()[1]}/metrics")
        thread.join()
    with pytest.raises(ValueError, match="InvalidURL"):
        scrape("http://127.0.0.1:1/a b")


def test_a_relay_that_is_not_there_is_told_without_the_library_s_words(unused_tcp_port):
    url = f"http://127.0.0.1:{unused_tcp_port}/metrics"
    done = CliRunner().invoke(app, ["top", "--url", url])
    told = f"relayd: {url}: Connection refused; --url names a relay's /metrics\n"
    assert (done.exit_code, done.stderr) == (1, told)
