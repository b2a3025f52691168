"""The model: what requests do, in their own words (protos/shalekv/v1/kv.proto), to a dictionary.

It shares no code with the writer but the messages. A state is named by a sequence number, all
commits up to which it contains, and by a logical time, which decides what has expired.
"""

from __future__ import annotations

import operator
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

from shalekv.errors import ConditionFailed, CounterOverflow, NotACounter
from shalekv.v1 import kv_pb2
from tests.sim.history import Got, OperationResult, Refusal, WriteRequest, WriteResult

Left: TypeAlias = dict[bytes, tuple[bytes | None, int]]  # value (None: deleted) and expiry by key

_OPERATORS: Mapping[int, Callable[[Any, Any], bool]] = {
    kv_pb2.Compare.OPERATOR_UNSPECIFIED: operator.eq,
    kv_pb2.Compare.OPERATOR_EQUAL: operator.eq,
    kv_pb2.Compare.OPERATOR_NOT_EQUAL: operator.ne,
    kv_pb2.Compare.OPERATOR_LESS: operator.lt,
    kv_pb2.Compare.OPERATOR_GREATER: operator.gt,
}


class KeyVersion(NamedTuple):
    """State of a key that a commit left."""

    seq: int
    value: bytes | None
    expire_at_ms: int = 0


NOTHING = KeyVersion(0, None)


class Timeline:
    """All states that a database went through."""

    def __init__(self, keys: Sequence[bytes]) -> None:
        """Empty; `keys` are all that there will ever be."""
        self.keys = tuple(keys)
        self._versions: dict[bytes, list[KeyVersion]] = {key: [NOTHING] for key in keys}

    @classmethod
    def of(cls, keys: Sequence[bytes], commits: Mapping[int, Left]) -> Timeline:
        timeline = cls(keys)
        for seq in sorted(commits):
            timeline.append(seq, commits[seq])
        return timeline

    def append(self, seq: int, left: Left) -> None:
        """The commit `seq`, which is above all before it, leaves this."""
        for key, (value, expire_at_ms) in left.items():
            self._versions[key].append(KeyVersion(seq, value, expire_at_ms))

    def versions(self, key: bytes) -> Sequence[KeyVersion]:
        return self._versions[key]

    def at(self, key: bytes, seq: int) -> KeyVersion:
        """The newest version of a key that is not newer than `seq`."""
        versions = self._versions[key]
        return versions[bisect_right(versions, seq, key=operator.itemgetter(0)) - 1]

    def between(self, key: bytes, first: int, last: int) -> Sequence[KeyVersion]:
        """The newest version in the state `first`, and all later ones up to the state `last`."""
        versions, number = self._versions[key], operator.itemgetter(0)
        start = bisect_right(versions, first, key=number) - 1
        return versions[start : bisect_right(versions, last, key=number)]

    def states(self, keys: Sequence[bytes], first: int, last: int) -> list[int]:
        """`first`, and all later states up to `last` in which one of `keys` differs."""
        if last < first:
            return []
        found = {v.seq for key in keys for v in self._versions[key] if first < v.seq <= last}
        return [first, *sorted(found)]

    def expiries(self, keys: Sequence[bytes], seq: int, after_ms: int, last_ms: int) -> list[int]:
        """The times at which values of `keys` in the state `seq` expire, within a span of time."""
        found = {self.at(key, seq).expire_at_ms for key in keys}
        return sorted(each for each in found if after_ms < each <= last_ms)


@dataclass(frozen=True, slots=True)
class Moment:
    """One state at one logical time."""

    timeline: Timeline
    seq: int
    now_ms: int

    def got(self, key: bytes) -> Got:
        version = self.timeline.at(key, self.seq)
        if version.value is None or 0 < version.expire_at_ms <= self.now_ms:
            return Got()
        return Got(version.value, version.seq, version.expire_at_ms)

    def visible(self) -> dict[bytes, Got]:
        found = {key: self.got(key) for key in self.timeline.keys}
        return {key: got for key, got in found.items() if got.value is not None}

    def keys_in(self, keys: kv_pb2.KeyRange) -> list[bytes]:
        """All keys of a range, whether they have a value or not."""
        return keys_in(self.timeline.keys, keys)


