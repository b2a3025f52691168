"""A writer against a dictionary: whatever is done in whatever order, reads answer as a dict would.

Writes of every kind, with and without conditions and idempotency keys; see `machine` for what
happens to the writers meanwhile.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import rule, run_state_machine_as_test

from shalekv.core.key_range import KeyRange
from shalekv.core.transaction import (
    Compare,
    Delete,
    DeleteRange,
    EmptyCompare,
    Operation,
    Put,
    SeqCompare,
    Transaction,
)
from shalekv.errors import KeyExpired, KeyReused
from shalekv.v1 import kv_pb2
from tests.model.machine import WINDOW_S, WriterMachine
from tests.model.messages import precondition_of, range_of, txn_of, write_of
from tests.model.oracle import decide
from tests.model.strategies import (
    CHANGES,
    COMPARES,
    CONDITIONS,
    IDEMPOTENCY_KEYS,
    KEYS,
    OPERATIONS,
    PLAIN,
    PUTS,
    RANGES,
)
from tests.model.writers import Asked, check_results

WINDOW_MS = WINDOW_S * 1_000
MEMORY, DURABLE = kv_pb2.DURABILITY_MEMORY, kv_pb2.DURABILITY_DURABLE
DURABILITIES = st.sampled_from([DURABLE, MEMORY])


@dataclass(slots=True)
class Sent:
    """A request that was sent with an idempotency key."""

    method: str
    request: Any
    asked: Asked
    expire_at_ms: int


class TransactionMachine(WriterMachine):
    """The rules are what clients do."""

    def __init__(self) -> None:
        super().__init__()
        self.sent: dict[bytes, Sent] = {}  # the last request with each key

    @rule(put=PUTS, condition=CONDITIONS, durability=DURABILITIES, key=IDEMPOTENCY_KEYS)
    def put(self, put: Put, condition: Compare | None, durability: Any, key: bytes) -> None:
        """One key is set, perhaps on a condition."""
        compares = [self.about(put.key, condition)] if condition else []
        request = kv_pb2.PutRequest(
            key=put.key,
            value=put.value,
            ttl_ms=put.ttl_ms,
            durability=durability,
            precondition=precondition_of(compares[0]) if compares else None,
        )
        self.send("put", request, Transaction([put], compares), key)

    @rule(delete=st.builds(Delete, KEYS), condition=CONDITIONS, durability=DURABILITIES)
    def delete(self, delete: Delete, condition: Compare | None, durability: Any) -> None:
        """One key is deleted, perhaps on a condition."""
        compares = [self.about(delete.key, condition)] if condition else []
        request = kv_pb2.DeleteRequest(
            key=delete.key,
            durability=durability,
            precondition=precondition_of(compares[0]) if compares else None,
        )
        self.send("delete", request, Transaction([delete], compares))

    @rule(keys=RANGES, durability=DURABILITIES, key=IDEMPOTENCY_KEYS)
    def delete_range(self, keys: KeyRange, durability: Any, key: bytes) -> None:
        """All keys of a range are deleted, perhaps all there are."""
        request = kv_pb2.DeleteRangeRequest(
            range=range_of(keys), all=not any(keys), durability=durability
        )
        self.send("delete_range", request, Transaction([DeleteRange(keys)]), key)

    @rule(
        changes=st.lists(PLAIN, min_size=1, max_size=5) | st.lists(CHANGES, min_size=1, max_size=5),
        durability=DURABILITIES,
        key=IDEMPOTENCY_KEYS,
    )
    def write(self, changes: list[Operation], durability: Any, key: bytes) -> None:
        """Several changes are made in one commit, to some keys more than once."""
        self.send("write", write_of(changes, durability), Transaction(changes), key)

    @rule(
        compares=st.lists(COMPARES, max_size=2),
        then=OPERATIONS,
        otherwise=OPERATIONS,
        durability=DURABILITIES,
        key=IDEMPOTENCY_KEYS,
    )
    def txn(
        self,
        compares: list[Compare],
        then: list[Operation],
        otherwise: list[Operation],
        durability: Any,
        key: bytes,
    ) -> None:
        """Something is compared, and then one branch or the other is done."""
        compares = [self.with_seq(compare) for compare in compares]
        if compares or then or otherwise:
            request = txn_of(compares, then, otherwise, durability)
            self.send("txn", request, Transaction(then, compares, otherwise), key)

    @rule(
        key=st.sampled_from([b"k1", b"k2"]),
        changes_durability=st.sampled_from([False, False, True]),
    )
    def repeat(self, key: bytes, changes_durability: bool) -> None:  # noqa: FBT001 - a parameter of the rule
        """A request that was sent before comes again, or one that only looks like it."""
        sent = self.sent.get(key)
        if sent is None:
            return
        request = type(sent.request).FromString(sent.request.SerializeToString())
        if changes_durability:
            request.durability = MEMORY if request.durability == DURABLE else DURABLE
        self.resend(sent, request, is_same=not changes_durability)

    @rule(duration_ms=st.sampled_from([WINDOW_MS // 3, WINDOW_MS, 2 * WINDOW_MS]))
    def pass_much_time(self, duration_ms: int) -> None:
        """Idempotency keys expire."""
        self.clock.pass_time(duration_ms)

    # --- what becomes of it --------------------------------------------------------------------

    def about(self, key: bytes, condition: Compare) -> Compare:
        """The condition, of this key."""
        compare = self.with_seq(condition)
        assert not isinstance(compare, EmptyCompare)
        return compare._replace(key=key)

    def with_seq(self, compare: Compare) -> Compare:
        """A comparison with a number that is there, if it is of a number."""
        if not isinstance(compare, SeqCompare):
            return compare
        seqs = sorted({1, self.last_seq, *(found.seq for found in self.newest().values())} - {0})
        return compare._replace(seq=seqs[compare.seq % len(seqs)])

    def send(self, method: str, request: Any, transaction: Transaction, key: bytes = b"") -> None:
        """A new request; one with a key that is in use is something else."""
        if key:
            request.header.idempotency_key = key
            sent = self.sent.get(key)
            if sent is not None and self.is_known(sent):
                is_same = (sent.method, sent.request) == (method, request)
                self.resend(sent, request, method=method, is_same=is_same)
                return
        log = self.now.writer.engine.log
        seq = log.next_seq
        assert seq > self.last_seq
        self.last_seq = seq
        now_ms = self.now_ms()
        outcome = decide(transaction, self.newest(), now_ms)
        taken = transaction.then if outcome.succeeded else (transaction.otherwise or ())
        is_judged = bool(transaction.rests_on_state or method == "txn")
        durability = DURABLE if is_judged else request.durability

        def check(reply: Any) -> None:
            assert reply.durability == durability
            check_results(reply, outcome, taken)

        if outcome.effects:
            self.now.pending[seq] = outcome.effects
            if transaction.rests_on_state:
                self.now.resting.add(seq)
        answer = self.call(getattr(self.now.writer.kv, method), request)
        assert log.next_seq == seq + 1
        asked = Asked(
            seq, outcome.effects, outcome.refused, transaction.rests_on_state, check, answer, key
        )
        if key:
            self.sent[key] = Sent(method, request, asked, now_ms + WINDOW_MS)
        self.wait_for(asked, is_from_memory=durability == MEMORY)
        if key and self.seeds.random() < 0.5:
            self.resend(self.sent[key], request, is_same=True)

    def wait_for(self, asked: Asked, *, is_from_memory: bool) -> None:
        """The answer comes from memory, or when all is durable."""
        self.see_what_was_not_held()
        if is_from_memory and asked.effects:
            assert asked.answer.done()
            self.check_answer(asked)
        elif is_from_memory:  # an empty range delete: its number is that of no commit
            asked.check(asked.answer.result())
        else:
            self.now.asked.append(asked)

    def resend(self, sent: Sent, request: Any, *, method: str | None = None, is_same: bool) -> None:
        """The same key again."""
        if not self.is_known(sent):
            return
        log = self.now.writer.engine.log
        next_seq = log.next_seq
        answer = self.call(getattr(self.now.writer.kv, method or sent.method), request)
        assert log.next_seq == next_seq, "applied twice"
        first = sent.asked
        is_durable = first.seq in self.landed
        if not is_same:
            assert isinstance(answer.exception(), KeyReused)
        elif is_durable and sent.expire_at_ms <= self.now_ms():
            assert isinstance(answer.exception(), KeyExpired)
        elif is_durable:
            reply = answer.result()
            assert reply.header.seq == first.seq
            assert reply.header.HasField("wal_id")
            first.check(reply)
        else:
            again = Asked(
                first.seq,
                first.effects,
                first.refused,
                first.rests_on_state,
                first.check,
                answer,
                first.idempotency_key,
            )
            is_plain = not first.rests_on_state and sent.method != "txn"
            self.wait_for(again, is_from_memory=is_plain and request.durability == MEMORY)

    def is_known(self, sent: Sent) -> bool:
        """Whether the writer knows the request: on its way, or remembered."""
        seq = sent.asked.seq
        if seq in self.landed and sent.asked.effects:
            return sent.expire_at_ms + WINDOW_MS > self.now_ms()
        if seq in self.now.pending:
            return True
        if not sent.asked.effects and any(before < seq for before in self.now.pending):
            return True  # it was answered from memory, and is settled behind those
        return sent.asked in self.now.asked and not sent.asked.answer.done()

    def record_landed(self, idempotency_key: bytes, seq: int) -> None:
        sent = self.sent[idempotency_key]
        assert sent.asked.seq == seq


TestWriterModel = TransactionMachine.TestCase
TestWriterModel.settings = settings(
    max_examples=150, stateful_step_count=40, deadline=None, derandomize=True
)


@pytest.mark.soak
@pytest.mark.timeout(3_600)
def test_writer_model_for_long() -> None:
    """The same, with many more and longer histories, drawn anew each time."""
    long = settings(max_examples=3_000, stateful_step_count=100, deadline=None, derandomize=False)
    run_state_machine_as_test(TransactionMachine, settings=long)
