"""The results of calls that read and write data: frozen values, and their decoding."""

from __future__ import annotations

import enum
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import TypeAlias, TypeVar

from shalekv.v1 import kv_pb2
from shalekv_client.policies import Durability, Role

EnumT = TypeVar("EnumT", bound=enum.Enum)
_DURABILITIES: Mapping[int, Durability] = MappingProxyType(
    {each.value: each for each in Durability}
)

COUNTER_BYTES = 8  # a signed integer, least significant byte first


@dataclass(frozen=True, slots=True)
class Value:
    """The value of a key."""

    value: bytes
    seq: int  # the sequence number of the commit that wrote it
    expire_at_ms: int | None  # milliseconds since the Unix epoch; None: never

    def as_int(self) -> int:
        """Return the number of a counter, as `Client.add` writes it.

        Raises ValueError if the value is not one of 8 bytes.
        """
        if len(self.value) != COUNTER_BYTES:
            problem = f"a counter has {COUNTER_BYTES} bytes, and this value has {len(self.value)}"
            raise ValueError(problem)
        return int.from_bytes(self.value, "little", signed=True)


@dataclass(frozen=True, slots=True)
class KeyInfo:
    """Sequence number and expiry of a key that has a value, without the value."""

    seq: int  # the sequence number of the commit that wrote the value
    expire_at_ms: int | None  # milliseconds since the Unix epoch; None: never
    ttl_ms: int | None  # milliseconds until then, by the server's clock; None: it never expires


@dataclass(frozen=True, slots=True)
class Count:
    """The number of keys in a range."""

    count: int
    more: bool  # the limit has ended the count: the range has more keys


@dataclass(frozen=True, slots=True)
class Entry:
    """A key of a scan with its value."""

    key: bytes
    value: bytes  # empty when only keys were asked for
    seq: int  # the sequence number of the commit that wrote it
    expire_at_ms: int | None  # milliseconds since the Unix epoch; None: never


@dataclass(frozen=True, slots=True)
class Commit:
    """A write that the server has acknowledged."""

    seq: int
    wal_id: int | None  # the WAL object that holds it; None: it is in memory only
    epoch: int  # of the writer
    durability: Durability | None  # that was reached; None: a level unknown to this client
    counters: tuple[int, ...] = ()  # the new value of each counter that was added to, in order
    deleted: int | None = None  # keys that had a value; None: not counted (see `Client.delete`)
    deleted_more: bool = False  # the count ended at its bound: there may have been more


OperationResult: TypeAlias = Value | int | bool | None


@dataclass(frozen=True, slots=True)
class TxnResult:
    """A transaction that the server has acknowledged."""

    succeeded: bool  # True: all comparisons held, and `then` was executed; else `otherwise`
    results: tuple[OperationResult, ...]  # of each operation of that branch; see `Client.txn`
    seq: int  # of the commit; of the view when the branch changes nothing
    wal_id: int | None  # the WAL object that holds it
    durability: Durability | None  # that was reached; None: a level unknown to this client


@dataclass(frozen=True, slots=True)
class Cost:
    """Requests to the object store that a call has caused: see `costs_of_calls`."""

    writes: int
    lists: int
    reads: int
    deletes: int
    record_writes: int  # in the transactional store
    record_reads: int
    shared_by: int  # calls that share these requests, this one included; 0: they are its own
    dollars: float | None  # the part of this call, in US dollars; None: prices are not known


@dataclass(frozen=True, slots=True)
class View:
    """The state from which an answer was made."""

    database_id: bytes
    role: Role | None  # None: a role unknown to this client
    epoch: int  # of the writer
    seq: int
    wal_id: int | None  # the last WAL object that the view covers; None: there is none
    staleness_ms: int  # the greatest possible age of the view; 0 at the writer


def view_of(header: kv_pb2.ReplyHeader) -> View:
    """Decode the view in the header of a reply."""
    return View(
        database_id=header.database_id,
        role=known(Role, header.role),
        epoch=header.epoch,
        seq=header.seq,
        wal_id=header.wal_id if header.HasField("wal_id") else None,
        staleness_ms=header.staleness_ms,
    )


def cost_of(message: kv_pb2.Cost) -> Cost:
    """Decode the cost in the header of a reply."""
    return Cost(
        message.writes,
        message.lists,
        message.reads,
        message.deletes,
        message.record_writes,
        message.record_reads,
        message.shared_by,
        message.dollars if message.HasField("dollars") else None,
    )


def value_of(result: kv_pb2.GetReply | kv_pb2.BatchGetResult) -> Value | None:
    """Decode the value that was found; None: none was."""
    if not result.found:
        return None
    return Value(result.value, result.seq, result.expire_at_ms or None)


def key_info_of(reply: kv_pb2.GetReply) -> KeyInfo | None:
    """Decode what was found of a key; None: it has no value."""
    if not reply.found:
        return None
    if not reply.expire_at_ms:
        return KeyInfo(reply.seq, None, None)
    # A server that does not know the request yet tells no time to live: by the clock here.
    ttl_ms = reply.ttl_ms or max(1, reply.expire_at_ms - time.time_ns() // 1_000_000)
    return KeyInfo(reply.seq, reply.expire_at_ms, ttl_ms)


def count_of(reply: kv_pb2.CountReply) -> Count:
    """Decode the number of keys in a range."""
    return Count(reply.count, reply.more)


def entries_of(entries: Iterable[kv_pb2.Entry]) -> list[Entry]:
    """Decode the entries of one message of a scan."""
    return [Entry(e.key, e.value, e.seq, e.expire_at_ms or None) for e in entries]


def commit_of(
    reply: kv_pb2.PutReply | kv_pb2.DeleteReply | kv_pb2.DeleteRangeReply | kv_pb2.WriteReply,
    counters: tuple[int, ...] = (),
) -> Commit:
    """Decode the commit that a reply acknowledges."""
    header = reply.header
    return Commit(
        header.seq,
        header.wal_id or (0 if header.HasField("wal_id") else None),
        header.epoch,
        _DURABILITIES.get(reply.durability),
        counters,
    )


def counted_commit_of(reply: kv_pb2.DeleteReply | kv_pb2.DeleteRangeReply) -> Commit:
    """Decode the commit of a delete that was asked to count; an older server does not."""
    commit = commit_of(reply)
    if not reply.HasField("deleted"):
        return commit
    more = isinstance(reply, kv_pb2.DeleteRangeReply) and reply.deleted_more
    return replace(commit, deleted=reply.deleted, deleted_more=more)


def txn_result_of(reply: kv_pb2.TxnReply) -> TxnResult:
    """Decode the result of a transaction."""
    header = reply.header
    return TxnResult(
        succeeded=reply.succeeded,
        results=tuple(map(_result_of, reply.results)),
        seq=header.seq,
        wal_id=header.wal_id if header.HasField("wal_id") else None,
        durability=_DURABILITIES.get(reply.durability),
    )


def _result_of(result: kv_pb2.TxnResult) -> OperationResult:
    match result.WhichOneof("result"):
        case "get":
            return value_of(result.get)
        case "counter":
            return result.counter
        case "touched":
            return result.touched
        case _:
            return None


def known(kind: type[EnumT], number: int) -> EnumT | None:
    """Return the member of `kind` with this number; None for one that a newer server has added."""
    try:
        return kind(number)
    except ValueError:
        return None
