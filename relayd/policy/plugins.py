"""Policies of the operator's own: callables from the entry point group `relayd.policies`.

A plug-in is asked last, about packets that passed every other check. It refuses a packet (`Refusal`) or says
nothing. It may ask a database or a service, so it can be slow, broken or gone. Then the packets that it was
asked about wait for a bounded time, and no other packet waits: each plug-in has a deadline for every packet,
a bound on the packets it is asked about at once, and a configured answer if it gives none (`policy_failure`).
"""

from __future__ import annotations

import asyncio
import difflib
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from types import MappingProxyType
from typing import Final, Literal, Self

from strata.protocol.errors import ErrorCode, InvalidPacket
from strata.protocol.packets import Packet

from relayd.config import ConfigurationError, Settings
from relayd.logs import get_logger
from relayd.policy.calls import Caller, Plugin, caller_of

__all__ = ["ENTRY_POINT_GROUP", "VERDICTS", "Plugins", "PolicyRequest", "Refusal", "load_plugins"]

ENTRY_POINT_GROUP: Final = "relayd.policies"

VERDICTS: Final = ("passed", "refused", "timeout", "raised", "invalid")
"""The outcomes of asking a plug-in; the last three are failures."""

_CODES: Final = (ErrorCode.POLICY_REJECTED, ErrorCode.BLOCKED_AUTHOR, ErrorCode.RATE_LIMITED)
_MAX_TEXT: Final = 200
_MAX_RETRY_SECONDS: Final = 86_400
_LOG_INTERVAL: Final = 10.0

_log = get_logger("relayd.policy")


@dataclass(frozen=True, slots=True)
class PolicyRequest:
    """The question to a plug-in. The packet is verified; only read it, because it is stored after this."""

    packet: Packet
    identity: str | None
    """The DID that the session has proved, None if it is anonymous; seldom the author (R-191)."""
    received_at: int
    """Unix seconds."""


@dataclass(frozen=True, slots=True)
class Refusal:
    """A plug-in's refusal. `reason` and `detail` are sent to the publisher as they are.

    Raises `ValueError` for a code that no policy may use (A-061), for text that is empty, too long or not
    printable, and for a `retry_after` that is out of range or does not go with the code: `rate_limited`
    requires one, and no other code has one.
    """

    code: ErrorCode
    reason: str
    detail: str | None = None
    retry_after: int | None = None
    """Seconds until the packet may be published again; required by `rate_limited`."""

    def __post_init__(self) -> None:
        if self.code not in _CODES:
            raise ValueError(f"a policy refuses with one of {', '.join(_CODES)}")
        for text in (self.reason, "" if self.detail is None else self.detail):
            if len(text) > _MAX_TEXT or not text.isprintable():
                raise ValueError(f"reason and detail are printable text of up to {_MAX_TEXT} characters")
        if not self.reason or self.detail == "":
            raise ValueError("a refusal says why")
        if (self.retry_after is not None) is not (self.code is ErrorCode.RATE_LIMITED):
            raise ValueError("retry_after goes with rate_limited, and rate_limited with it")
        if self.retry_after is not None and not 1 <= self.retry_after <= _MAX_RETRY_SECONDS:
            raise ValueError(f"retry_after is a number of seconds up to {_MAX_RETRY_SECONDS}")


