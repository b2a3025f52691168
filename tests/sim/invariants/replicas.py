"""I6: what replicas have shown is a prefix of the log, and never less than before."""

from __future__ import annotations

from collections.abc import Iterable

from tests.kit.model import Version
from tests.sim.errors import Violation
from tests.sim.history import Got, Seen
from tests.sim.invariants.catalogue import checks
from tests.sim.serial import AHEAD_MS, SerialOrder

SKEW_MS = 1_000  # between the clock of the store as a reader knows it, and as it is


@checks(6, "database")
def check_i6_replicas_show_prefixes(order: SerialOrder, all_seen: Iterable[Seen]) -> None:
    """Every reply is a state of the log: all up to its number, and nothing after it.

    That state was durable, is none before that of an earlier reply of the same process, has what
    `min_seq` asked for, and is not older than the reply says.
    """
    last: dict[str, Seen] = {}
    for seen in all_seen:
        _check_state(order, seen)
        before = last.get(seen.reader)
        if before is not None and seen.began_us >= before.replied_us and seen.seq < before.seq:
            raise _found(f"{seen.reader} went back: {seen} after {before}", seen)
        last[seen.reader] = seen
        if seen.seq < seen.min_seq:
            raise _found(f"{seen} does not show its min_seq", seen)
        if seen.seq > order.durable_at(seen.replied_us):
            raise _found(f"{seen} shows what is not durable", seen)
        fresh_us = seen.began_us - 1_000 * (seen.staleness_ms + SKEW_MS)
        if seen.seq < order.acknowledged_before(fresh_us):
            raise _found(f"{seen} is older than it says", seen)


def _check_state(order: SerialOrder, seen: Seen) -> None:
    latest_ms = order.history.epoch_ms + seen.replied_us // 1_000 + AHEAD_MS
    for key in seen.keys:
        version = order.timeline.at(key, seen.seq)
        shown = seen.found.get(key)
        if shown is None:
            may_be_gone = version.value is None or 0 < version.expire_at_ms <= latest_ms
            if not may_be_gone:
                raise _found(f"{seen} does not show {key!r}: {version}", seen)
        elif not _is_shown(shown, version):
            raise _found(f"{seen} shows {shown} for {key!r}, the log {version}", seen)


def _found(problem: str, seen: Seen) -> Violation:
    return Violation(f"I6: {problem}", at_us=seen.replied_us)


def _is_shown(shown: Got, version: Version) -> bool:
    return (shown.value, shown.seq, shown.expire_at_ms) == (
        version.value,
        version.seq,
        version.expire_at_ms,
    )
