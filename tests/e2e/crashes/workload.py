"""What clients ask for: as in the simulation, and changes to keys that fill the levels."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from random import Random

from shalekv.v1 import kv_pb2
from tests.sim import requests
from tests.sim.history import Got, WriteRequest

WIDE_COUNT = 150
WIDE_KEYS = tuple(b"w/%03d" % number for number in range(WIDE_COUNT))
KEYS = (*requests.KEYS, *WIDE_KEYS)
WIDE_SHARE = 0.4
VALUE_DIGITS = (1, 1_500)  # zeros before the number: values of all sizes that tell whose they are


@dataclass(frozen=True, slots=True)
class Workload:
    """Draws the requests of one client. Nothing expires: here no clock is the test's own."""

    random: Random
    known: Mapping[bytes, Got]  # what clients have seen of keys
    _contended: requests.Requests = field(init=False)

    def __post_init__(self) -> None:
        """The contended keys are those of the simulation."""
        object.__setattr__(self, "_contended", requests.Requests(self.random, self.known))

    def draw(self, number: int) -> WriteRequest:
        """The request of the operation with this number."""
        if self.random.random() < WIDE_SHARE:
            return self._draw_wide(number)
        request = self._contended.draw(number)
        request.header.ClearField("read_level")  # a client always has its answer confirmed
        _keep_for_ever(request)
        return request

    def _draw_wide(self, number: int) -> WriteRequest:
        dice = self.random.random()
        if dice < 0.5:
            return kv_pb2.PutRequest(key=self._key(), value=self._value(number))
        if dice < 0.6:
            return kv_pb2.DeleteRequest(key=self._key())
        if dice < 0.63:
            keys = kv_pb2.KeyRange(prefix=self._key()[:-1])
            return kv_pb2.DeleteRangeRequest(range=keys)
        drawn = self.random.sample(WIDE_KEYS, self.random.randint(2, 8))
        changes = [kv_pb2.Change(delete=kv_pb2.DeleteChange(key=drawn[0]))]
        changes += [self._put_change(key, number) for key in drawn[1:]]
        return kv_pb2.WriteRequest(changes=changes)

    def _put_change(self, key: bytes, number: int) -> kv_pb2.Change:
        return kv_pb2.Change(put=kv_pb2.PutChange(key=key, value=self._value(number)))

    def _key(self) -> bytes:
        return self.random.choice(WIDE_KEYS)

    def _value(self, number: int) -> bytes:
        return b"v%0*d" % (self.random.randint(*VALUE_DIGITS), number)


def _keep_for_ever(request: WriteRequest) -> None:
    changes: list[kv_pb2.Change] = []
    match request:
        case kv_pb2.PutRequest():
            request.ttl_ms = 0
        case kv_pb2.WriteRequest():
            changes = list(request.changes)
        case kv_pb2.TxnRequest():
            operations = (*request.then, *request.otherwise)
            changes = [each.change for each in operations]
        case _:
            pass
    for change in changes:
        if change.HasField("put"):
            change.put.ttl_ms = 0
