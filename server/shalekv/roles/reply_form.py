"""How each kind of write is answered: what of a decision stands in which message."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from shalekv.format.records import ReplyKind
from shalekv.protocol.entry import Entry
from shalekv.protocol.transaction import Decision, Read
from shalekv.server.requests import DurabilityValue
from shalekv.v1 import kv_pb2

ReplyT = TypeVar(
    "ReplyT",
    kv_pb2.PutReply,
    kv_pb2.DeleteReply,
    kv_pb2.DeleteRangeReply,
    kv_pb2.WriteReply,
    kv_pb2.TxnReply,
)


@dataclass(frozen=True, slots=True)
class ReplyForm(Generic[ReplyT]):
    """How a kind of write is answered."""

    kind: ReplyKind
    message: type[ReplyT]
    fill: Callable[[ReplyT, Decision], None] | None = None  # with what was decided

    def reply(self, decision: Decision | None, durability: DurabilityValue) -> ReplyT:
        """The reply but for its header."""
        reply = self.message(durability=durability)
        if decision is not None and self.fill is not None:
            self.fill(reply, decision)
        return reply


def _fill_write(reply: kv_pb2.WriteReply, decision: Decision) -> None:
    reply.counters.extend(result for result in decision.results if isinstance(result, int))


def _fill_txn(reply: kv_pb2.TxnReply, decision: Decision) -> None:
    reply.succeeded = decision.succeeded
    for result in decision.results:
        added = reply.results.add()
        match result:
            case Read(Entry() as entry):
                added.get.found = True
                added.get.value = entry.value
                added.get.seq = entry.seq
                added.get.expire_at_ms = entry.expire_at_ms
            case Read():
                added.get.SetInParent()
            case int():
                added.counter = result


PUT = ReplyForm(ReplyKind.PUT, kv_pb2.PutReply)
DELETE = ReplyForm(ReplyKind.DELETE, kv_pb2.DeleteReply)
DELETE_RANGE = ReplyForm(ReplyKind.DELETE_RANGE, kv_pb2.DeleteRangeReply)
WRITE = ReplyForm(ReplyKind.WRITE, kv_pb2.WriteReply, _fill_write)
TXN = ReplyForm(ReplyKind.TXN, kv_pb2.TxnReply, _fill_txn)
