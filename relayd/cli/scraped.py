"""The state of a running relay, read from its `/metrics`, for `relayd top` and `relayd doctor`."""

from __future__ import annotations

import http.client
import re
import ssl
import urllib.error
import urllib.request
from dataclasses import dataclass
from typing import Final

from relayd.addresses import host_from_here
from relayd.config import Settings

__all__ = ["Scraped", "metrics_url", "scrape"]

_TIMEOUT: Final = 3.0
_LONGEST: Final = 2**23
_SAMPLE: Final = re.compile(r"^(\w+)(?:{(.*)})? (\S+)$", re.MULTILINE)
_LABEL: Final = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')


@dataclass(frozen=True, slots=True)
class Scraped:
    """All samples of one scrape."""

    samples: tuple[tuple[str, dict[str, str], float], ...]

    def total(self, name: str, **labels: str) -> float:
        """The sum of the samples of this name with these labels; 0 if there is none."""
        return sum(
            value for each, having, value in self.samples if each == name and labels.items() <= having.items()
        )

    def by(self, name: str, label: str) -> dict[str, float]:
        """The samples of this name, by one of their labels."""
        return {
            having[label]: value for each, having, value in self.samples if each == name and label in having
        }

    def quantile(self, name: str, part: float, before: Scraped | None = None) -> float | None:
        """A quantile of what a histogram has observed since `before`; None if it has observed nothing."""
        counts = self.by(f"{name}_bucket", "le")
        earlier = {} if before is None else before.by(f"{name}_bucket", "le")
        grown = sorted((float(le), count - earlier.get(le, 0.0)) for le, count in counts.items())
        if not grown or grown[-1][1] <= 0:
            return None
        return next(bound for bound, count in grown if count >= part * grown[-1][1])


def metrics_url(settings: Settings) -> str:
    """The URL of the metrics, on this machine, of a relay with these settings."""
    if settings.metrics_listen:
        host, _, port = settings.metrics_listen.rpartition(":")
        return f"http://{host_from_here(host.strip('[]'))}:{port}/metrics"
    return f"http{'s' if settings.tls_cert else ''}://{host_from_here(settings.host)}:{settings.port}/metrics"


def scrape(url: str) -> Scraped:
    """Read `/metrics`. Raises OSError if nothing answers, and ValueError if the answer is not a relay's."""
    # A relay's certificate names its public address, not this one, and nobody is in between. Proxies from the
    # environment are not used either: for a proxy, the host names of this machine would mean itself.
    opener = urllib.request.build_opener(
        urllib.request.ProxyHandler({}),
        urllib.request.HTTPSHandler(context=ssl._create_unverified_context()),
    )
    try:
        with opener.open(url, timeout=_TIMEOUT) as answer:
            said = answer.read(_LONGEST).decode(errors="replace")
    except urllib.error.URLError as error:
        if isinstance(error.reason, OSError):
            raise error.reason from None
        raise
    except http.client.HTTPException as error:  # an invalid URL, or a server that does not speak HTTP
        raise ValueError(f"{type(error).__name__}: {error}") from None
    samples = tuple(
        (name, dict(_LABEL.findall(labels)), float(value)) for name, labels, value in _SAMPLE.findall(said)
    )
    if not any(name == "relayd_build_info" for name, _, _ in samples):
        raise ValueError(f"{url} is not a relay's")
    return Scraped(samples)
