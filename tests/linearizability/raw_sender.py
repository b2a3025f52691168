"""A client that is gRPC and nothing else: one call for each operation, and nothing is repeated."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from random import Random
from types import MappingProxyType

import grpc

from shalekv.v1 import kv_pb2, kv_pb2_grpc
from shalekv_client import ConditionFailed, NotACounter
from shalekv_client.error_table import error_of
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
from tests.linearizability.sender import nothing, prefix_of, refusal, scanned

DEADLINE_S = 1.0
SHORT_S = (0.002, 0.02)  # deadlines that often pass while the server is at it
SHORT_SHARE = 0.04
OPTIONS = (("grpc.use_local_subchannel_pool", 1), ("grpc.enable_http_proxy", 0))


class RawSender:
    """Implements `sender.Sender` on the generated stubs."""

    header = kv_pb2.RequestHeader(read_level=kv_pb2.READ_LEVEL_LINEARIZABLE)  # of reads

    def __init__(self, address: str, random: Random) -> None:
        self._address = address
        self._random = random
        self._channel = grpc.aio.insecure_channel(address, options=OPTIONS)
        self._kv = kv_pb2_grpc.KVStub(self._channel)
        self._calls: Mapping[Kind, Callable[[Operation], Awaitable[Reply]]] = MappingProxyType(
            {
                Kind.GET: self._get,
                Kind.BATCH_GET: self._batch_get,
                Kind.SCAN: self._scan,
                Kind.PUT: self._put,
                Kind.DELETE: self._delete,
                Kind.DELETE_RANGE: self._delete_range,
                Kind.ADD: self._write,
                Kind.WRITE: self._write,
                Kind.TXN: self._txn,
            }
        )

    async def send(self, operation: Operation, *, key: bytes) -> Reply:
        del key  # nothing is repeated
        try:
            return await self._calls[operation.kind](operation)
        except grpc.aio.AioRpcError as failure:
            error = error_of(self._address, failure)
            if isinstance(error, ConditionFailed | NotACounter):
                return refusal(error)
            raise error from failure

    async def close(self) -> None:
        await self._channel.close()

    def _deadline_s(self) -> float:
        is_short = self._random.random() < SHORT_SHARE
        return self._random.uniform(*SHORT_S) if is_short else DEADLINE_S

    async def _get(self, operation: Operation) -> Reply:
        request = kv_pb2.GetRequest(header=self.header, key=operation.then[0].key)
        return Reply((_seen(await self._kv.Get(request, timeout=self._deadline_s())),))

    async def _batch_get(self, operation: Operation) -> Reply:
        request = kv_pb2.BatchGetRequest(header=self.header, keys=operation.keys)
        reply = await self._kv.BatchGet(request, timeout=self._deadline_s())
        return Reply(tuple(_seen(result) for result in reply.results))

    async def _scan(self, operation: Operation) -> Reply:
        keys = kv_pb2.KeyRange(prefix=prefix_of(operation))
        request = kv_pb2.ScanRequest(header=self.header, range=keys)
        found: dict[bytes, Seen] = {}
        async for reply in self._kv.Scan(request, timeout=self._deadline_s()):
            found |= {entry.key: Seen(entry.value, entry.seq) for entry in reply.entries}
        return Reply(scanned(operation, found))

    async def _put(self, operation: Operation) -> Reply:
        action = operation.then[0]
        assert isinstance(action, Put)
        request = kv_pb2.PutRequest(
            key=action.key, value=action.value, precondition=_precondition(operation)
        )
        reply = await self._kv.Put(request, timeout=self._deadline_s())
        return Reply((None,), reply.header.seq)

    async def _delete(self, operation: Operation) -> Reply:
        key = operation.then[0].key
        request = kv_pb2.DeleteRequest(key=key, precondition=_precondition(operation))
        reply = await self._kv.Delete(request, timeout=self._deadline_s())
        return Reply((None,), reply.header.seq)

    async def _delete_range(self, operation: Operation) -> Reply:
        keys = kv_pb2.KeyRange(prefix=prefix_of(operation))
        request = kv_pb2.DeleteRangeRequest(range=keys)
        reply = await self._kv.DeleteRange(request, timeout=self._deadline_s())
        return Reply(nothing(operation), reply.header.seq)

    async def _write(self, operation: Operation) -> Reply:
        request = kv_pb2.WriteRequest(changes=[_change(action) for action in operation.then])
        reply = await self._kv.Write(request, timeout=self._deadline_s())
        counters = iter(reply.counters)
        results = [next(counters) if isinstance(each, Add) else None for each in operation.then]
        assert next(counters, None) is None, f"{operation}: {reply}"
        return Reply(tuple(results), reply.header.seq)

    async def _txn(self, operation: Operation) -> Reply:
        request = kv_pb2.TxnRequest(
            compares=[_compare(test) for test in operation.tests],
            then=[_txn_operation(action) for action in operation.then],
            otherwise=[_txn_operation(action) for action in operation.otherwise or ()],
        )
        reply = await self._kv.Txn(request, timeout=self._deadline_s())
        branch = operation.then if reply.succeeded else operation.otherwise or ()
        changes = any(not isinstance(action, Get) for action in branch)
        results = tuple(_result(result) for result in reply.results)
        return Reply(results, reply.header.seq if changes else None, reply.succeeded)


class CommittedSender(RawSender):
    """Reads what its server knows, which is the newest unless another server has taken over."""

    header = kv_pb2.RequestHeader(read_level=kv_pb2.READ_LEVEL_COMMITTED)


def _seen(reply: kv_pb2.GetReply | kv_pb2.BatchGetResult) -> Seen | None:
    return Seen(reply.value, reply.seq) if reply.found else None


def _result(result: kv_pb2.TxnResult) -> Result:
    match result.WhichOneof("result"):
        case "get":
            return _seen(result.get)
        case "counter":
            return result.counter
        case _:
            return None


def _precondition(operation: Operation) -> kv_pb2.Precondition | None:
    match operation.tests:
        case ():
            return None
        case (Exists(_, True),):
            return kv_pb2.Precondition(present=True)
        case (Exists(_, False),):
            return kv_pb2.Precondition(absent=True)
        case (SeqIs(_, seq),):
            return kv_pb2.Precondition(seq_equals=seq)
        case _:
            raise AssertionError(f"no precondition: {operation}")


def _compare(test: Test) -> kv_pb2.Compare:
    equal = kv_pb2.Compare.OPERATOR_EQUAL
    match test:
        case Exists(key, wanted):
            return kv_pb2.Compare(key=key, exists=wanted)
        case SeqIs(key, seq):
            return kv_pb2.Compare(key=key, operator=equal, seq=seq)
        case _:
            return kv_pb2.Compare(key=test.key, operator=equal, value=test.value)


def _change(action: Action) -> kv_pb2.Change:
    match action:
        case Put(key, value):
            return kv_pb2.Change(put=kv_pb2.PutChange(key=key, value=value))
        case Delete(key):
            return kv_pb2.Change(delete=kv_pb2.DeleteChange(key=key))
        case Add(key, delta):
            return kv_pb2.Change(add=kv_pb2.AddChange(key=key, delta=delta))
        case _:
            raise AssertionError(f"no change: {action}")


def _txn_operation(action: Action) -> kv_pb2.TxnOperation:
    if isinstance(action, Get):
        return kv_pb2.TxnOperation(get=kv_pb2.GetRequest(key=action.key))
    return kv_pb2.TxnOperation(change=_change(action))
