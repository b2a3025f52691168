"""Operations as calls of the Python client, with its retries and idempotency keys or without."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from random import Random
from typing import Any

import shalekv_client as api
from tests.linearizability.operations import (
    Action,
    Add,
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

TIMEOUT_MS = 1_500
ATTEMPT_TIMEOUT_MS = 500
SHORT_MS = (3, 20)  # attempts that often end while the server is at it, and are repeated
SHORT_SHARE = 0.1  # of the clients
NEWEST = api.ReadLevel.LINEARIZABLE


class Connection:
    """A client of one server. `send` raises the errors of `shalekv_client`; what is not
    `NotApplied` leaves the outcome open.
    """

    def __init__(self, address: str, random: Random, *, retries: bool) -> None:
        is_short = random.random() < SHORT_SHARE
        attempt_ms = random.randint(*SHORT_MS) if is_short else ATTEMPT_TIMEOUT_MS
        policy = api.RetryPolicy(attempt_timeout_ms=attempt_ms)
        if not retries:
            policy = replace(policy, attempts_max=1, idempotent=False)
        self._client = api.Client(
            address, timeout_ms=TIMEOUT_MS, retry=policy, coalesce=random.random() < 0.5
        )

    async def send(self, operation: Operation, key: bytes | None) -> Reply:
        """Send an operation once for its client, with this idempotency key."""
        try:
            return await self._send(operation, key)
        except api.NotACounter:
            return Reply(not_a_counter=True)
        except api.ConditionFailed as error:
            return Reply(succeeded=False, found_seq=error.found_seq)

    async def close(self) -> None:
        await self._client.close()

    async def _send(self, operation: Operation, key: bytes | None) -> Reply:
        first = operation.then[0]
        match operation.kind:
            case Kind.GET:
                return Reply((_seen(await self._client.get(first.key, read_level=NEWEST)),))
            case Kind.BATCH_GET:
                values = await self._client.batch_get(operation.keys, read_level=NEWEST)
                return Reply(tuple(_seen(value) for value in values))
            case Kind.SCAN:
                scan = self._client.scan(prefix=_prefix_of(operation), read_level=NEWEST)
                found = {entry.key: Seen(entry.value, entry.seq) async for entry in scan}
                return Reply(_scanned(operation, found))
            case Kind.ADD:
                assert isinstance(first, Add)
                total = await self._client.add(first.key, first.delta, idempotency_key=key)
                return Reply((total,))
            case Kind.TXN:
                return await self._txn(operation, key)
            case _:
                return await self._change(operation, key)

    async def _change(self, operation: Operation, key: bytes | None) -> Reply:
        first = operation.then[0]
        wanted: dict[str, Any] = {"condition": _condition(operation), "idempotency_key": key}
        match operation.kind, first:
            case Kind.PUT, Put():
                commit = await self._client.put(first.key, first.value, **wanted)
            case Kind.DELETE, _:
                commit = await self._client.delete(first.key, **wanted)
            case Kind.DELETE_RANGE, _:
                prefix = _prefix_of(operation)
                commit = await self._client.delete_range(prefix=prefix, idempotency_key=key)
            case _:
                changes = [_changed(action) for action in operation.then]
                commit = await self._client.write(changes, idempotency_key=key)
                sums = iter(commit.counters)
                results = [next(sums) if isinstance(a, Add) else None for a in operation.then]
                return Reply(tuple(results), commit.seq)
        return Reply(_nothing(operation), commit.seq)

    async def _txn(self, operation: Operation, key: bytes | None) -> Reply:
        done = await self._client.txn(
            [_compare(test) for test in operation.tests],
            [_txn_operation(action) for action in operation.then],
            [_txn_operation(action) for action in operation.otherwise or ()],
            idempotency_key=key,
        )
        branch = operation.then if done.succeeded else operation.otherwise or ()
        changes = any(not isinstance(action, Get) for action in branch)
        results = tuple(_result(result) for result in done.results)
        return Reply(results, done.seq if changes else None, done.succeeded)


def _seen(value: api.Value | None) -> Seen | None:
    return None if value is None else Seen(value.value, value.seq)


def _result(result: api.Value | int | None) -> Result:
    return _seen(result) if isinstance(result, api.Value) else result


def _condition(operation: Operation) -> api.Condition | None:
    match operation.tests:
        case ():
            return None
        case (Exists(_, wanted),):
            return api.Exists() if wanted else api.Missing()
        case (SeqIs(_, seq),):
            return api.SeqIs(seq=seq)
        case _:
            raise AssertionError(f"no condition: {operation}")


def _compare(test: Test) -> api.Compare:
    match test:
        case Exists(key, wanted):
            return api.Exists(key) if wanted else api.Missing(key)
        case SeqIs(key, seq):
            return api.SeqIs(key, seq=seq)
        case _:
            return api.ValueIs(test.key, test.value)


def _changed(action: Action) -> api.Change:
    match action:
        case Put(key, value):
            return api.Put(key, value)
        case Delete(key):
            return api.Delete(key)
        case Add(key, delta):
            return api.Add(key, delta)
        case _:
            raise AssertionError(f"no change: {action}")


def _txn_operation(action: Action) -> api.TxnOperation:
    return api.Get(action.key) if isinstance(action, Get) else _changed(action)


def _prefix_of(operation: Operation) -> bytes:
    prefix = operation.keys[0][:-1]
    assert all(key[:-1] == prefix for key in operation.keys), operation
    return prefix


def _scanned(operation: Operation, found: Mapping[bytes, Seen]) -> tuple[Result, ...]:
    """Return the state of each key that a scan has shown; it may show no others."""
    keys = operation.keys
    assert found.keys() <= set(keys), f"{operation} shows {found}"
    return tuple(found.get(key) for key in keys)


def _nothing(operation: Operation) -> tuple[Result, ...]:
    return (None,) * len(operation.then)