def keys_in(universe: Sequence[bytes], keys: kv_pb2.KeyRange) -> list[bytes]:
    if keys.prefix:
        return [key for key in universe if key.startswith(keys.prefix)]
    return [key for key in universe if keys.start <= key and (not keys.end or key < keys.end)]


@dataclass(frozen=True, slots=True)
class Effect:
    """Effect of a request in one state: its answer, and the new versions of the changed keys.

    It `writes` if it takes a place in the log. Refusals, reads, deletes of empty ranges and touches
    of what is not there do not.
    """

    answer: WriteResult | Refusal
    left: Left = field(default_factory=dict)
    writes: bool = False


class _Refused(Exception):
    def __init__(self, refusal: Refusal) -> None:
        super().__init__(refusal)
        self.refusal = refusal


def rests_on_state(request: WriteRequest) -> bool:
    match request:
        case kv_pb2.PutRequest():
            return request.HasField("precondition")
        case kv_pb2.DeleteRequest():
            return request.count_deleted or request.HasField("precondition")
        case kv_pb2.WriteRequest():
            return any(map(_reads, request.changes))
        case kv_pb2.DeleteRangeRequest():
            return request.count_deleted
        case kv_pb2.TxnRequest():
            reads = any(each.HasField("get") or _reads(each.change) for each in request.then)
            return reads or bool(request.compares)


def _reads(change: kv_pb2.Change) -> bool:
    return change.HasField("add") or change.HasField("touch")


def _is_empty(keys: kv_pb2.KeyRange) -> bool:
    return bool(keys.end) and keys.start >= keys.end


def keys_of(request: WriteRequest, universe: Sequence[bytes]) -> list[bytes]:
    """The keys that it names, one by one or by a range: no others decide what it does."""
    named: list[bytes] = []
    changes: list[kv_pb2.Change] = []
    match request:
        case kv_pb2.PutRequest() | kv_pb2.DeleteRequest():
            named = [request.key]
        case kv_pb2.DeleteRangeRequest():
            named = keys_in(universe, request.range)
        case kv_pb2.WriteRequest():
            changes = list(request.changes)
        case kv_pb2.TxnRequest():
            operations = [*request.then, *request.otherwise]
            changes = [each.change for each in operations if each.HasField("change")]
            named = [each.get.key for each in operations if each.HasField("get")]
            for compare in request.compares:
                is_range = compare.HasField("range_empty")
                named += keys_in(universe, compare.range_empty) if is_range else [compare.key]
    for change in changes:
        if change.HasField("delete_range"):
            named += keys_in(universe, change.delete_range.range)
        else:
            one = change.put.key or change.delete.key or change.add.key or change.touch.key
            named.append(one)
    return sorted(set(named))


def watched_keys(request: WriteRequest, universe: Sequence[bytes]) -> list[bytes]:
    """The keys on which its answer depends, as far as that is worth finding out."""
    if not isinstance(request, kv_pb2.TxnRequest):
        return keys_of(request, universe)
    gets = [each for each in request.then if each.HasField("get")]
    return keys_of(kv_pb2.TxnRequest(compares=request.compares, then=gets), universe)


def decide(request: WriteRequest, moment: Moment) -> Effect:
    draft = _Draft(moment)
    result = WriteResult()
    try:
        match request:
            case kv_pb2.PutRequest():
                _demand(request.precondition, request.key, moment)
                draft.put(request)
            case kv_pb2.DeleteRequest():
                _demand(request.precondition, request.key, moment)
                draft.delete(request.key)
                if request.count_deleted:
                    result = WriteResult(deleted=int(moment.got(request.key).value is not None))
            case kv_pb2.DeleteRangeRequest():
                draft.delete_range(request.range)
                if request.count_deleted:
                    result = WriteResult(deleted=len(keys_in([*moment.visible()], request.range)))
            case kv_pb2.WriteRequest():
                results = [draft.change(change) for change in request.changes]
                result = WriteResult(results=tuple(each for each in results if type(each) is int))
            case kv_pb2.TxnRequest():
                result = _txn(request, draft)
    except _Refused as refused:
        return Effect(refused.refusal)
    return Effect(result, draft.left, draft.writes)


