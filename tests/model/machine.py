"""One database and the writers that come and go: what is held, lands, is lost, and read.

Uploads are held until the machine lets them go, in any order, so that writes are durable, in
memory, or lost in a crash when the machine says so. A writer that is taken over lives on as a
zombie, whose late uploads and writes must change nothing. Time passes when the machine says so.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from random import Random
from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from shalekv.core.entry import Kind
from shalekv.core.key_range import KeyRange
from shalekv.core.transaction import Delete, DeleteRange
from shalekv.errors import Fenced
from shalekv.format.idempotency import client_key
from shalekv.format.sst import open_sst
from shalekv.roles.database import create_database
from shalekv.roles.service import Call
from shalekv.roles.writer import Writer
from shalekv.runtime import Runtime
from shalekv.settings import (
    DatabaseSettings,
    LimitSettings,
    ServeSettings,
    StoreSettings,
    WriterSettings,
)
from shalekv.store.memory import MemoryObjects
from shalekv.v1 import kv_pb2
from tests.kit.engine.running_log import quiesce
from tests.kit.inline_runtime import InlineWorkers, gathered
from tests.kit.store import STORE_NOW_MS, HeldCreate, HeldStore
from tests.model.oracle import Effect, State, Version, contains, do, state_after, visible
from tests.model.strategies import ALL_KEYS, BOUNDS, KEYS, RANGES
from tests.model.writers import Asked, ModelClock, Running, check_found, check_scan

WINDOW_S = 60  # of idempotency keys
LEVELS = st.sampled_from(
    [kv_pb2.READ_LEVEL_COMMITTED, kv_pb2.READ_LEVEL_LINEARIZABLE, kv_pb2.READ_LEVEL_UNCOMMITTED]
)
CALL = Call(peer="model")


class WriterMachine(RuleBasedStateMachine):
    """`landed` is what must be found in the database."""

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.clock = ModelClock()
        self.objects = MemoryObjects()
        self.seeds = Random(5)
        self.landed: dict[int, Sequence[Effect]] = {}  # by sequence number
        self.last_seq = 0
        self.is_holding = False  # uploads
        self.zombies: list[Running] = []
        self.now: Running

    @initialize(k=st.integers(1, 3))
    def create(self, k: int) -> None:
        store = HeldStore(self.objects, folder="nothing/", now_ms=self.now_ms)
        create = create_database(store, self.runtime(), StoreSettings())
        self.loop.run_until_complete(create)
        self.open(k)

    def runtime(self) -> Runtime:
        """What one more process runs on."""
        return Runtime(self.clock, Random(self.seeds.getrandbits(64)), InlineWorkers())

    def now_ms(self) -> int:
        """The time of the store, which all processes go by."""
        return STORE_NOW_MS + int(self.clock.monotonic_ms())

    @rule(duration_ms=st.sampled_from([1, 10, 1_000]))
    def pass_time(self, duration_ms: int) -> None:
        """Time passes; nothing wakes up by itself in so little of it."""
        self.clock.pass_time(duration_ms)

    # --- openings ------------------------------------------------------------------------------

    def open(self, k: int) -> None:
        """Open the database with a new writer."""
        store = HeldStore(self.objects, now_ms=self.now_ms)
        store.is_holding = False
        serve = ServeSettings(
            database=DatabaseSettings(url="memory://model"),
            writer=WriterSettings(
                max_parallel_writes=k, flush_bytes=4_096, idempotency_window_s=WINDOW_S
            ),
            limits=LimitSettings(scan_message_bytes=1_024),
        )
        opening = Writer.open(store, settings=serve, runtime=self.runtime())
        writer = self.loop.run_until_complete(opening)
        store.is_holding = self.is_holding
        self.now = Running(writer, store, self.loop.create_task(writer.run()))
        self.turn()

    @rule(k=st.integers(1, 3), data=st.data())
    def crash(self, k: int, data: st.DataObject) -> None:
        """The process dies; of its uploads some take effect, and nobody hears of it."""
        for held in self.now.store.waiting:
            if data.draw(st.booleans(), label=f"{held.name} takes effect"):
                held.apply()
                self.has_landed(held)
        self.now.task.cancel()
        self.turn()
        self.open(k)

    @rule(k=st.integers(1, 3))
    def take_over(self, k: int) -> None:
        """Another writer opens while this one lives: what is still in flight is lost."""
        self.zombies.append(self.now)
        self.open(k)

    @rule(k=st.integers(1, 3))
    def close(self, k: int) -> None:
        """A graceful end makes everything durable that was accepted."""
        closed = self.now
        closed.writer.close()
        closed.store.let_go()
        self.loop.run_until_complete(closed.task)
        self.all_landed()
        self.turn()
        self.check_replies(closed)
        assert not closed.asked
        self.open(k)

    @precondition(lambda self: bool(self.zombies))
    @rule(key=KEYS)
    def zombie_acts(self, key: bytes) -> None:
        """A writer that was taken over is told so, and nothing of it becomes visible."""
        zombie = self.zombies.pop()
        zombie.store.let_go()
        put = self.call(zombie.writer.kv.put, kv_pb2.PutRequest(key=key, value=b"zombie"))
        self.turn()
        assert zombie.task.done()
        assert isinstance(zombie.task.exception(), Fenced)
        for answer in [*(asked.answer for asked in zombie.asked), put]:
            assert isinstance(answer.exception(), Fenced)

    # --- uploads -------------------------------------------------------------------------------

    @rule(is_holding=st.sampled_from([True, True, False]))
    def hold(self, is_holding: bool) -> None:  # noqa: FBT001 - a parameter of the rule
        """Uploads are held from now on, or not any more."""
        self.is_holding = self.now.store.is_holding = is_holding
        if not is_holding:
            while self.now.store.waiting or self.now.pending:
                self.release_one(0)

    @precondition(lambda self: bool(self.now.store.waiting))
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        """One upload lands, not always the oldest."""
        self.release_one(data.draw(st.integers(0, len(self.now.store.waiting) - 1)))

    def release_one(self, number: int) -> None:
        waiting = self.now.store.waiting
        if waiting:
            self.has_landed(waiting[number])
            waiting[number].release()
        self.turn()
        self.see_what_was_not_held()

    def see_what_was_not_held(self) -> None:
        """What was not held is durable by now."""
        if not self.now.store.is_holding and not self.now.store.waiting:
            self.all_landed()

    def has_landed(self, held: HeldCreate) -> None:
        """The model learns from an object's bytes which commits are in it; they are as they were.

        Raises if one of them is not what was asked for, or rests on one that is not durable.
        """
        sst = open_sst(held.name, held.data, database_id=None)
        points, ranges = list(sst.entries()), list(sst.range_tombstones())
        seqs = sorted({entry.seq for entry in [*points, *ranges]})
        not_durable = self.now.pending.keys() - set(seqs)
        for seq in seqs:
            assert seq not in self.now.resting or all(other > seq for other in not_durable)
            effects = self.now.pending.pop(seq)
            expected: State = {}
            do(expected, effects, seq)
            found = {e.key: Version(seq, e.value, e.expire_at_ms) for e in points if e.seq == seq}
            deleted = [KeyRange(entry.key, entry.value) for entry in ranges if entry.seq == seq]
            wanted = [effect.keys for effect in effects if isinstance(effect, DeleteRange)]
            for key in ALL_KEYS:
                if key in expected:
                    assert found.pop(key) == expected[key]
                assert any(contains(keys, key) for keys in deleted) == any(
                    contains(keys, key) for keys in wanted
                )
            assert found.keys() <= {e.key for e in effects if isinstance(e, Delete)}
            assert all(e.kind is Kind.TOMBSTONE for e in points if e.key in found and e.seq == seq)
            self.landed[seq] = effects
        for record in sst.system_entries():
            assert record.seq in self.landed
            self.record_landed(client_key(record.key), record.seq)

    def record_landed(self, idempotency_key: bytes, seq: int) -> None:
        """A machine that sends keys looks at them."""

    def all_landed(self) -> None:
        """Nothing is held: everything is durable."""
        self.landed |= self.now.pending
        self.now.pending.clear()

    # --- reads ---------------------------------------------------------------------------------

    @rule(key=KEYS, level=LEVELS)
    def get(self, key: bytes, level: Any) -> None:
        """One key is read."""
        request = kv_pb2.GetRequest(header=kv_pb2.RequestHeader(read_level=level), key=key)
        if self.waits(level):
            self.check_waits(self.now.writer.kv.get, request)
            return
        reply = self.ask(self.now.writer.kv.get, request)
        check_found(reply, self.visible(level).get(key))
        self.check_header(reply.header, level, [reply.seq])

    @rule(keys=st.lists(KEYS, min_size=1, max_size=4), level=LEVELS)
    def batch_get(self, keys: list[bytes], level: Any) -> None:
        """Some keys are read at one moment."""
        request = kv_pb2.BatchGetRequest(header=kv_pb2.RequestHeader(read_level=level), keys=keys)
        if self.waits(level):
            self.check_waits(self.now.writer.kv.batch_get, request)
            return
        reply = self.ask(self.now.writer.kv.batch_get, request)
        found = self.visible(level)
        for key, result in zip(keys, reply.results, strict=True):
            check_found(result, found.get(key))
        self.check_header(reply.header, level, [each.seq for each in reply.results])

    @rule(
        level=LEVELS,
        keys=RANGES,
        prefix=BOUNDS,
        reverse=st.booleans(),
        limit=st.integers(0, 4),
        limit_bytes=st.sampled_from([0, 0, 1, 5, 701]),
    )
    def scan(self, level: Any, keys: KeyRange, prefix: bytes, **limits: Any) -> None:
        """A range is read, either way, to its end or to a limit."""
        if self.waits(level):
            return
        if prefix:
            keys = KeyRange(b"", b"")
        request = kv_pb2.ScanRequest(
            header=kv_pb2.RequestHeader(read_level=level),
            range=kv_pb2.KeyRange(start=keys.start, end=keys.end, prefix=prefix),
            **limits,
        )
        replies = self.loop.run_until_complete(gathered(self.now.writer.kv.scan(request, CALL)))
        check_scan(replies, request, self.visible(level))
        for reply in replies:
            self.check_header(reply.header, level, [entry.seq for entry in reply.entries])

    def visible(self, level: Any) -> State:
        """What a read at this level sees."""
        is_newest = level == kv_pb2.READ_LEVEL_UNCOMMITTED
        return visible(self.newest() if is_newest else state_after(self.landed), self.now_ms())

    def newest(self) -> State:
        """Everything, durable or not."""
        return state_after(self.landed | self.now.pending)

    # --- calls and replies ---------------------------------------------------------------------

    def call(self, method: Callable[[Any, Call], Any], request: Any) -> asyncio.Future[Any]:
        """What a call answers, or will answer."""

        async def answer() -> Any:
            found = method(request, CALL)
            return await found if asyncio.iscoroutine(found) or asyncio.isfuture(found) else found

        answering = self.loop.create_task(answer())
        answering.add_done_callback(lambda done: done.cancelled() or done.exception())
        self.turn()
        return answering

    def ask(self, method: Callable[[Any, Call], Any], request: Any) -> Any:
        """What a call answers that nothing holds up."""
        return self.loop.run_until_complete(self.call(method, request))

    def waits(self, level: Any) -> bool:
        """Whether a read waits: an object has landed ahead of its turn."""
        is_whole = self.now.writer.engine.prefix.is_whole
        return level != kv_pb2.READ_LEVEL_UNCOMMITTED and not is_whole

    def check_waits(self, method: Callable[[Any, Call], Any], request: Any) -> None:
        """A read waits for the gap to close, and harms nobody when its caller gives up."""
        answering = self.call(method, request)
        assert not answering.done()
        answering.cancel()
        self.turn()

    def turn(self) -> None:
        """Everything that can run does so."""
        self.loop.run_until_complete(quiesce())

    def check_header(self, header: kv_pb2.ReplyHeader, level: int, seqs: list[int]) -> None:
        """The number in a header covers what is shown, and never goes down at one level."""
        assert header.epoch == self.now.writer.epoch
        assert header.seq >= max(seqs, default=0)
        assert header.seq >= self.now.shown_seq.get(level, 0)
        self.now.shown_seq[level] = header.seq

    def check_replies(self, running: Running) -> None:
        """Exactly those are answered of whom all that they rest on is durable."""
        for asked in list(running.asked):
            if asked.effects:
                is_due = asked.seq not in running.pending
            else:
                is_due = all(seq > asked.seq for seq in running.pending)
            if asked.answer.done():
                assert is_due or not (asked.effects or asked.rests_on_state)
                self.check_answer(asked)
                running.asked.remove(asked)
            else:
                assert not is_due

    def check_answer(self, asked: Asked) -> None:
        """The answer is what the oracle says, with the number of the commit, or of its view."""
        if asked.refused is not None:
            assert type(asked.answer.exception()) is asked.refused
            return
        reply = asked.answer.result()
        before = max((seq for seq in self.landed if seq < asked.seq), default=0)
        assert reply.header.seq == (asked.seq if asked.effects else before)
        asked.check(reply)

    @invariant()
    def replies_tell_what_is_durable(self) -> None:
        if hasattr(self, "now"):
            self.check_replies(self.now)
            assert not self.now.task.done()

    def teardown(self) -> None:
        if hasattr(self, "now"):
            for running in [self.now, *self.zombies]:
                running.task.cancel()
            self.turn()
        self.loop.close()
