"""The serial check: one order explains all replies that clients got (I1, I14, I15).

The order is that of the sequence numbers in the log. Each commit there must be the effect of one
operation in the state that the commits before it have left, and no operation has two; or it is a
sweep of expired values. Each reply must be that of the model: for a commit, at its place; for a
refusal, a read, or a transaction that changes nothing, in some state that was durable when the
reply came, and that has all that was acknowledged before the request.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, product

from tests.kit.model import Effect, Moment, Timeline, decide, keys_of
from tests.sim.errors import Violation
from tests.sim.history import UNKNOWN_EPOCH, History, Operation, Outcome
from tests.sim.stored import Stored, StoredCommit, WalObject

AHEAD_MS = 5_000  # logical time is never further ahead: local clocks are that bad at most


@dataclass(frozen=True, slots=True)
class Placed:
    """An operation whose commit is in the log, and what it may have done there.

    The effects differ in what has expired when it was decided, and leave the same.
    """

    commit: StoredCommit
    effects: Sequence[Effect]


class SerialOrder:
    """A log, followed from its beginning to its end."""

    def __init__(self, history: History, stored: Stored, keys: Sequence[bytes]) -> None:
        """`keys` are all that operations may touch. Raises `Violation`."""
        self.history = history
        self.timeline = Timeline(keys)
        self.placed: dict[int, Placed] = {}  # by number of the operation
        self.commits = stored.commits()
        self._seqs = {commit.seq for commit in self.commits}
        self._data = [(wal, _last_seq(wal)) for wal in stored.durable if wal.all_entries]
        self._by_reported_seq: dict[int, list[Operation]] = {}
        for outcome in (Outcome.ACKNOWLEDGED, Outcome.IN_MEMORY):
            for operation, attempt in history.attempts(outcome):
                self._by_reported_seq.setdefault(attempt.seq, []).append(operation)
        self._by_key = {each.key: each for each in history.operations if each.key}
        for commit in self.commits:
            self._follow(commit)
        self._acknowledged = _Acknowledged(self)
        self._last_asked_us = self._asked_us()
        left_out = stored.left_out  # only fences may land there: see I4
        log = [
            wal
            for wal in stored.durable
            if wal.all_entries or not any(wal.wal_id in ids for ids in left_out)
        ]
        self._prefix_us = list(accumulate(map(self.landed_us, log), max))
        self._prefix_seq = list(accumulate(map(_last_seq, log), max))

    def acknowledged_before(
        self, us: int, *, epoch: int | None = None, key: bytes | None = None
    ) -> int:
        """The greatest number of a commit that was acknowledged before.

        With `epoch` by the writer of that epoch; with `key` of those that changed it.
        """
        return self._acknowledged.before(us, epoch, key)

    def landed_us(self, wal: WalObject) -> int:
        """The time when the store had an object; if unknown, a time before which it had not."""
        return self._last_asked_us.get(wal.wal_id, 0) if wal.landed_us is None else wal.landed_us

    def durable_at(self, us: int) -> int:
        """The last number of the prefix that was, or may have been, durable then."""
        count = bisect_right(self._prefix_us, us)
        return self._prefix_seq[count - 1] if count else 0

    def moments(
        self,
        keys: Sequence[bytes],
        seq: int,
        *,
        epoch: int,
        invoked_us: int,
        replied_us: int,
        prefix_seq: int | None = None,
    ) -> Iterator[Moment]:
        """The state `seq` at all times that a writer of `epoch` may have taken for now.

        Those between which no value of `keys` expires count as one. A read of the prefix up to
        `prefix_seq` may be as of a time before a transaction that is not in it.
        """
        first_ms = self._time_floor_ms(invoked_us, epoch, prefix_seq)
        last_ms = self.history.epoch_ms + replied_us // 1000 + AHEAD_MS
        yield Moment(self.timeline, seq, first_ms)
        for now_ms in self.timeline.expiries(keys, seq, first_ms, last_ms):
            yield Moment(self.timeline, seq, now_ms)

    def _time_floor_ms(self, us: int, epoch: int, prefix_seq: int | None = None) -> int:
        """The logical time below which a writer of `epoch` could not be then.

        With `prefix_seq`, by the objects without commits above it.
        """
        known = (
            each.logical_time_ms
            for each, last_seq in self._data
            if each.landed_us is not None and each.landed_us <= us and each.epoch <= epoch
            if prefix_seq is None or last_seq <= prefix_seq
        )
        return max(known, default=0)

    def _asked_us(self) -> dict[int, int]:
        """The time when the last write in each object of unknown landing time was requested."""
        asked: dict[int, int] = {}
        for number, placed in self.placed.items():
            operation, wal = self.history.operations[number - 1], placed.commit.wal
            is_sure = placed.commit.seq in operation.seqs  # and not taken for another delete
            if wal.landed_us is None and is_sure:
                first_us = operation.attempts[0].invoked_us
                asked[wal.wal_id] = max(asked.get(wal.wal_id, 0), first_us)
        return asked

    def _follow(self, commit: StoredCommit) -> None:
        """Find out which operation this is, and whether it did what it should."""
        left = commit.after(self.timeline.keys)
        if commit.is_sweep:
            self._check_sweep(commit)
            self.timeline.append(commit.seq, left)
            return
        for operation in self._candidates(commit):
            effects = [each for each in self._effects(operation, commit) if each.left == left]
            if effects:
                break
        else:
            before = {key: self.timeline.at(key, commit.seq - 1) for key in left}
            asked = [
                f"{operation}, which does {self._effects(operation, commit)}"
                for operation in self._candidates(commit)
            ]
            raise Violation(f"I14, I15: nothing explains {commit} after {before}; not {asked[:3]}")
        if operation.number in self.placed:
            first = self.placed[operation.number].commit
            raise Violation(f"I15: {operation} is applied more than once: {first}, {commit}")
        if not operation.may_be_applied:
            raise Violation(f"I1: {operation} was reported as not applied, and is {commit}")
        self.placed[operation.number] = Placed(commit, effects)
        self.timeline.append(commit.seq, left)

    def _check_sweep(self, commit: StoredCommit) -> None:
        """Check that it removes expired values, with the right time, once for each."""
        for key, entry in commit.points.items():
            before = self.timeline.at(key, commit.seq - 1)
            is_true = before.value is not None and before.expire_at_ms == entry.expire_at_ms
            if not is_true or entry.expire_at_ms > commit.wal.logical_time_ms:
                raise Violation(f"I2: {commit} sweeps {key!r} after {before}")

    def _candidates(self, commit: StoredCommit) -> Iterator[Operation]:
        """Yield the operations that this may be, by values, idempotency key, or keys that it
        touches.
        """
        values = (entry.value for entry in commit.points.values())
        numbers = [int(value[1:]) for value in values if value[:1] == b"v" and value[1:].isdigit()]
        if numbers:
            yield self.history.operations[numbers[0] - 1]
            return
        if commit.idempotency_key:
            keyed = self._by_key.get(commit.idempotency_key)
            if keyed is not None:
                yield keyed
            return
        yield from self._by_reported_seq.get(commit.seq, [])
        touched = set(commit.after(self.timeline.keys))
        # An operation whose reply has the number of another commit is that one, unless it is
        # read-only; one that was reported as not applied is tried last.
        operations = sorted(
            (each for each in self.history.operations if not each.key),
            key=lambda each: (
                not each.may_be_applied,
                not self._seqs.isdisjoint(each.seqs),
            ),
        )
        for each in operations:
            is_free = each.number not in self.placed
            if is_free and touched <= set(keys_of(each.request, self.timeline.keys)):
                yield each

    def _effects(self, operation: Operation, commit: StoredCommit) -> list[Effect]:
        wal = commit.wal
        may_be = (wal.epoch, UNKNOWN_EPOCH)
        asked_us = [a.invoked_us for a in operation.attempts if a.epoch in may_be]
        if not asked_us or (wal.landed_us is not None and min(asked_us) > wal.landed_us):
            return []
        first_ms = self._time_floor_ms(min(asked_us), commit.wal.epoch)
        last_ms = commit.wal.logical_time_ms
        keys = keys_of(operation.request, self.timeline.keys)
        times = [first_ms, *self.timeline.expiries(keys, commit.seq - 1, first_ms, last_ms)]
        born_ms = {
            entry.expire_at_ms - ttl_ms
            for entry in commit.points.values()
            for ttl_ms in operation.ttls_ms
        }
        times += [each for each in sorted(born_ms) if first_ms < each <= last_ms]
        moments = [Moment(self.timeline, commit.seq - 1, now_ms) for now_ms in times]
        return [decide(operation.request, moment) for moment in moments]


def _last_seq(wal: WalObject) -> int:
    return max((entry.seq for entry in wal.all_entries), default=0)


class _Acknowledged:
    """The greatest number that was acknowledged at each time, by epoch and by key."""

    def __init__(self, order: SerialOrder) -> None:
        reported: dict[tuple[int | None, bytes | None], list[tuple[int, int]]] = {}
        for operation, attempt in order.history.attempts(Outcome.ACKNOWLEDGED):
            placed = order.placed.get(operation.number)
            if placed is None or placed.commit.seq != attempt.seq or attempt.replied_us is None:
                continue
            keys = placed.commit.after(order.timeline.keys)
            epochs = {None, attempt.epoch} - {UNKNOWN_EPOCH}
            for place in product(epochs, (None, *keys)):
                reported.setdefault(place, []).append((attempt.replied_us, attempt.seq))
        self._times_us = {place: sorted(us for us, _ in each) for place, each in reported.items()}
        self._seqs = {
            place: list(accumulate((seq for _, seq in sorted(each)), max))
            for place, each in reported.items()
        }

    def before(self, us: int, epoch: int | None, key: bytes | None) -> int:
        place = (epoch, key)
        count = bisect_left(self._times_us.get(place, []), us)
        return self._seqs[place][count - 1] if count else 0
