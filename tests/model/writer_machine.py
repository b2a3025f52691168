"""Successive writers of one database, and the model's knowledge of them.

Uploads are held until the machine releases them, in any order, so that it decides which writes are
durable, in memory, or lost in a crash. A writer that is taken over lives on as a zombie, whose late
uploads and writes must change nothing. Time passes when the machine moves it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from shalekv.clock import LoopClock
from shalekv.errors import Fenced
from shalekv.format.records import client_key
from shalekv.format.sst import open_sst
from shalekv.protocol.entry import Kind
from shalekv.runtime import Runtime
from shalekv.server.database import create_database
from shalekv.server.service import Call
from shalekv.server.writer import Writer
from shalekv.settings import (
    DatabaseSettings,
    LimitSettings,
    StoreSettings,
    WriterConfig,
    WriterSettings,
)
from shalekv.store.memory import MemoryObjects
from shalekv.v1 import kv_pb2
from tests.kit.engine.running_log import quiesce
from tests.kit.inline_runtime import InlineWorkers
from tests.kit.model import Left, Moment, Timeline
from tests.kit.serving.answers import parsed
from tests.kit.store import STORE_NOW_MS, HeldCreate, HeldStore
from tests.model.requests import (
    ALL_KEYS,
    KEYS,
    check_refusal,
    check_reply,
)
from tests.sim.history import Refusal, WriteResult

WINDOW_MS = 60_000  # of idempotency keys
CALL = Call(peer="model")


class ModelClock(LoopClock):
    """A clock that shows what the machine sets; waits take the time that they take."""

    def __init__(self) -> None:
        self._now_ms = 0

    def monotonic_ms(self) -> float:
        return self._now_ms

    def pass_time(self, duration_ms: int) -> None:
        self._now_ms += duration_ms


@dataclass(slots=True, eq=False)
class Asked:
    """A write whose caller waits, or waited, for the answer."""

    seq: int
    expected: WriteResult | Refusal  # by the model
    writes: bool
    rests_on_state: bool
    durability: Any
    answer: asyncio.Future[Any]


@dataclass(slots=True)
class Sent:
    """A request that was sent with an idempotency key."""

    request: Any
    asked: Asked
    expire_at_ms: int


@dataclass(slots=True)
class Running:
    """A writer and the model's knowledge of it."""

    writer: Writer
    store: HeldStore
    task: asyncio.Task[None]
    pending: dict[int, Left] = field(default_factory=dict)  # not durable, by sequence number
    resting: set[int] = field(default_factory=set)  # those that depend on all before them
    asked: list[Asked] = field(default_factory=list)  # not answered
    shown_seq: dict[int, int] = field(default_factory=dict)  # by read level


