"""Section 17: rate limits, policy, abuse."""

from __future__ import annotations

import asyncio

from strata_testkit.conformance.context import Context
from strata_testkit.conformance.forge import publish_text, with_member
from strata_testkit.conformance.model import Group, Keyword
from strata_testkit.conformance.peer import expect_error, expect_ok
from strata_testkit.conformance.verdicts import DECISIONS, Skipped, expect

__all__ = ["CHECKS"]

CHECKS = Group(17)

_MOST_PUBLISHES = 2500
_LONGEST_PAUSE = 30


@CHECKS("R-321", source="RFC-0004 §8", level=Keyword.SHOULD)
async def deep_nesting_is_refused(context: Context) -> None:
    """Arrays nested ten thousand deep are an ERROR, and the connection stays open"""
    packet = context.packet(context.identity())
    bomb = with_member(packet.canonical, '"x":' + "[" * 10_000 + "]" * 10_000)
    async with context.connect() as peer:
        await peer.send(publish_text(bomb, "bomb"))
        expect_error(await peer.answer())
        expect_ok(await peer.publish(packet), packet)


@CHECKS("R-325", "R-326", source="RFC-0004 §6; RFC-0007 §10", level=Keyword.SHOULD, extension=DECISIONS)
async def policy_is_public(context: Context) -> None:
    """The manifest summarises the relay's policy"""
    policy = context.subject.manifest.get("policy")
    expect(isinstance(policy, dict) and "protected_accounts" in policy, "a policy in the manifest", policy)


@CHECKS("R-314", "R-315", "R-319", source="RFC-0004 §6.1; decision A-068", floods=True, timeout=120.0)
async def limits_are_honest(context: Context) -> None:
    """A PUBLISH over a limit is `rate_limited` with a whole number of seconds, after which it succeeds"""
    author = context.identity()
    async with context.connect(expects_limit="publish_limit") as peer:
        answer = None
        for number in range(_MOST_PUBLISHES):
            answer = await peer.publish(context.packet(author, n=number))
            if answer.get("type") != "OK":
                break
        else:
            raise Skipped(f"no limit was met in {_MOST_PUBLISHES} packets")
        expect_error(answer, "rate_limited")
        pause = answer.get("retry_after")
        expect(type(pause) is int and pause >= 1, "an integer retry_after of 1 or more", answer)
        if context.subject.announces(DECISIONS):
            members = ("limit", "remaining", "window_seconds")
            expect(all(type(answer.get(name)) is int for name in members), f"{members} (R-315)", answer)
        if int(pause or 0) > _LONGEST_PAUSE:
            return
        await asyncio.sleep(int(pause or 0))
        expect_ok(await peer.publish(context.packet(author)))
