"""The calls of a client that read and write data: one method for each operation."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import TypeVar

from shalekv_client import operations
from shalekv_client.changes import Change
from shalekv_client.conditions import Compare, Condition
from shalekv_client.levels import Durability, ReadLevel
from shalekv_client.operations import At, Operation, TxnOperation
from shalekv_client.results import Commit, TxnResult, Value

ResultT = TypeVar("ResultT")


class DataCalls(ABC):
    """What `Client` offers for one operation at a time."""

    async def get(
        self,
        key: bytes,
        *,
        read_level: ReadLevel = ReadLevel.COMMITTED,
        max_staleness_ms: int | None = None,
        at: At = None,
        timeout_ms: int | None = None,
    ) -> Value | None:
        """The value of `key`; None when it has none.

        The state is not older than `max_staleness_ms` (0: whatever its age). `at` a snapshot, an id
        or what has one as its `id`: the value that it holds.
        """
        operation = operations.get(
            key,
            read_level=read_level,
            max_staleness_ms=self._staleness_ms(max_staleness_ms, at),
            at=at,
            min_seq=self._min_seq(),
        )
        return await self._call(operation, timeout_ms)

    async def batch_get(
        self,
        keys: Iterable[bytes],
        *,
        read_level: ReadLevel = ReadLevel.COMMITTED,
        max_staleness_ms: int | None = None,
        at: At = None,
        timeout_ms: int | None = None,
    ) -> list[Value | None]:
        """The values of many keys at one view, in the order of `keys`; None where there is none.

        `max_staleness_ms` and `at` as in `get`.
        """
        operation = operations.batch_get(
            keys,
            read_level=read_level,
            max_staleness_ms=self._staleness_ms(max_staleness_ms, at),
            at=at,
            min_seq=self._min_seq(),
        )
        return await self._call(operation, timeout_ms)

    async def put(
        self,
        key: bytes,
        value: bytes,
        *,
        ttl_ms: int = 0,
        condition: Condition | None = None,
        durability: Durability = Durability.DURABLE,
        idempotency_key: bytes | None = None,
        timeout_ms: int | None = None,
    ) -> Commit:
        """Set the value of `key`, which expires after `ttl_ms` milliseconds; 0: never.

        With a `condition` that does not hold, nothing is changed and `ConditionFailed` is raised.
        """
        operation = operations.put(
            key,
            value,
            ttl_ms=ttl_ms,
            condition=condition,
            durability=durability,
            idempotency_key=self._key(idempotency_key),
        )
        return await self._call(operation, timeout_ms)

    async def delete(
        self,
        key: bytes,
        *,
        condition: Condition | None = None,
        durability: Durability = Durability.DURABLE,
        idempotency_key: bytes | None = None,
        timeout_ms: int | None = None,
    ) -> Commit:
        """Delete `key`. One that has no value is not an error; `condition` as in `put`."""
        operation = operations.delete(
            key,
            condition=condition,
            durability=durability,
            idempotency_key=self._key(idempotency_key),
        )
        return await self._call(operation, timeout_ms)

    async def delete_range(
        self,
        *,
        start: bytes = b"",
        end: bytes = b"",
        prefix: bytes = b"",
        all_keys: bool = False,
        durability: Durability = Durability.DURABLE,
        idempotency_key: bytes | None = None,
        timeout_ms: int | None = None,
    ) -> Commit:
        """Delete the keys from `start` to `end` (exclusive), or those that begin with `prefix`.

        One commit, whose cost does not depend on their number. Without any of the three,
        `all_keys` must say that all keys are meant.
        """
        operation = operations.delete_range(
            start=start,
            end=end,
            prefix=prefix,
            all_keys=all_keys,
            durability=durability,
            idempotency_key=self._key(idempotency_key),
        )
        return await self._call(operation, timeout_ms)

    async def add(
        self,
        key: bytes,
        delta: int = 1,
        *,
        idempotency_key: bytes | None = None,
        timeout_ms: int | None = None,
    ) -> int:
        """Add `delta`, which may be negative, to a counter; returns its new value.

        A counter is a value of 8 bytes, a signed integer, least significant byte first; a key
        without a value counts as 0. Raises `NotACounter` for another value, `CounterOverflow` for
        a sum beyond 64 bits.
        """
        operation = operations.add(key, delta, idempotency_key=self._key(idempotency_key))
        return await self._call(operation, timeout_ms)

    async def write(
        self,
        changes: Iterable[Change],
        *,
        durability: Durability = Durability.DURABLE,
        idempotency_key: bytes | None = None,
        timeout_ms: int | None = None,
    ) -> Commit:
        """Apply all of `changes`, such as a `Batch`, in one commit, or none of them."""
        key = self._key(idempotency_key)
        operation = operations.write(changes, durability=durability, idempotency_key=key)
        return await self._call(operation, timeout_ms)

    async def txn(
        self,
        compares: Iterable[Compare],
        then: Iterable[TxnOperation],
        otherwise: Iterable[TxnOperation] = (),
        *,
        durability: Durability = Durability.DURABLE,
        idempotency_key: bytes | None = None,
        timeout_ms: int | None = None,
    ) -> TxnResult:
        """Do what `then` says if all of `compares` hold, or else what `otherwise` says.

            await client.txn([Missing(b"lock")], then=[Put(b"lock", me)], otherwise=[Get(b"lock")])

        All in one commit. There is one result for each operation of the branch that was taken: of
        a `Get` the value, or None, from before the changes; of an `Add` the new value of the
        counter; of other changes None.
        """
        operation = operations.txn(
            compares,
            then,
            otherwise,
            durability=durability,
            idempotency_key=self._key(idempotency_key),
        )
        return await self._call(operation, timeout_ms)

    @abstractmethod
    async def _call(self, operation: Operation[ResultT], timeout_ms: int | None) -> ResultT:
        """The result of an operation."""

    @abstractmethod
    def _key(self, idempotency_key: bytes | None) -> bytes | None:
        """The key of a write for which the caller has given this one, or none."""

    @abstractmethod
    def _min_seq(self) -> int:
        """What a read has to show at least."""

    @abstractmethod
    def _staleness_ms(self, max_staleness_ms: int | None, at: At) -> int:
        """How old the state of a read may be; 0: whatever it is."""