class WriterMachine(RuleBasedStateMachine):
    """`landed` is what must be found in the database."""

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.clock = ModelClock()
        self.objects = MemoryObjects()
        self.seeds = Random(5)
        self.landed: dict[int, Left] = {}  # by sequence number
        self.last_seq = 0
        self.is_holding = False  # uploads
        self.zombies: list[Running] = []
        self.sent: dict[bytes, Sent] = {}  # the last request with each idempotency key
        self.now: Running

    @initialize(k=st.integers(1, 3))
    def create(self, k: int) -> None:
        store = HeldStore(self.objects, folder="nothing/", now_ms=self.now_ms)
        create = create_database(store, self.runtime(), StoreSettings())
        self.loop.run_until_complete(create)
        self.open(k)

    def runtime(self) -> Runtime:
        return Runtime(self.clock, Random(self.seeds.getrandbits(64)), InlineWorkers())

    def now_ms(self) -> int:
        """The time of the store, by which all processes go."""
        return STORE_NOW_MS + int(self.clock.monotonic_ms())

    @rule(duration_ms=st.sampled_from([1, 10, 1_000, WINDOW_MS // 3, WINDOW_MS, 2 * WINDOW_MS]))
    def pass_time(self, duration_ms: int) -> None:
        """Values and idempotency keys expire; nothing wakes up by itself."""
        self.clock.pass_time(duration_ms)

    # --- openings ------------------------------------------------------------------------------

    def open(self, k: int) -> None:
        store = HeldStore(self.objects, now_ms=self.now_ms)
        store.is_holding = False
        serve = WriterConfig(
            database=DatabaseSettings(url="memory://model"),
            writer=WriterSettings(
                max_parallel_writes=k,
                flush_bytes=4_096,
                idempotency_window_s=WINDOW_MS // 1_000,
                expiry_sweep_interval_ms=0,  # it would wake up by itself, and take a number
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
        """The process dies; some of its uploads take effect, unheard."""
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
        closed.store.release_all()
        self.loop.run_until_complete(closed.task)
        self.all_landed()
        self.turn()
        self.check_replies(closed)
        assert not closed.asked
        self.open(k)

    @precondition(lambda self: bool(self.zombies))
    @rule(key=KEYS)
    def zombie_acts(self, key: bytes) -> None:
        """Calls to an overtaken writer end as fenced, and nothing of it becomes visible."""
        zombie = self.zombies.pop()
        zombie.store.release_all()
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
        if not self.now.store.is_holding and not self.now.store.waiting:
            self.all_landed()

    def has_landed(self, held: HeldCreate) -> None:
        """Learn from an object which commits are in it, and check that they are as they were asked
        for, and that none rests on one that is not durable.
        """
        sst = open_sst(held.name, held.data, database_id=None)
        points, ranges = list(sst.entries()), list(sst.range_tombstones())
        seqs = sorted({entry.seq for entry in [*points, *ranges]})
        not_durable = self.now.pending.keys() - set(seqs)
        for seq in seqs:
            assert seq not in self.now.resting or all(other > seq for other in not_durable)
            left = self.now.pending.pop(seq)
            found = {e.key: e for e in points if e.seq == seq}
            deleted = [(e.key, e.value) for e in ranges if e.seq == seq]
            for key in ALL_KEYS:
                point = found.pop(key, None)
                is_deleted = any(s <= key and (not end or key < end) for s, end in deleted)
                if key not in left:
                    assert point is None
                    assert not is_deleted
                elif point is not None and point.kind is Kind.PUT:
                    assert left[key] == (point.value, point.expire_at_ms)
                else:
                    assert left[key] == (None, 0)
                    assert point is not None or is_deleted
            assert not found
            self.landed[seq] = left
        for record in sst.system_entries():
            assert record.seq in self.landed
            assert self.sent[client_key(record.key)].asked.seq == record.seq

    def all_landed(self) -> None:
        self.landed |= self.now.pending
        self.now.pending.clear()

    def moment(self, level: Any = kv_pb2.READ_LEVEL_UNCOMMITTED) -> Moment:
        is_newest = level == kv_pb2.READ_LEVEL_UNCOMMITTED
        commits = self.landed | self.now.pending if is_newest else self.landed
        return Moment(Timeline.of(ALL_KEYS, commits), self.last_seq, self.now_ms())

    def moment_of_read(self, level: Any) -> Moment:
        """Return what a read shows: no value expires that a pending transaction has found."""
        moment, reads_ms = self.moment(level), self.now.writer.engine.now_ms()
        assert reads_ms <= moment.now_ms
        assert reads_ms == moment.now_ms or self.now.pending or self.now.asked
        return replace(moment, now_ms=reads_ms)

    # --- calls and replies ---------------------------------------------------------------------

    def call(self, method: Callable[[Any, Call], Any], request: Any) -> asyncio.Future[Any]:
        async def answer() -> Any:
            found = method(request, CALL)
            return parsed(request, await found if isinstance(found, Awaitable) else found)

        answering = self.loop.create_task(answer())
        answering.add_done_callback(lambda done: done.cancelled() or done.exception())
        self.turn()
        return answering

    def ask(self, method: Callable[[Any, Call], Any], request: Any) -> Any:
        return self.loop.run_until_complete(self.call(method, request))

    def waits(self, level: Any) -> bool:
        is_whole = self.now.writer.engine.watermark.is_whole
        return level != kv_pb2.READ_LEVEL_UNCOMMITTED and not is_whole

    def check_waits(self, method: Callable[[Any, Call], Any], request: Any) -> None:
        """Check that a read waits for the gap to close, and that its cancellation has no effect."""
        answering = self.call(method, request)
        assert not answering.done()
        answering.cancel()
        self.turn()

    def turn(self) -> None:
        self.loop.run_until_complete(quiesce())

    def check_header(self, header: kv_pb2.ReplyHeader, level: int, seqs: list[int]) -> None:
        """The number in a header covers what is shown, and never goes down at one level."""
        assert header.epoch == self.now.writer.epoch
        assert header.seq >= max([self.now.shown_seq.get(level, 0), *seqs])
        self.now.shown_seq[level] = header.seq

    def check_replies(self, running: Running) -> None:
        """Check that exactly those are answered whose dependencies are all durable."""
        for asked in list(running.asked):
            if asked.writes:
                is_due = asked.seq not in running.pending
            else:
                is_due = all(seq > asked.seq for seq in running.pending)
            if asked.answer.done():
                assert is_due or not (asked.writes or asked.rests_on_state)
                self.check_answer(asked)
                running.asked.remove(asked)
            else:
                assert not is_due

    def check_answer(self, asked: Asked) -> None:
        """The answer is the model's, with the number of the commit, or of its view."""
        if isinstance(asked.expected, Refusal):
            check_refusal(asked.answer.exception(), asked.expected)
            return
        reply = asked.answer.result()
        before = max((seq for seq in self.landed if seq < asked.seq), default=0)
        assert reply.header.seq == (asked.seq if asked.writes else before)
        assert reply.durability == asked.durability
        check_reply(reply, asked.expected)

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
