"""A writer against a dictionary: after any operations, reads answer as a dict would.

Writes of every kind, with and without conditions and idempotency keys; see `writer_machine` for the
events of the writers meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    rule,
    run_state_machine_as_test,
)

from shalekv.errors import KeyExpired, KeyReused
from shalekv.server.service import Call
from shalekv.v1 import kv_pb2
from tests.kit.inline_runtime import gathered
from tests.kit.model import decide, rests_on_state
from tests.kit.serving.answers import scan_of
from tests.model.requests import (
    DURABLE,
    IDEMPOTENCY_KEYS,
    KEYS,
    MEMORY,
    METHODS,
    SCANS,
    batch_requests,
    check_count,
    check_life,
    check_reply,
    check_scan,
    count_of,
    got,
    one_key_requests,
    txn_requests,
    with_seqs,
)
from tests.model.writer_machine import CALL, WINDOW_MS, Asked, Sent, WriterMachine
from tests.sim.history import WriteResult

LEVELS = st.sampled_from(
    [kv_pb2.READ_LEVEL_COMMITTED, kv_pb2.READ_LEVEL_LINEARIZABLE, kv_pb2.READ_LEVEL_UNCOMMITTED]
)
DURABILITIES = st.sampled_from([DURABLE, MEMORY])


class ClientMachine(WriterMachine):
    """The rules are what clients do."""

    # --- reads ---------------------------------------------------------------------------------

    @rule(keys=st.lists(KEYS, min_size=1, max_size=4), level=LEVELS)
    def get(self, keys: list[bytes], level: Any) -> None:
        """One key is read, or some at one moment."""
        header, kv = kv_pb2.RequestHeader(read_level=level), self.now.writer.kv
        one = kv_pb2.GetRequest(header=header, key=keys[0])
        life = kv_pb2.GetRequest(header=header, key=keys[0], omit_value=True)
        many = kv_pb2.BatchGetRequest(header=header, keys=keys)
        if self.waits(level):
            self.check_waits(kv.get, one)
            self.check_waits(kv.batch_get, many)
            return
        now = self.moment_of_read(level)
        for reply in (self.ask(kv.get, one), self.ask(kv.batch_get, many)):
            results = [reply] if isinstance(reply, kv_pb2.GetReply) else reply.results
            assert [got(each) for each in results] == [now.got(key) for key in keys[: len(results)]]
            self.check_header(reply.header, level, [each.seq for each in results])
        check_life(self.ask(kv.get, life), now.got(keys[0]), now.now_ms)

    @rule(request=SCANS, level=LEVELS)
    def scan(self, request: kv_pb2.ScanRequest, level: Any) -> None:
        """A range is read, either way, to its end or to a limit."""
        if self.waits(level):
            return
        request.header.read_level = level
        now = self.moment_of_read(level)
        replies = self.loop.run_until_complete(gathered(scan_of(self.now.writer.kv, request, CALL)))
        check_scan(replies, request, now.visible())
        for reply in replies:
            self.check_header(reply.header, level, [entry.seq for entry in reply.entries])
        count = count_of(request)
        check_count(self.ask(self.now.writer.kv.count, count), count, now.visible())

    # --- writes --------------------------------------------------------------------------------

    @rule(request=one_key_requests(DURABILITIES), key=IDEMPOTENCY_KEYS)
    def change_one(self, request: Any, key: bytes) -> None:
        """One key is set or deleted, perhaps on a condition."""
        self.send(request, key)

    @rule(request=batch_requests(DURABILITIES), key=IDEMPOTENCY_KEYS)
    def change_many(self, request: Any, key: bytes) -> None:
        """Several changes are made in one commit, or all keys of a range are deleted."""
        self.send(request, key)

    @rule(request=txn_requests(DURABILITIES), key=IDEMPOTENCY_KEYS)
    def transact(self, request: Any, key: bytes) -> None:
        """Something is compared, and then one branch or the other is done."""
        self.send(request, key)

    @rule(
        key=st.sampled_from([b"k1", b"k2"]),
        changes_durability=st.sampled_from([False, False, True]),
    )
    def repeat(self, key: bytes, changes_durability: bool) -> None:  # noqa: FBT001 - a parameter of the rule
        """Send an earlier request again, or one that only resembles it."""
        sent = self.sent.get(key)
        if sent is None:
            return
        request = type(sent.request).FromString(sent.request.SerializeToString())
        if changes_durability:
            request.durability = MEMORY if request.durability == DURABLE else DURABLE
        self.resend(sent, request)

    def send(self, request: Any, key: bytes) -> None:
        """A new request; one with an idempotency key that is in use is something else."""
        moment = self.moment()
        found = moment.visible().values()
        with_seqs(request, [self.last_seq, *(each.seq for each in found)])
        if key:
            request.header.idempotency_key = key
            if key in self.sent and self.is_known(self.sent[key]):
                self.resend(self.sent[key], request)
                return
        log = self.now.writer.engine.log
        seq = log.next_seq
        assert seq > self.last_seq
        effect = decide(request, moment)
        is_write, rests = effect.writes, rests_on_state(request)
        is_judged = rests or isinstance(request, kv_pb2.TxnRequest)
        self.last_seq = seq
        if is_write:
            self.now.pending[seq] = effect.left
            if rests:
                self.now.resting.add(seq)
        answer = self.call(self.method(request), request)
        assert log.next_seq == seq + 1
        durability = DURABLE if is_judged else request.durability
        asked = Asked(seq, effect.answer, is_write, rests, durability, answer)
        if key:
            self.sent[key] = Sent(request, asked, moment.now_ms + WINDOW_MS)
        self.wait_for(asked, is_from_memory=durability == MEMORY)
        if key and self.seeds.random() < 0.5:
            self.resend(self.sent[key], request)

    def method(self, request: Any) -> Callable[[Any, Call], Any]:
        found: Callable[[Any, Call], Any] = getattr(self.now.writer.kv, METHODS[type(request)])
        return found

    def wait_for(self, asked: Asked, *, is_from_memory: bool) -> None:
        """The answer comes from memory, or when all is durable."""
        self.see_what_was_not_held()
        if is_from_memory and asked.writes:
            assert asked.answer.done()
            self.check_answer(asked)
        elif is_from_memory:  # an empty range delete: its number is that of no commit
            assert asked.answer.result().durability == asked.durability
        else:
            self.now.asked.append(asked)

    def resend(self, sent: Sent, request: Any) -> None:
        """A request with a known idempotency key: the same one, or another."""
        if not self.is_known(sent):
            return
        log = self.now.writer.engine.log
        next_seq = log.next_seq
        answer = self.call(self.method(request), request)
        assert log.next_seq == next_seq, "applied twice"
        first = sent.asked
        is_durable = first.seq in self.landed
        if sent.request != request:
            assert isinstance(answer.exception(), KeyReused)
        elif is_durable and sent.expire_at_ms <= self.now_ms():
            assert isinstance(answer.exception(), KeyExpired)
        elif is_durable:
            reply = answer.result()
            assert reply.header.seq == first.seq
            assert reply.header.HasField("wal_id")
            assert reply.durability == first.durability
            assert isinstance(first.expected, WriteResult)
            check_reply(reply, first.expected)
        else:
            again = replace(first, answer=answer)
            is_plain = not first.rests_on_state and not isinstance(request, kv_pb2.TxnRequest)
            self.wait_for(again, is_from_memory=is_plain and request.durability == MEMORY)

    def is_known(self, sent: Sent) -> bool:
        asked, pending = sent.asked, self.now.pending
        if asked.seq in self.landed and asked.writes:
            return sent.expire_at_ms + WINDOW_MS > self.now_ms()
        if asked.seq in pending:
            return True
        if not asked.writes and any(before < asked.seq for before in pending):
            return True  # it was answered from memory, and is settled behind those
        return asked in self.now.asked and not asked.answer.done()


TestWriterModel = ClientMachine.TestCase
TestWriterModel.settings = settings(
    max_examples=80, stateful_step_count=40, deadline=None, derandomize=True
)


@pytest.mark.soak
@pytest.mark.timeout(7_200)  # half an hour alone on 2 cores, more beside other tests
def test_writer_model_for_long() -> None:
    """The property of `test_writer_model` holds for many more and longer histories."""
    long = settings(max_examples=3_000, stateful_step_count=100, deadline=None, derandomize=False)
    run_state_machine_as_test(ClientMachine, settings=long)
