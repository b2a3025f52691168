"""Requests of the simulation's clients, sent by the Python client to real servers."""

from __future__ import annotations

from dataclasses import dataclass

import shalekv_client as api
from shalekv.v1 import kv_pb2
from tests.sim.history import Got, Outcome, Refusal, Told, WriteRequest

REFUSED = (api.ConditionFailed, api.NotACounter, api.CounterOverflow)


@dataclass(frozen=True, slots=True)
class Ending:
    """What a client was told of one request."""

    outcome: Outcome
    answer: Told | Refusal | None = None
    seq: int = 0
    wal_id: int | None = None
    reason: str = ""


async def send(client: api.Client, request: WriteRequest) -> Ending:
    """Send one request, and tell how it ended."""
    try:
        return await _send(client, request)
    except REFUSED as error:
        found_seq = error.found_seq if isinstance(error, api.ConditionFailed) else None
        refusal = Refusal(error.reason, found_seq)
        return Ending(Outcome.REFUSED, refusal, reason=error.reason)
    except (api.KeyReused, api.InvalidRequest):
        raise  # the test itself is wrong
    except api.NotApplied as error:
        return Ending(Outcome.NOT_APPLIED, reason=error.reason or error.code)
    except api.OutcomeUnknown as error:
        return Ending(Outcome.UNKNOWN, reason=error.reason or error.code)


def got(value: api.Value | None) -> Got:
    """What a get has found."""
    return Got() if value is None else Got(value.value, value.seq, value.expire_at_ms or 0)


async def _send(client: api.Client, request: WriteRequest) -> Ending:
    key = request.header.idempotency_key or None
    durability = api.Durability(request.durability or api.Durability.DURABLE)
    if isinstance(request, kv_pb2.TxnRequest):
        return await _txn(client, request, durability, key)
    match request:
        case kv_pb2.PutRequest():
            commit = await client.put(
                request.key,
                request.value,
                ttl_ms=request.ttl_ms,
                condition=_condition(request.precondition),
                durability=durability,
                idempotency_key=key,
            )
        case kv_pb2.DeleteRequest():
            commit = await client.delete(
                request.key,
                condition=_condition(request.precondition),
                durability=durability,
                idempotency_key=key,
            )
        case kv_pb2.DeleteRangeRequest():
            keys = request.range
            commit = await client.delete_range(
                start=keys.start,
                end=keys.end,
                prefix=keys.prefix,
                durability=durability,
                idempotency_key=key,
            )
        case _:
            changes = [_change(change) for change in request.changes]
            commit = await client.write(changes, durability=durability, idempotency_key=key)
    told = Told(results=commit.counters)
    return Ending(_reached(commit.durability), told, commit.seq, commit.wal_id)


async def _txn(
    client: api.Client, request: kv_pb2.TxnRequest, durability: api.Durability, key: bytes | None
) -> Ending:
    done = await client.txn(
        [_compare(compare) for compare in request.compares],
        [_operation(operation) for operation in request.then],
        [_operation(operation) for operation in request.otherwise],
        durability=durability,
        idempotency_key=key,
    )
    branch = request.then if done.succeeded else request.otherwise
    results = [
        got(result) if operation.HasField("get") and not isinstance(result, int) else result
        for operation, result in zip(branch, done.results, strict=True)
    ]
    told = Told(done.succeeded, tuple(each for each in results if not isinstance(each, api.Value)))
    return Ending(_reached(done.durability), told, done.seq, done.wal_id)


def _reached(durability: api.Durability | None) -> Outcome:
    is_in_memory = durability is api.Durability.MEMORY
    return Outcome.IN_MEMORY if is_in_memory else Outcome.ACKNOWLEDGED


def _condition(condition: kv_pb2.Precondition) -> api.Condition | None:
    match condition.WhichOneof("condition"):
        case "absent":
            return api.Absent()
        case "present":
            return api.Present()
        case "seq_equals":
            return api.SeqEquals(condition.seq_equals)
        case _:
            return None


def _compare(compare: kv_pb2.Compare) -> api.Compare:
    by = api.Operator(compare.operator or api.Operator.EQUAL.value)
    match compare.WhichOneof("test"):
        case "seq":
            return api.SeqIs(compare.key, compare.seq, by)
        case "value":
            return api.ValueIs(compare.key, compare.value, by)
        case "exists":
            return api.Exists(compare.key) if compare.exists else api.Missing(compare.key)
        case _:
            keys = compare.range_empty
            return api.RangeEmpty(keys.start, keys.end, keys.prefix)


def _change(change: kv_pb2.Change) -> api.Change:
    match change.WhichOneof("change"):
        case "put":
            return api.Put(change.put.key, change.put.value, change.put.ttl_ms)
        case "delete":
            return api.Delete(change.delete.key)
        case "add":
            return api.Add(change.add.key, change.add.delta)
        case _:
            keys = change.delete_range.range
            return api.DeleteRange(keys.start, keys.end, keys.prefix)


def _operation(operation: kv_pb2.TxnOperation) -> api.TxnOperation:
    if operation.HasField("get"):
        return api.Get(operation.get.key)
    return _change(operation.change)
