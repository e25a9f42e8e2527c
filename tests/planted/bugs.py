"""The planted bugs: each is one change of the source, with the tests that must notice it.

Each is a bug that a tired person could write, in code on which a promise rests: nothing acknowledged is lost,
nothing is delivered twice, nobody takes what is not theirs. If a change moves the place of a bug, the bug
moves with it.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["BUGS", "Bug"]


@dataclass(frozen=True, slots=True)
class Bug:
    """`right` occurs once in `file` and is replaced by `wrong`; one of `tests` must then fail."""

    name: str
    file: str
    right: str
    wrong: str
    tests: tuple[str, ...]

    def planted_in(self, source: str) -> str:
        """The source with the bug in it. Raises ValueError unless `right` occurs exactly once."""
        if source.count(self.right) != 1:
            raise ValueError(f"{self.name}: found {source.count(self.right)} times in {self.file}")
        return source.replace(self.right, self.wrong)


def _bugs(file: str, tests: str, *changes: tuple[str, str, str]) -> list[Bug]:
    paths = tuple(f"tests/relayd/{test}" for test in tests.split())
    return [Bug(name, f"relayd/{file}.py", right, wrong, paths) for name, right, wrong in changes]


_STORE = [
    *_bugs(
        "lineage",
        "test_lineage.py",
        ("a border packet is of the next term", "(self._begins, sequence)", "(self._begins, sequence + 1)"),
        ("a place behind the end is held", "mark.sequence <= good_to", "mark.sequence <= good_to + 1"),
        ("a loss in this epoch is none", "mark.epoch >= self.current", "mark.epoch > self.current"),
        ("an unknown log is ours", "self._lost.get(mark.tag)", "self._lost.get(mark.tag, head)"),
        ("two logs part where the longer ends", "good_to = min(theirs", "good_to = max(theirs"),
        ("an older answer wins", "if not self.lineage.continues(lineage):", "if True:"),
        ("what was seen shrinks", "if sequence > self.seen:", "if sequence != self.seen:"),
    ),
    *_bugs(
        "cursor",
        "test_cursor.py",
        (
            "a cursor of the other order passes",
            "if bool(position & _DESCENDING) is ascending:",
            "if False:",
        ),
        (
            "a cursor needs no key",
            "not hmac.compare_digest(mac.digest(), raw[_PLACE_BYTES:]) or raw.hex()",
            "raw.hex()",
        ),
        (
            "the last place of a term is of the next",
            "if sequence <= self._current_after:",
            "if sequence < self._current_after:",
        ),
    ),
    *_bugs(
        "store/turns",
        "store/test_turns.py",
        ("who comes back owes nothing", "max(line.mark, self._begun_at)", "self._begun_at"),
        ("dear work costs what cheap does", "line.mark += cost - turn.charged", "pass"),
        ("a turn is never over", "self._free += 1", "self._free += 0"),
    ),
    *_bugs(
        "store/log",
        "store/test_log.py store/test_identities.py",
        (
            "a copy in the same batch is stored twice",
            "if packet_id in seen and place.outcome is AppendOutcome.STORED:",
            "if False:",
        ),
        ("an equal packet is stored again", "by_key = known.get(key) if", "by_key = None if"),
        ("what states the same as an erased one is a duplicate", "by_key.duplicate_of is None", "False"),
        ("an append in doubt is an empty one", "if row[1] is None:", "if False:"),
    ),
    *_bugs(
        "store/terms",
        "store/test_terms.py",
        ("any cursor proves a loss", " and lineage.lacks(witness, head):", ":"),
        ("a promoted standby has all", 'bool(place["other_timeline"]) and not is_exact', "False"),
        ("a claim of a lost end is not looked at", "if lineage.lacks(claim.mark, head):", "if False:"),
    ),
    *_bugs(
        "store/places",
        "store/test_places.py",
        ("a place beyond the end is buried", "if at > known.head:", "if at < 0:"),
        ("what a day never had is buried", "known.dropped_to and at >= known.dropped_to:", "at < 0:"),
        ("a packet of another place is buried", "if any(there == at and first", "if any(first"),
        ("what carries keys is emptied", "if row.is_spared:", "if row.is_spared and not row.is_full:"),
        ("an erased packet comes in again", "if place.packet_id not in known.ids", "if False"),
        ("an append comes between", "await connection.execute(_LOCK)", "pass"),
    ),
    *_bugs(
        "store/connection",
        "store/test_reader.py",
        ("a connection is used once", "self._idle.append(connection)", "connection.terminate()"),
    ),
]

_FEED = [
    *_bugs(
        "feed/subscription",
        "feed/test_subscription.py",
        ("a walk down loses what came meanwhile", "min(snapshot, self._live_from)", "snapshot"),
        (
            "the last packet before live is skipped",
            "if self.position < head:",
            "if self.position + 1 < head:",
        ),
        ("a page repeats its first row", "min(up_to, self._searched - 1)", "min(up_to, self._searched)"),
        (
            "a limit hides that it cut",
            "min(page_rows, self._remaining) + 1",
            "min(page_rows, self._remaining)",
        ),
        (
            "a page goes one too far",
            "self.position = read.query.up_to\n",
            "self.position = read.query.up_to + 1\n",
        ),
        (
            "a short page counts as the last",
            "if exhausted and read.query.up_to is not None:",
            "if read.query.up_to is not None:",
        ),
        ("a full page is cut", "len(rows) > self._remaining", "len(rows) >= self._remaining"),
        ("a live cursor leads past a gap", "self.live_cursors = not cut and", "self.live_cursors = True and"),
        (
            "a walk back is taken for all there is",
            "self._knows_newer = request.ascending or request.cursor is None",
            "self._knows_newer = True",
        ),
        (
            "a marker names where nothing was",
            "self._searched = reached\n",
            "self._cursor = self._searched = reached\n",
        ),
        ("an empty history has no place", "position = self._snapshot  #", "position = None  #"),
        (
            "memory serves what has expired",
            "self.filter.matches(entry) and not _is_expired(entry, now)",
            "self.filter.matches(entry)",
        ),
    ),
    *_bugs(
        "feed/fanout",
        "feed/test_events.py feed/test_fanout.py feed/test_interest.py feed/test_tail.py"
        " feed/test_subscription.py",
        ("live begins anywhere", " or subscription.position != self.position:", ":"),
        (
            "who falls behind loses a batch",
            "subscription.leave_live(before)",
            "subscription.leave_live(self.position)",
        ),
        ("what has expired goes out", "if expires_at is not None and now > expires_at:", "if False:"),
        (
            "what is declined goes out",
            "if declined is not None and covers(declined, entry.packet):",
            "if False:",
        ),
        ("memory has a hole", "if position < self._recent_after:", "if position < 0:"),
    ),
    *_bugs(
        "feed/interest",
        "feed/test_interest.py",
        ("one leaves and all do", "if not group.members:", "if True:"),
    ),
    *_bugs(
        "feed/filters",
        "feed/test_interest.py feed/test_subscription.py",
        ("since is exclusive", "packet.timestamp >= self.since", "packet.timestamp > self.since"),
    ),
    *_bugs(
        "feed/tail",
        "feed/test_tail.py",
        (
            "a batch with a stranger in its midst goes through",
            "in_one_piece = entries[-1].sequence - entries[0].sequence == len(entries) - 1",
            "in_one_piece = True",
        ),
        (
            "a batch behind a gap goes through",
            "if previous == self._end and in_one_piece and",
            "if in_one_piece and",
        ),
        ("a batch goes out twice", "if entry.sequence > end]", "if entry.sequence]"),
        ("a slow read is the end", "elif not entries and not self._coming:", "elif not self._coming:"),
    ),
]

_ADMISSION = [
    *_bugs(
        "admission/budgets",
        "admission/test_budgets.py",
        (
            "what is under way is free",
            "if len(under_way | received.keys()) > limit:",
            "if len(received) > limit:",
        ),
        (
            "what others store meanwhile is free",
            "self._check(self._limits[budget], before, self._counted(acts, budget, at))",
            "pass",
        ),
        (
            "a budget never comes back",
            "if act is budget and since < received_at",
            "if act is budget and 0 < received_at",
        ),
        ("what was stored is free", "if act is not None and received_at is not None:", "if False:"),
    ),
    *_bugs(
        "admission/gathering",
        "admission/test_gathering.py",
        ("a batch that fails is forgotten", "self._on_lost(job, error)", "pass"),
        ("what waits behind a batch is left", "            if taken:", "            if False:"),
    ),
    *_bugs(
        "admission/checks",
        "admission/test_checks.py admission/test_pipeline.py",
        ("an identity packet has any size", "packet.size_bytes > max_identity_bytes:", "False:"),
        ("a full chain keeps a stolen key", '(2 if packet.content.get("event") == "REVOKE" else 1)', "1"),
        ("policy is not asked", "    policy.check(packet)\n    if origin is None:", "    if origin is None:"),
    ),
    *_bugs(
        "admission/lanes",
        "admission/test_keys_in_flight.py",
        (
            "what changes keys bars nobody",
            "if self._changing and (bar := self._bar_before(request.packet)) is not None:",
            "if False:",
        ),
        (
            "a verdict by old keys counts",
            "if not self._knowledge.is_current(request.packet, request.known):",
            "if False:",
        ),
        (
            "any event of an author lets others pass the one on its way",
            "if request is not None and request.packet.digest == digest:",
            "if request is not None:",
        ),
    ),
    *_bugs(
        "admission/last_checks",
        "admission/test_budgets.py",
        (
            "what is lost is charged for ever",
            "        elif request.is_ended:\n            self.settled(request)\n",
            "",
        ),
    ),
    *_bugs(
        "admission/commits",
        "admission/test_commits.py admission/test_pipeline.py",
        (
            "a duplicate goes out again",
            "            if place.outcome is AppendOutcome.STORED:\n",
            "            if True:\n",
        ),
        ("a fault in the feed loses a batch", "self._tail.ring(entries[-1].sequence)  #", "pass  #"),
    ),
    *_bugs(
        "access/limits",
        "access/test_limits.py",
        (
            "one more than the limit",
            "if full_at - now > self._window + _TOLERANCE:",
            "if full_at - now > self._window + self._interval + _TOLERANCE:",
        ),
        (
            "who is refused pays",
            "            if not budget.has_unit(now):\n                return False\n",
            "            pass\n",
        ),
    ),
]

_SESSION = [
    *_bugs(
        "sessions/session",
        "sessions/test_session.py sessions/test_auth_exchange.py",
        (
            "a replaced filter is paid for still",
            "(replaced.filter.kept_bytes if replaced is not None else 0)",
            "0",
        ),
        ("an ended filter is paid for still", "self._filter_bytes -= subscription.filter.kept_bytes", "pass"),
        (
            "a reload grants what AUTH_OK did not",
            "self._stated & grants.of(self.identity)",
            "grants.of(self.identity)",
        ),
        (
            "a peer that is one no more reads on",
            "if subscription.signed and not self._replicates",
            "if False",
        ),
        (
            "old nonsense counts for ever",
            "while times[0] <= now - self._limits.malformed_window:",
            "while times[0] < 0:",
        ),
        ("memory is short and nobody minds", "if self.is_short_of_memory:", "if False:"),
    ),
    *_bugs(
        "sessions/websocket",
        "sessions/test_websocket.py sessions/test_connection.py",
        (
            "words before a close are lost",
            "(self._close_reason or self._protocol.close_rcvd is None)",
            "True",
        ),
        ("a last word is cut off", "self._transport.write_eof()", "self._transport.close()"),
    ),
    *_bugs(
        "sessions/websocket",
        "sessions/test_auth_exchange.py",
        (
            "frames that stand behind an AUTH are forgotten",
            "        self._go_on_after(0.0)\n        self._update_reading()\n        if not self._held:",
            "        self._update_reading()\n        if not self._held:",
        ),
    ),
    *_bugs(
        "sessions/outbox",
        "sessions/test_outbox.py",
        ("a full reader is given more", "if self.is_paused or self._bytes > self._limit:", "if False:"),
        (
            "each ruling begins the second anew",
            "self._withdrawn += ((self._written, now + _WITHDRAWAL_TIMEOUT),)",
            "self._withdrawn = ((self._written, now + _WITHDRAWAL_TIMEOUT),)",
        ),
    ),
    *_bugs(
        "sessions/backlog",
        "sessions/test_backlog.py",
        ("a good cursor is of a lost log", "mark.sequence <= good_to:", "mark.sequence < good_to:"),
        (
            "a page is read for who takes nothing",
            "            await self._connection.writable()\n            await self._its_turn()",
            "            await self._its_turn()",
        ),
        ("history costs nothing", "self._connection.backfilled(len(frames))", "pass"),
        (
            "history ends where the feed stands",
            "await relay.tail.reach(await relay.store.head(self._connection.payer))",
            "await relay.store.head(self._connection.payer)",
        ),
    ),
    *_bugs(
        "sessions/connection",
        "sessions/test_connection.py sessions/test_auth_exchange.py",
        (
            "what is answered is held",
            "        self._pending_bytes -= self._pending_bytes // self._pending_publishes  #",
            "        #",
        ),
        ("what is unsubscribed goes on", "            fanout.leave(subscription)\n", ""),
        (
            "who is restricted keeps the limits of its session",
            "self._visitor.charged_too)\n        self._end(",
            "()) if False else None\n        self._end(",
        ),
    ),
    *_bugs(
        "sessions/auth_exchange",
        "sessions/test_auth_exchange.py",
        ("late keys judge somebody else", "if proof is self._proof:  #", "if True:  #"),
    ),
    *_bugs(
        "sessions/liveness",
        "sessions/test_liveness.py",
        ("who is not listened to is silent", "if not listening:", "if False:"),
        ("who wakes late cuts all off", "if now - self._asked_at < self.ping_interval:", "if False:"),
    ),
    *_bugs(
        "frames",
        "test_frames.py sessions/test_websocket.py",
        ("one read is one step", "if looked_at >= _MOST_FRAMES:", "if False:"),
    ),
    *_bugs(
        "slices",
        "test_slices.py",
        (
            "a job that comes again holds the loop",
            "for _ in range(len(self._waiting)):",
            "while self._waiting:",
        ),
    ),
]

BUGS: tuple[Bug, ...] = (*_STORE, *_FEED, *_ADMISSION, *_SESSION)
