"""I1, I14 and I15: replies to the writes of clients, against the order of the log."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from shalekv.v1 import kv_pb2
from tests.kit.model import KeyVersion, decide, keys_of, rests_on_state
from tests.sim.errors import Violation
from tests.sim.history import Attempt, Got, Operation, Outcome, ReadOp, Seen, WriteResult
from tests.sim.invariants.catalogue import checks
from tests.sim.serial import AHEAD_MS, SerialOrder

_ANSWERED = (Outcome.ACKNOWLEDGED, Outcome.REFUSED)


@checks(1, "writers", "database")
def check_i1_acknowledged_writes_are_in_the_log(order: SerialOrder) -> None:
    """Check that acknowledged writes were in the log, in the reported slot, before the reply.

    So must be all commits on which they rest. I9 and I14 show that later openings lose nothing of
    the log: every later read is a state of this log that misses nothing of it. Following the log
    shows that each commit is whole or absent (`SerialOrder`).
    """
    for operation, attempt in order.history.attempts(Outcome.IN_MEMORY):
        if rests_on_state(operation.request):
            raise _violation(f"I1: {operation} is answered from memory: {attempt}", attempt)
    for operation, attempt in order.history.attempts(Outcome.ACKNOWLEDGED):
        placed, replied_us = order.placed.get(operation.number), attempt.replied_us or 0
        if placed is None or attempt.seq != placed.commit.seq:
            if _always_changes(operation, order.timeline.keys):
                raise _violation(f"I1: {operation} got {attempt}, and is {placed}", attempt)
            continue
        commit = placed.commit
        if attempt.wal_id != commit.wal.wal_id or order.landed_us(commit.wal) > replied_us:
            raise _violation(f"I1: {operation} got {attempt}, and is {commit}", attempt)
        if rests_on_state(operation.request) and commit.seq > order.durable_at(replied_us):
            problem = f"I1: {operation} rests on what was not durable: {attempt}, {commit}"
            raise _violation(problem, attempt)


@checks(14, "writers", "database")
def check_i14_commits_are_in_the_order_of_time(order: SerialOrder) -> None:
    """A write that began after another was acknowledged follows it in the log."""
    for number, placed in order.placed.items():
        operation = order.history.operations[number - 1]
        began_us = operation.attempts[0].invoked_us
        floor = order.acknowledged_before(began_us)
        if placed.commit.seq <= floor:
            problem = f"I14: {operation} began after {floor} and is {placed.commit}"
            raise Violation(problem, at_us=began_us)


@checks(14, "writers", "database")
def check_i14_answers(order: SerialOrder) -> None:
    """An answer is that of the commit at its place; one without a commit, that of some state.

    That state was durable and missed nothing that was acknowledged before the question.
    """
    for operation in order.history.operations:
        placed = order.placed.get(operation.number)
        for attempt in operation.attempts:
            if attempt.outcome not in _ANSWERED:
                continue
            if placed is None or attempt.seq != placed.commit.seq:
                _explain(order, operation, attempt)
            elif attempt.answer not in [effect.answer for effect in placed.effects]:
                raise _violation(f"I14: {operation} got {attempt}, and does {placed}", attempt)


@checks(15, "writers", "database")
def check_i15_one_answer(order: SerialOrder) -> None:
    """Check that all replies about one commit were the same.

    Following the log shows that no operation has two commits (`SerialOrder`).
    """
    for number, placed in order.placed.items():
        operation = order.history.operations[number - 1]
        distinct = {
            attempt.answer
            for attempt in operation.attempts
            if attempt.outcome in _ANSWERED and attempt.seq == placed.commit.seq
        }
        if len(distinct) > 1:
            raise Violation(f"I15: {operation} got different replies: {distinct}")


@checks(15, "writers", "database")
def check_i15_counters(order: SerialOrder, counters: Collection[bytes]) -> None:
    """Each counter that is only added to holds what all that was applied has added, once each.

    What it holds is what was read last.
    """
    for counter in counters:
        added = sum(_added(order, number, counter) for number in order.placed)
        shown = [read.got.value for read in order.history.reads if read.key == counter]
        held = int.from_bytes(shown[-1] or bytes(8), "little", signed=True) if shown else added
        if held != added:
            raise Violation(f"I15: {counter!r} holds {held}, and {added} was added to it")


def _violation(problem: str, attempt: Attempt) -> Violation:
    return Violation(problem, at_us=attempt.replied_us)


def _added(order: SerialOrder, number: int, counter: bytes) -> int:
    match order.history.operations[number - 1].request:
        case kv_pb2.WriteRequest() as request:
            changes = list(request.changes)
        case kv_pb2.TxnRequest() as request:
            answer = order.placed[number].effects[0].answer
            is_then = isinstance(answer, WriteResult) and answer.succeeded
            operations = request.then if is_then else request.otherwise
            changes = [operation.change for operation in operations]
        case _:
            return 0
    return sum(change.add.delta for change in changes if change.add.key == counter)


def _always_changes(operation: Operation, keys: tuple[bytes, ...]) -> bool:
    if isinstance(operation.request, kv_pb2.TxnRequest) or rests_on_state(operation.request):
        return False
    return bool(keys_of(operation.request, keys))


def _explain(order: SerialOrder, operation: Operation, attempt: Attempt) -> None:
    request, replied_us = operation.request, attempt.replied_us or 0
    # A repeat that meets an earlier attempt on its way gets the answer to that one.
    began_us = min(
        other.invoked_us
        for other in operation.attempts
        if other.epoch == attempt.epoch
        and other.invoked_us <= attempt.invoked_us
        and (other is attempt or (other.replied_us or replied_us) >= attempt.invoked_us)
    )
    is_confirmed = request.header.read_level != kv_pb2.READ_LEVEL_COMMITTED
    is_local = not (rests_on_state(request) and is_confirmed)
    first = order.acknowledged_before(began_us, epoch=attempt.epoch if is_local else None)
    last = _last_state(order, operation, attempt, first)
    keys = keys_of(request, order.timeline.keys)
    for seq in reversed(order.timeline.states(keys, first, last)):
        for moment in order.moments(
            keys, seq, epoch=attempt.epoch, invoked_us=began_us, replied_us=replied_us
        ):
            effect = decide(request, moment)
            if effect.answer == attempt.answer and not effect.left:
                return
    raise _violation(
        f"I1, I14, I15: no state from {first} to {last} explains {attempt} to {operation}, "
        f"which is {order.placed.get(operation.number)}",
        attempt,
    )


def _last_state(order: SerialOrder, operation: Operation, attempt: Attempt, first: int) -> int:
    """The number of the last state that an attempt may have been decided in."""
    last = order.durable_at(attempt.replied_us or 0)
    if isinstance(attempt.answer, WriteResult):
        last = min(last, attempt.seq)
    if operation.number in order.placed:  # one that is applied already is not decided again
        return min(last, order.placed[operation.number].commit.seq - 1)
    # One that changes nothing in any state does so whether that is durable or not.
    return last if rests_on_state(operation.request) else max(first, last)


@checks(14, "writers", "database")
def check_i14_reads(order: SerialOrder) -> None:
    """A get shows a version that was durable and not replaced by one acknowledged before it."""
    landed_us = {commit.seq: order.landed_us(commit.wal) for commit in order.commits}
    for read in order.history.reads:
        floor = _floor(order, read)
        versions = order.timeline.between(read.key, floor, read.header_seq)
        for version in versions:
            is_durable = landed_us.get(version.seq, 0) <= read.replied_us
            if is_durable and _shows(order, read, version):
                break
        else:
            problem = f"I14: {read} shows none of {versions} after {floor}"
            raise Violation(problem, at_us=read.replied_us)


@checks(14, "writers", "database")
def check_i14_scans(order: SerialOrder) -> None:
    """A scan shows exactly the state at the number in its header, which was durable."""
    keys = order.timeline.keys
    for scan in order.history.scans:
        first = order.acknowledged_before(scan.invoked_us, epoch=scan.epoch)
        if not first <= scan.header_seq <= order.durable_at(scan.replied_us):
            problem = f"I14: {scan} is of another state than that after {first}"
            raise Violation(problem, at_us=scan.replied_us)
        moments = order.moments(
            keys,
            scan.header_seq,
            epoch=scan.epoch,
            invoked_us=scan.invoked_us,
            replied_us=scan.replied_us,
            prefix_seq=scan.header_seq,
        )
        states = [{key: moment.got(key) for key in keys} for moment in moments]
        shown = dict.fromkeys(keys, Got()) | dict(scan.entries)
        if shown not in states:
            problem = f"I14: {scan} differs from the log: {states}"
            raise Violation(problem, at_us=scan.replied_us)


def _shows(order: SerialOrder, read: ReadOp, version: KeyVersion) -> bool:
    moments = order.moments(
        [read.key],
        version.seq,
        epoch=read.epoch,
        invoked_us=read.invoked_us,
        replied_us=read.replied_us,
        prefix_seq=read.header_seq,
    )
    return any(moment.got(read.key) == read.got for moment in moments)


def _floor(order: SerialOrder, read: ReadOp) -> int:
    """Return the least state that a read must show: of this writer; if linearizable, of any writer.

    For this key alone: if objects land out of order, a get sees each as soon as it is durable.
    """
    epoch = None if read.is_linearizable else read.epoch
    return order.acknowledged_before(read.invoked_us, epoch=epoch, key=read.key)


@dataclass(frozen=True, slots=True)
class Shown:
    """State of some keys as one reply showed it, and the number of that state."""

    whose: str  # replies of one process, or of its successors, are in the order of time
    rank: int  # of the process in that order
    began_us: int
    replied_us: int
    seq: int
    keys: Sequence[bytes]
    found: Mapping[bytes, Got]


# The time of a writer may be behind the store's clock by the step of that, by the age of an answer
# that is not asked for again, and by what the writer's own clock loses afterwards.
BEHIND_MS = 2_000 + 200


@checks(2, "writers", "database")
def check_i2_nothing_comes_back(
    order: SerialOrder, seen: Iterable[Seen] = (), *, tick_ms: int = 1_000
) -> None:
    """Check that every version shown is the last one of its key up to the number of the reply.

    And that once a process has shown that a value has expired, neither it nor its successor shows
    the value again; the successor not from `BEHIND_MS` and `tick_ms`, the step of the store's
    clock, after the value has expired by that clock (protocol, "Logical time"). This covers all
    replies of writers and replicas, before and after compactions, collections and takeovers, up to
    those of the last writer.
    """
    gone: dict[tuple[str, bytes, int], dict[int, int]] = {}  # since when, in us, by rank
    for shown in sorted(_shown(order, seen), key=lambda each: each.replied_us):
        for key in shown.keys:
            version = order.timeline.at(key, shown.seq)
            got = shown.found.get(key, Got())
            place = shown.whose, key, version.seq
            if got.value is None:
                if version.value is not None and version.expire_at_ms:
                    gone.setdefault(place, {}).setdefault(shown.rank, shown.replied_us)
                continue
            if got.seq != version.seq:
                problem = f"I2: {shown} shows {got} of {key!r}, which has become {version}"
                raise Violation(problem, at_us=shown.replied_us)
            began_ms = order.history.epoch_ms + shown.began_us // 1_000
            is_over = began_ms >= version.expire_at_ms + BEHIND_MS + tick_ms
            for rank, since_us in gone.get(place, {}).items():
                judges = rank == shown.rank or (rank < shown.rank and is_over)
                if judges and since_us < shown.began_us:
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


SKEW_MS = 1_000  # between the store's clock and a reader's estimate of it


@checks(6, "database")
def check_i6_replicas_show_prefixes(order: SerialOrder, all_seen: Iterable[Seen]) -> None:
    """Check that every reply is a state of the log: all up to its number, and nothing after it.

    That state was durable, is not before that of an earlier reply of the same process, satisfies
    `min_seq`, and is not older than the reply states.
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


def _is_shown(shown: Got, version: KeyVersion) -> bool:
    return (shown.value, shown.seq, shown.expire_at_ms) == (
        version.value,
        version.seq,
        version.expire_at_ms,
    )
