"""Histories of the simulation in the form of the independent checker of linearizability.

The meaning of operations is implemented a second time here, from the requests alone, so that a
mistake of the serial check and its model (`tests.sim.serial`, `tests.kit.model`) is not repeated.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain, combinations
from random import Random

from shalekv.errors import ConditionFailed
from shalekv.v1 import kv_pb2
from tests.kit.model import keys_in
from tests.linearizability.checker import Undecided, judge, partitions
from tests.linearizability.model import Comparison, Expiry
from tests.linearizability.operations import (
    Action,
    Add,
    Call,
    Delete,
    Exists,
    Get,
    Kind,
    Operation,
    Put,
    Reply,
    Result,
    Seen,
    SeqIs,
    Test,
)
from tests.sim.errors import Violation
from tests.sim.history import (
    UNKNOWN_EPOCH,
    Attempt,
    Got,
    History,
    Outcome,
    ReadOp,
    ScanOp,
    WriteRequest,
    WriteResult,
)
from tests.sim.history import Operation as Asked
from tests.sim.invariants.catalogue import checks
from tests.sim.serial import AHEAD_MS

_UNCERTAIN = (Outcome.UNKNOWN, Outcome.IN_MEMORY)


@dataclass(frozen=True, slots=True)
class Translation:
    """Turns what clients did into calls; `keys` are all that there are."""

    keys: Sequence[bytes]

    def calls(self, history: History) -> list[Call]:
        """Return writes, conditions and transactions with their results, and those with unknown
        outcome.
        """
        return [call for asked in history.operations for call in self._calls_of(asked)]

    def reads(self, history: History) -> list[Call]:
        """Return the gets that must be linearizable.

        Those are the ones that asked for it, and those of a writer before a newer one was called.
        """
        return [
            Call(
                0,
                Operation(Kind.GET, (Get(read.key),)),
                read.invoked_us,
                read.replied_us,
                Reply((_seen(read.got),)),
            )
            for read in history.reads
            if read.is_linearizable or read.replied_us < _newer_asked_us(history, read.epoch)
        ]

    def _calls_of(self, asked: Asked) -> Iterator[Call]:
        """One call for what was done, if anything may have been, and one for each that was not."""
        operation = self.operation(asked.request)
        if not operation.keys or not asked.attempts:
            return
        began_us = asked.attempts[0].invoked_us
        is_level = asked.request.header.read_level != kv_pb2.READ_LEVEL_COMMITTED
        done: Call | None = None
        for attempt in asked.attempts:
            reply = self._reply(operation, attempt)
            if reply is None or attempt.replied_us is None:
                continue
            call = Call(0, operation, began_us, attempt.replied_us, reply)
            if reply.seq is not None:
                done = done or call
            elif is_level:  # it is read-only
                yield call
        if done is None and any(each.outcome in _UNCERTAIN for each in asked.attempts):
            done = Call(0, operation, began_us)
        if done is not None:
            yield done
            yield from self._expiries(asked, operation, began_us)

    def _expiries(self, asked: Asked, operation: Operation, began_us: int) -> Iterator[Call]:
        """Values with a life may be gone from some moment on."""
        ttls_ms = [each for each in asked.ttls_ms if each]
        if not ttls_ms:
            return
        first_us = began_us + 1_000 * max(0, min(ttls_ms) - AHEAD_MS)
        actions = (*operation.then, *(operation.otherwise or ()))
        for put in dict.fromkeys(each for each in actions if isinstance(each, Put)):
            yield Call(0, Expiry.of(put.key, put.value), first_us)

    def _reply(self, operation: Operation, attempt: Attempt) -> Reply | None:
        answer = attempt.answer
        if attempt.outcome is Outcome.REFUSED:
            if attempt.reason == ConditionFailed.reason:
                found_seq = getattr(answer, "found_seq", None)
                return Reply((), succeeded=False, found_seq=found_seq)
            return Reply((), not_a_counter=True)
        if attempt.outcome is not Outcome.ACKNOWLEDGED or not isinstance(answer, WriteResult):
            return None
        succeeded = answer.succeeded
        actions = operation.then if succeeded else operation.otherwise or ()
        is_change = any(not isinstance(each, Get) for each in actions)
        results = _results(actions, answer)
        return Reply(results, attempt.seq if is_change else None, succeeded)

    def operation(self, request: WriteRequest) -> Operation:
        match request:
            case kv_pb2.PutRequest():
                tests = self._conditions(request.precondition, request.key)
                return Operation(Kind.PUT, (Put(request.key, request.value),), tests)
            case kv_pb2.DeleteRequest():
                tests = self._conditions(request.precondition, request.key)
                return Operation(Kind.DELETE, (Delete(request.key),), tests)
            case kv_pb2.DeleteRangeRequest():
                return Operation(Kind.DELETE_RANGE, self._deletes(request.range))
            case kv_pb2.WriteRequest():
                actions = [a for each in request.changes for a in self._actions(each)]
                return Operation(Kind.WRITE, tuple(actions))
            case kv_pb2.TxnRequest():
                return Operation(
                    Kind.TXN,
                    self._branch(request.then),
                    tuple(test for each in request.compares for test in self._tests(each)),
                    self._branch(request.otherwise),
                )

    def _branch(self, operations: Sequence[kv_pb2.TxnOperation]) -> tuple[Action, ...]:
        actions: list[Action] = []
        for each in operations:
            if each.HasField("get"):
                actions.append(Get(each.get.key))
            else:
                actions += self._actions(each.change)
        return tuple(actions)

    def _actions(self, change: kv_pb2.Change) -> tuple[Action, ...]:
        match change.WhichOneof("change"):
            case "put":
                return (Put(change.put.key, change.put.value),)
            case "delete":
                return (Delete(change.delete.key),)
            case "add":
                return (Add(change.add.key, change.add.delta),)
            case _:
                return self._deletes(change.delete_range.range)

    def _deletes(self, keys: kv_pb2.KeyRange) -> tuple[Delete, ...]:
        return tuple(Delete(key) for key in keys_in(self.keys, keys))

    def _tests(self, compare: kv_pb2.Compare) -> Iterator[Test]:
        match compare.WhichOneof("test"):
            case "exists":
                yield Exists(compare.key, compare.exists)
            case "range_empty":
                for key in keys_in(self.keys, compare.range_empty):
                    yield Exists(key, wanted=False)
            case _:
                yield Comparison.of(compare)

    def _conditions(self, condition: kv_pb2.Precondition, key: bytes) -> tuple[Test, ...]:
        match condition.WhichOneof("condition"):
            case "absent":
                return (Exists(key, wanted=False),)
            case "present":
                return (Exists(key),)
            case "seq_equals":
                return (SeqIs(key, condition.seq_equals),)
            case _:
                return ()


def _results(actions: Sequence[Action], answer: WriteResult) -> tuple[Result, ...]:
    """Return a result for each action: a reply has gets and counters, in their order."""
    known = iter([each for each in answer.results if each is not None])
    results: list[Result] = []
    for each in actions:
        found = next(known, None) if isinstance(each, Get | Add) else None
        results.append(_seen(found) if isinstance(found, Got) else found)
    return tuple(results)


def _seen(got: Got) -> Seen | None:
    return None if got.value is None else Seen(got.value, got.seq)


def _newer_asked_us(history: History, epoch: int) -> float:
    """The time of the first request to a writer that had taken over from this one, or may have."""
    attempts = (each for asked in history.operations for each in asked.attempts)
    asked: Iterator[Attempt | ReadOp | ScanOp] = chain(attempts, history.reads, history.scans)
    newer = (each for each in asked if each.epoch > epoch or each.epoch == UNKNOWN_EPOCH)
    return min((each.invoked_us for each in newer), default=math.inf)


def part_of(keys: Collection[bytes], calls: Sequence[Call]) -> Iterator[Call]:
    """Return the part of some calls that concerns these keys, and holds whatever the others are."""
    for call in calls:
        named, reply = call.operation.keys, call.reply
        if all(key in keys for key in named):
            yield call
        elif reply is None:
            yield from _branches(keys, call)
        elif not reply.not_a_counter:
            pairs = zip(call.branch, reply.results, strict=False)
            known = [(action, result) for action, result in pairs if action.key in keys]
            tests = [test for test in call.operation.tests if test.key in keys and reply.succeeded]
            changes = any(not isinstance(action, Get) for action, _ in known)
            if known or tests:
                actions = tuple(action for action, _ in known)
                results = tuple(result for _, result in known)
                yield replace(
                    call,
                    operation=Operation(Kind.TXN, actions, tuple(tests)),
                    reply=Reply(results, reply.seq if changes else None),
                )


def _branches(keys: Collection[bytes], call: Call) -> Iterator[Call]:
    """Return both branches: it is unknown which one was taken, if any."""
    tests = tuple(test for test in call.operation.tests if test.key in keys)
    branches = ((call.operation.then, tests), (call.operation.otherwise or (), ()))
    for actions, needed in branches:
        mine = tuple(action for action in actions if action.key in keys)
        if any(not isinstance(action, Get) for action in mine):
            yield replace(call, operation=Operation(Kind.TXN, mine, needed))


STEPS_MAX = 2_000  # searches that succeed at all mostly do so by then
JUDGED_SHARE = 0.25  # of the seeds

TOO_LONG = "that take too long"


def is_judged(seed: int) -> bool:
    """Return whether the run with this seed is judged by the search, too: it takes its time."""
    return Random(f"{seed}/linearizability").random() < JUDGED_SHARE


@checks(14, "writers", "database")
def check_i14_linearizable(
    history: History, keys: Sequence[bytes], *, steps_max: int = STEPS_MAX
) -> Counter[str]:
    """Some order of the writes, conditions and linearizable reads explains all replies.

    With them the committed reads before anybody else had taken over. Each key is judged alone, with
    its reads; then writes and transactions together, over all keys that they tie, or if that takes
    too long over any two. A search that takes too long is given up and counted.
    """
    translation = Translation(keys)
    calls = translation.calls(history)
    reads = translation.reads(history)
    found: Counter[str] = Counter()
    for key in keys:
        part = [*part_of([key], calls), *part_of([key], reads)]
        found[f"keys {_judge(part, steps_max)}"] += 1
    for part in partitions(calls):
        tied = {key for call in part for key in call.operation.keys}
        if len(tied) == 1:
            continue
        outcome = _judge(part, steps_max)
        found[f"ties {outcome}"] += 1
        if outcome == TOO_LONG:
            for pair in combinations(sorted(tied), 2):
                found[f"pairs {_judge([*part_of(pair, part)], steps_max)}"] += 1
    return found


def _judge(part: Sequence[Call], steps_max: int) -> str:
    try:
        verdict = judge(part, steps_max=steps_max)
    except Undecided:
        return TOO_LONG
    if not verdict.is_linearizable:
        raise Violation(f"I14: {verdict}")
    return "judged"
