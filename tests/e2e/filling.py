"""Filling a database with the operations of a workload of the simulator, and checking all of it.

What was acknowledged is kept here, as the number of the operation that was the last to touch each
key; the bytes of a value follow from that number.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from random import Random

from shalekv.protocol.compaction.workload import Workload, operations
from shalekv_client import Batch, Client, RetryPolicy

BATCH_COUNT = 100
PATIENT = RetryPolicy(attempts_max=1_000)  # a refused write was not applied
TIMEOUT_MS = 120_000


class Filling:
    """The operations of a workload, and what a database must hold that has acknowledged them."""

    def __init__(self, workload: Workload) -> None:
        ops = operations(workload)
        self._keys: list[int] = ops.keys.tolist()
        self._lengths: list[int] = (ops.logical_bytes - workload.key_bytes).tolist()
        self._deletes: list[bool] = ops.deletes.tolist()
        self._put_by: dict[bytes, int] = {}  # key -> number of the operation
        self.logical_bytes = int(ops.logical_bytes.sum())
        self._live_bytes: list[int] = ops.live_bytes.tolist()

    def live_bytes(self, count: int = 0) -> int:
        """Return the bytes of live keys and values after this many operations; 0: after all."""
        return self._live_bytes[count - 1]

    @property
    def key_count(self) -> int:
        return len(self._put_by)

    async def write(self, address: str) -> AsyncIterator[int]:
        """Write all, batch after batch; the number of operations that are acknowledged."""
        async with Client(address, retry=PATIENT, timeout_ms=TIMEOUT_MS) as client:
            for first in range(0, len(self._keys), BATCH_COUNT):
                numbers = range(first, min(first + BATCH_COUNT, len(self._keys)))
                await client.write(self._batch(numbers))
                self._acknowledged(numbers)
                yield numbers.stop

    async def check(self, address: str) -> None:
        """Every key has the value that was acknowledged last, and there are no others."""
        expected = iter(sorted(self._put_by.items()))
        async with Client(address, timeout_ms=TIMEOUT_MS) as client:
            async for entry in client.scan():
                key, number = next(expected, (b"", -1))
                assert entry.key == key, f"{entry.key.hex()} instead of {key.hex()}"
                assert entry.value == self._value(number), self._confusion(key, number, entry.value)
        assert next(expected, None) is None

    async def check_gets(self, address: str, random: Random, count: int) -> None:
        """The same by gets of some of the keys, deleted ones included."""
        async with Client(address, timeout_ms=TIMEOUT_MS) as client:
            for _ in range(count):
                numbers = random.sample(range(len(self._keys)), 50)
                keys = [_key(self._keys[number]) for number in numbers]
                for key, got in zip(keys, await client.batch_get(keys), strict=True):
                    number = self._put_by.get(key)
                    expected = None if number is None else self._value(number)
                    assert (None if got is None else got.value) == expected, key.hex()

    def _confusion(self, key: bytes, number: int, value: bytes) -> str:
        others = [other for other, each in enumerate(self._keys) if _key(each) == key]
        written_by = [other for other in others if self._value(other) == value]
        return f"{key.hex()}: written by {written_by} of {others}, not by {number}"

    def _batch(self, numbers: range) -> Batch:
        batch = Batch()
        for number in numbers:
            key = _key(self._keys[number])
            _ = batch.delete(key) if self._deletes[number] else batch.put(key, self._value(number))
        return batch

    def _acknowledged(self, numbers: range) -> None:
        for number in numbers:
            key = _key(self._keys[number])
            if self._deletes[number]:
                self._put_by.pop(key, None)
            else:
                self._put_by[key] = number

    def _value(self, number: int) -> bytes:
        """Bytes that no codec makes smaller, so that bytes in the store can be foretold."""
        return Random(number).randbytes(self._lengths[number])


def _key(number: int) -> bytes:
    return b"key/" + number.to_bytes(12, "big")
