"""Requests of clients, of every kind, drawn so that they conflict with each other."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from random import Random

from shalekv.v1 import kv_pb2
from tests.sim.history import Got, WriteRequest

VALUES = (b"a0", b"a1", b"b0", b"b1")  # their values hold the number of the operation that put them
COUNTED = b"n0"  # a counter that is only added to
COLD = (b"a5", b"b5")  # seldom written: their versions sink to the lowest level
KEYS = (b"a0", b"a1", b"a5", b"b0", b"b1", b"b2", b"b5", COUNTED)
TTLS_MS = (20, 500, 5_000, 60_000)
COLD_SHARE = 0.1
COLD_TTL_SHARE = 0.5
HUGE = 2**62  # two of these overflow
_ADD_TO = (COUNTED, COUNTED, COUNTED, b"b2", b"a0")


@dataclass(frozen=True, slots=True)
class Requests:
    """Draws the requests of one client."""

    random: Random
    known: Mapping[bytes, Got]  # newest versions that clients have seen
    ttl_share: float = 0.15  # share of the puts that expire

    def draw(self, number: int) -> WriteRequest:
        kinds: dict[Callable[[int], WriteRequest], int] = {
            self.put: 20,
            self.put_if: 18,
            self.delete: 6,
            self.delete_if: 4,
            self.delete_range: 6,
            self.write: 16,
            self.add: 14,
            self.txn: 20,
        }
        draw = self.random.choices(list(kinds), list(kinds.values()))[0]
        request = draw(number)
        if self.random.random() < 0.1:
            request.durability = kv_pb2.DURABILITY_MEMORY
        return request

    def draw_resting(self, number: int) -> WriteRequest:
        """One that does what it does because of what is in the database."""
        drawn = self.random.random()
        if drawn < 0.3:
            return self.put_if(number)
        gets = [kv_pb2.TxnOperation(get=kv_pb2.GetRequest(key=self._key()))]
        writes = [kv_pb2.TxnOperation(change=self._put_change(number, self._key()))]
        if drawn < 0.6:  # it writes, and what it reads is what may change
            return kv_pb2.TxnRequest(then=[*gets, *writes])
        key = self._key()  # it writes unless clients are wrong about this one, else it reads
        is_there = self.known.get(key, Got()).value is not None
        compare = kv_pb2.Compare(key=key, exists=is_there)
        return kv_pb2.TxnRequest(compares=[compare], then=writes, otherwise=gets)

    def draw_reading(self, number: int) -> WriteRequest:
        """One that changes nothing: a refusal, mostly, or a transaction that only reads."""
        if self.random.random() < 0.3:
            return self.put_if(number)
        gets = [kv_pb2.GetRequest(key=key) for key in self.random.sample(KEYS, 3)]
        return kv_pb2.TxnRequest(then=[kv_pb2.TxnOperation(get=get) for get in gets])

    def draw_plain(self, number: int, keys: Sequence[bytes]) -> WriteRequest:
        """Draw a request whose effect does not depend on the database, on one of these keys if it
        can.
        """
        drawn = self.random.random()
        if drawn < 0.3:
            return self.delete_range(number)
        request = self.put(number) if drawn < 0.7 else self.delete(number)
        writable = [key for key in keys if key != COUNTED]
        if writable:
            request.key = self.random.choice(writable)
        return request

    def put(self, number: int) -> kv_pb2.PutRequest:
        key = self._key()
        return kv_pb2.PutRequest(key=key, value=_value(number), ttl_ms=self._ttl_ms(key))

    def put_if(self, number: int) -> kv_pb2.PutRequest:
        request = self.put(number)
        request.precondition.CopyFrom(self._condition(request.key))
        self._draw_level(request.header)
        return request

    def delete(self, _number: int) -> kv_pb2.DeleteRequest:
        return kv_pb2.DeleteRequest(key=self._key())

    def delete_if(self, number: int) -> kv_pb2.DeleteRequest:
        request = self.delete(number)
        request.precondition.CopyFrom(self._condition(request.key))
        self._draw_level(request.header)
        return request

    def delete_range(self, _number: int) -> kv_pb2.DeleteRangeRequest:
        return kv_pb2.DeleteRangeRequest(range=self._range())

    def write(self, number: int) -> kv_pb2.WriteRequest:
        """Several changes; in half of all cases puts only."""
        if self.random.random() < 0.5:
            return self.puts(number)
        count = self.random.randrange(1, 4)
        changes = [self._change(number) for _ in range(count)]
        return kv_pb2.WriteRequest(changes=[*changes, self._identifying(number)])

    def puts(self, number: int) -> kv_pb2.WriteRequest:
        keys = self.random.sample(VALUES, 3)
        return kv_pb2.WriteRequest(changes=[self._put_change(number, key) for key in keys])

    def add(self, number: int) -> kv_pb2.WriteRequest:
        return kv_pb2.WriteRequest(changes=[self._add(number)])

    def txn(self, number: int) -> kv_pb2.TxnRequest:
        request = kv_pb2.TxnRequest()
        request.compares.extend(self._compare() for _ in range(self.random.choice([0, 1, 1, 2])))
        request.then.extend(self._branch(number))
        if self.random.random() < 0.7:
            request.otherwise.extend(self._branch(number))
        self._draw_level(request.header)
        return request

    def _branch(self, number: int) -> list[kv_pb2.TxnOperation]:
        gets = [
            kv_pb2.TxnOperation(get=kv_pb2.GetRequest(key=self.random.choice(KEYS)))
            for _ in range(self.random.randrange(3))
        ]
        if gets and self.random.random() < 0.3:
            return gets
        changes = [self._change(number) for _ in range(self.random.randrange(2))]
        operations = [kv_pb2.TxnOperation(change=change) for change in changes]
        return [*gets, *operations, kv_pb2.TxnOperation(change=self._identifying(number))]

    def _change(self, number: int) -> kv_pb2.Change:
        drawn = self.random.random()
        if drawn < 0.4:
            return self._put_change(number, self._key())
        if drawn < 0.6:
            return kv_pb2.Change(delete=kv_pb2.DeleteChange(key=self._key()))
        if drawn < 0.8:
            return kv_pb2.Change(delete_range=kv_pb2.DeleteRangeChange(range=self._range()))
        return self._add(number)

    def _identifying(self, number: int) -> kv_pb2.Change:
        """A change by which the operation is recognised in the log."""
        is_put = self.random.random() < 0.6
        return self._put_change(number, self._key()) if is_put else self._add(number)

    def _put_change(self, number: int, key: bytes) -> kv_pb2.Change:
        put = kv_pb2.PutChange(key=key, value=_value(number), ttl_ms=self._ttl_ms(key))
        return kv_pb2.Change(put=put)

    def _add(self, number: int) -> kv_pb2.Change:
        key = self.random.choice(_ADD_TO)
        delta = self.random.choice([number, -number])
        if key == b"b2" and self.random.random() < 0.4:
            delta += self.random.choice([HUGE, -HUGE])
        return kv_pb2.Change(add=kv_pb2.AddChange(key=key, delta=delta))

    def _condition(self, key: bytes) -> kv_pb2.Precondition:
        seen = self.known.get(key, Got())
        drawn = self.random.random()
        if seen.value is not None and drawn < 0.5:
            return kv_pb2.Precondition(seq_equals=seen.seq)
        if drawn < 0.8:
            return kv_pb2.Precondition(absent=True)
        return kv_pb2.Precondition(present=True)

    def _compare(self) -> kv_pb2.Compare:
        key = self.random.choice(KEYS)
        seen = self.known.get(key, Got())
        drawn = self.random.random()
        if drawn < 0.2:
            return kv_pb2.Compare(range_empty=self._range())
        if drawn < 0.5:
            return kv_pb2.Compare(key=key, exists=self.random.random() < 0.5)
        by = self.random.choice(kv_pb2.Compare.Operator.values())
        if drawn < 0.75:
            return kv_pb2.Compare(key=key, operator=by, seq=seen.seq)
        return kv_pb2.Compare(key=key, operator=by, value=seen.value or b"")

    def _key(self) -> bytes:
        if self.random.random() < COLD_SHARE:
            return self.random.choice(COLD)
        return self.random.choice((*VALUES, b"b2") if self.random.random() < 0.2 else VALUES)

    def _range(self) -> kv_pb2.KeyRange:
        drawn = self.random.random()
        if drawn < 0.6:
            return kv_pb2.KeyRange(prefix=self.random.choice([b"a", b"b"]))
        if drawn < 0.7:
            return kv_pb2.KeyRange(start=b"b0", end=b"b0")
        start, end = sorted(self.random.sample((*VALUES, b"b3"), 2))
        return kv_pb2.KeyRange(start=start, end=end)

    def _ttl_ms(self, key: bytes) -> int:
        """Draw a TTL, or none: many versions above lasting ones must expire."""
        share = max(self.ttl_share, COLD_TTL_SHARE) if key in COLD else self.ttl_share
        return self.random.choice(TTLS_MS) if self.random.random() < share else 0

    def _draw_level(self, header: kv_pb2.RequestHeader) -> None:
        if self.random.random() < 0.2:
            header.read_level = kv_pb2.READ_LEVEL_COMMITTED


def _value(number: int) -> bytes:
    return b"v%d" % number
