"""I6: what replicas have shown is a prefix of the log, and never less than before."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from tests.kit.model import Version
from tests.sim.errors import Violation
from tests.sim.history import Got, Seen
from tests.sim.invariants.catalogue import checks
from tests.sim.objects import EPOCH_MS
from tests.sim.serial import AHEAD_MS, SerialOrder


@dataclass(frozen=True, slots=True)
class Shown:
    """What one answer has shown of some keys, and of which state it is."""

    whose: str  # those of one process, or of what follows it, come in the order of time
    rank: int  # of the process in that order
    began_us: int
    replied_us: int
    seq: int
    keys: Sequence[bytes]
    found: Mapping[bytes, Got]


@checks(2, "writers", "database")
def check_i2_nothing_comes_back(order: SerialOrder, seen: Iterable[Seen] = ()) -> None:
    """Every version that is shown is the last one of its key up to the number of the answer.

    And once a process has shown that a value has expired, neither it nor one that took over from it
    shows the value again; the latter may if the clock of the former was ahead of the store's, as
    only what is written takes the time along. These are all answers of writers and replicas, before
    and after whatever was compacted, collected and taken over, up to those of the last writer.
    """
    gone: dict[tuple[str, bytes, int], tuple[int, int, bool]] = {}  # when, at which rank, in truth
    for shown in sorted(_shown(order, seen), key=lambda each: each.replied_us):
        for key in shown.keys:
            version = order.timeline.at(key, shown.seq)
            got = shown.found.get(key, Got())
            place = shown.whose, key, version.seq
            if got.value is None:
                if version.value is not None and version.expire_at_ms:
                    is_true = EPOCH_MS + shown.replied_us // 1_000 >= version.expire_at_ms
                    gone.setdefault(place, (shown.replied_us, shown.rank, is_true))
                continue
            if got.seq != version.seq:
                problem = f"I2: {shown} shows {got} of {key!r}, which has become {version}"
                raise Violation(problem, at_us=shown.replied_us)
            since_us, rank, is_true = gone.get(place, (shown.began_us, 0, False))
            is_later = rank < shown.rank and is_true
            if since_us < shown.began_us and (is_later or rank == shown.rank):
                problem = f"I2: {shown} shows {got}, which had expired at {since_us} us"
                raise Violation(problem, at_us=shown.replied_us)


def _shown(order: SerialOrder, seen: Iterable[Seen]) -> Iterator[Shown]:
    for r in order.history.reads:
        found = {r.key: r.got} if r.got.value is not None else {}
        times = (r.epoch, r.invoked_us, r.replied_us, r.header_seq)
        yield Shown("writers", *times, (r.key,), found)
    for s in order.history.scans:
        found = dict(s.entries)
        times = (s.epoch, s.invoked_us, s.replied_us, s.header_seq)
        yield Shown("writers", *times, order.timeline.keys, found)
    for e in seen:
        yield Shown(e.reader, 0, e.began_us, e.replied_us, e.seq, e.keys, e.found)


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