class Plugins:
    """The configured plug-ins, in their order; false if there are none. Use it on the event loop.

    `on_verdict(name, verdict)` is called with the outcome of every question, for the metrics; `verdict` is
    one of `VERDICTS`. `timeout` is in seconds.
    """

    def __init__(
        self,
        plugins: Mapping[str, Plugin] = MappingProxyType({}),
        *,
        timeout: float = 1.0,
        failure: Literal["refuse", "accept"] = "refuse",
        clock: Callable[[], int] = lambda: int(time.time()),
        on_verdict: Callable[[str, str], None] = lambda name, verdict: None,
    ) -> None:
        self._callers = {name: caller_of(name, plugin) for name, plugin in plugins.items()}
        self._timeout = timeout
        self._accepts_failures = failure == "accept"
        self._clock = clock
        self._on_verdict = on_verdict
        self._complaints = {name: _Complaints(name) for name in plugins}

    @classmethod
    def from_settings(
        cls,
        settings: Settings,
        *,
        clock: Callable[[], int] = lambda: int(time.time()),
        on_verdict: Callable[[str, str], None] = lambda name, verdict: None,
    ) -> Self:
        """Load and start the plug-ins that the settings name. Raises `ConfigurationError`."""
        return cls(
            load_plugins(settings.policy_plugins),
            timeout=settings.policy_timeout,
            failure=settings.policy_failure,
            clock=clock,
            on_verdict=on_verdict,
        )

    def __bool__(self) -> bool:
        return bool(self._callers)

    async def check(self, packet: Packet, identity: str | None) -> None:
        """Ask every plug-in in turn; raise `InvalidPacket` for the first that refuses the packet.

        Raises the same (`internal_error`, which may be retried) if a plug-in fails and failures refuse.
        Cancelling it cancels the plug-in that is being asked.
        """
        request = PolicyRequest(packet, identity, self._clock())
        for name, caller in self._callers.items():
            await self._ask(name, caller, request)

    async def _ask(self, name: str, caller: Caller, request: PolicyRequest) -> None:
        try:
            answer = await caller.call(request, self._timeout)
        except TimeoutError:
            return self._failed(name, "timeout", None)
        except Exception as error:
            return self._failed(name, "raised", error)
        if answer is None:
            self._on_verdict(name, "passed")
            return None
        if not isinstance(answer, Refusal):
            return self._failed(name, "invalid", None)
        self._on_verdict(name, "refused")
        raise InvalidPacket(answer.code, answer.reason, detail=answer.detail, retry_after=answer.retry_after)

    def _failed(self, name: str, verdict: str, error: Exception | None) -> None:
        self._on_verdict(name, verdict)
        self._complaints[name].add(verdict, error, asyncio.get_running_loop().time())
        if not self._accepts_failures:
            raise InvalidPacket(
                ErrorCode.INTERNAL_ERROR,
                "this relay could not decide on the packet; publish it again",
                detail="policy_unavailable",
            )

    def close(self) -> None:
        """Release the plug-ins' threads, without waiting for one that hangs. Idempotent."""
        for caller in self._callers.values():
            caller.close()


class _Complaints:
    """The log of one plug-in's failures: at most one line in ten seconds, whatever the traffic."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._unsaid = 0
        self._next_at = 0.0

    def add(self, verdict: str, error: Exception | None, now: float) -> None:
        self._unsaid += 1
        if now < self._next_at:
            return
        # An exception's text may quote the packet, which no log may hold; its place says enough.
        _log.warning(
            "policy_plugin_failed",
            plugin=self._name,
            failure=verdict,
            error=None if error is None else type(error).__name__,
            at=None if error is None else _place_of(error),
            failures=self._unsaid,
        )
        self._unsaid, self._next_at = 0, now + _LOG_INTERVAL


def _place_of(error: Exception) -> str | None:
    trace = error.__traceback__
    if trace is None:
        return None
    while trace.tb_next is not None:
        trace = trace.tb_next
    return f"{trace.tb_frame.f_code.co_qualname}:{trace.tb_lineno}"


def load_plugins(names: Sequence[str]) -> dict[str, Plugin]:
    """Import the plug-ins with these names, in this order.

    Raises `ConfigurationError` for a name that no installed distribution offers, or that several offer, for a
    name that is given twice, and for an entry point that cannot be imported or called.
    """
    if not names:
        return {}
    offered = list(entry_points(group=ENTRY_POINT_GROUP))
    problems: list[str] = []
    plugins: dict[str, Plugin] = {}
    for name in names:
        try:
            if name in plugins:
                raise _Unusable("named twice")
            plugins[name] = _load(name, offered)
        except _Unusable as error:
            problems.append(f"policy_plugins: {name}: {error}")
    if problems:
        raise ConfigurationError(problems)
    return plugins


class _Unusable(Exception):
    """Why an entry point cannot be a plug-in."""


def _load(name: str, offered: Iterable[EntryPoint]) -> Plugin:
    found = [point for point in offered if point.name == name]
    if not found:
        nearest = difflib.get_close_matches(name, [point.name for point in offered], n=1, cutoff=0.0)
        hint = f"the nearest is {nearest[0]}" if nearest else f"nothing offers {ENTRY_POINT_GROUP}"
        raise _Unusable(f"not installed; {hint}")
    if len({point.value for point in found}) > 1:
        raise _Unusable("offered by several distributions")
    try:
        plugin = found[0].load()
    except Exception as error:
        raise _Unusable(f"cannot be loaded: {type(error).__name__}: {error}") from error
    if not callable(plugin):
        raise _Unusable("not callable")
    loaded: Plugin = plugin
    return loaded