def _txn(request: kv_pb2.TxnRequest, draft: _Draft) -> WriteResult:
    succeeded = all(_holds(compare, draft.moment) for compare in request.compares)
    results: list[OperationResult] = []
    for each in request.then if succeeded else request.otherwise:
        if each.HasField("get"):
            results.append(draft.moment.got(each.get.key))
        else:
            results.append(draft.change(each.change))
    return WriteResult(succeeded, tuple(results))


@dataclass(slots=True)
class _Draft:
    """The changes of one request up to now."""

    moment: Moment
    left: Left = field(default_factory=dict)
    writes: bool = False

    def change(self, change: kv_pb2.Change) -> int | bool | None:
        """Apply one change; the new value if it is an add, whether there is one if a touch."""
        match change.WhichOneof("change"):
            case "put":
                self.put(change.put)
            case "delete":
                self.delete(change.delete.key)
            case "delete_range":
                self.delete_range(change.delete_range.range)
            case "add":
                return self._add(change.add)
            case "touch":
                return self._touch(change.touch)
        return None

    def put(self, put: kv_pb2.PutRequest | kv_pb2.PutChange) -> None:
        self._set(put.key, put.value, put.ttl_ms)

    def _set(self, key: bytes, value: bytes, ttl_ms: int) -> None:
        self.left[key] = (value, self.moment.now_ms + ttl_ms if ttl_ms else 0)
        self.writes = True

    def delete(self, key: bytes) -> None:
        self.left[key] = (None, 0)
        self.writes = True

    def _touch(self, touch: kv_pb2.TouchChange) -> bool:
        value, _ = self.left.get(touch.key, (self.moment.got(touch.key).value, 0))
        if value is None:
            return False
        self._set(touch.key, value, touch.ttl_ms)
        return True

    def delete_range(self, keys: kv_pb2.KeyRange) -> None:
        self.writes |= not _is_empty(keys)
        self.left.update((key, (None, 0)) for key in self.moment.keys_in(keys))

    def _add(self, add: kv_pb2.AddChange) -> int:
        found = self.moment.got(add.key)
        value, expire_at_ms = self.left.get(add.key, (found.value, found.expire_at_ms))
        if value is None:
            value = bytes(8)
        if len(value) != 8:
            raise _Refused(Refusal(NotACounter.reason))
        total = int.from_bytes(value, "little", signed=True) + add.delta
        if not -(2**63) <= total < 2**63:
            raise _Refused(Refusal(CounterOverflow.reason))
        self.left[add.key] = (total.to_bytes(8, "little", signed=True), expire_at_ms)
        self.writes = True
        return total


def _demand(condition: kv_pb2.Precondition, key: bytes, moment: Moment) -> None:
    found = moment.got(key)
    holds = True
    match condition.WhichOneof("condition"):
        case "absent":
            holds = found.value is None
        case "present":
            holds = found.value is not None
        case "seq_equals":
            holds = found.seq == condition.seq_equals
    if not holds:
        raise _Refused(Refusal(ConditionFailed.reason, found.seq))


def _holds(compare: kv_pb2.Compare, moment: Moment) -> bool:
    found = moment.got(compare.key) if compare.key else Got()
    test = _OPERATORS[compare.operator]
    match compare.WhichOneof("test"):
        case "seq":
            return test(found.seq, compare.seq)
        case "value":
            if found.value is None:
                return compare.operator == kv_pb2.Compare.OPERATOR_NOT_EQUAL
            return test(found.value, compare.value)
        case "exists":
            return (found.value is not None) == compare.exists
        case _:
            keys = moment.keys_in(compare.range_empty)
            return all(moment.got(key).value is None for key in keys)
