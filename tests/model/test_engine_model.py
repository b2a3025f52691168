"""A writer against a dictionary: whatever is done in whatever order, reads answer as a dict would.

Uploads are held until the machine lets them go, in any order, so that writes are durable, in
memory, or lost in a crash when the machine says so. A writer that is taken over lives on as a
zombie, whose late uploads and writes must change nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random
from typing import Any, NamedTuple

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from shalekv.clock import LoopClock
from shalekv.core.entry import Kind
from shalekv.errors import Fenced, ShaleError
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
from tests.unit.engine.held_store import HeldCreate, HeldStore
from tests.unit.engine.running_log import quiesce
from tests.unit.store.inline_runtime import InlineWorkers, gathered

LEVELS = st.sampled_from(
    [kv_pb2.READ_LEVEL_COMMITTED, kv_pb2.READ_LEVEL_LINEARIZABLE, kv_pb2.READ_LEVEL_UNCOMMITTED]
)
DURABILITIES = st.sampled_from([kv_pb2.DURABILITY_DURABLE, kv_pb2.DURABILITY_MEMORY])
KEYS = st.sampled_from(
    [b"a", b"ab", b"abc", b"b", b"b\xff", b"b\xff\xff", b"c", b"\xff", b"\xff\xff"]
)
VALUES = st.sampled_from([b"", b"1", b"2", b"x" * 700])
CHANGES = st.lists(st.tuples(KEYS, st.none() | VALUES), min_size=1, max_size=5)
BOUNDS = st.just(b"") | KEYS
CALL = Call(peer="model")


class Version(NamedTuple):
    """What a commit has made of a key; no value: deleted."""

    seq: int
    value: bytes | None


@dataclass(slots=True)
class Running:
    """A writer and what the model knows of it."""

    writer: Writer
    store: HeldStore
    task: asyncio.Task[None]
    # Commits that are not durable yet, by number, and the replies that are waited for.
    pending: dict[int, dict[bytes, Version]] = field(default_factory=dict)
    replies: dict[int, asyncio.Future[Any]] = field(default_factory=dict)
    shown_seq: dict[int, int] = field(default_factory=dict)  # by read level


class WriterMachine(RuleBasedStateMachine):
    """The rules are what can happen to a database; `durable` is what must be found in it."""

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.objects = MemoryObjects()
        self.seeds = Random(5)
        self.durable: dict[bytes, Version] = {}
        self.last_seq = 0
        self.zombies: list[Running] = []
        self.now: Running

    @initialize(k=st.integers(1, 3))
    def create(self, k: int) -> None:
        runtime = self.runtime()
        store = HeldStore(self.objects, folder="nothing/")
        self.loop.run_until_complete(create_database(store, runtime, StoreSettings()))
        self.open(k)

    def runtime(self) -> Runtime:
        """What one more process runs on."""
        return Runtime(LoopClock(), Random(self.seeds.getrandbits(64)), InlineWorkers())

    # --- openings ------------------------------------------------------------------------------

    def open(self, k: int) -> None:
        """Open the database with a new writer."""
        store = HeldStore(self.objects)
        store.is_holding = False
        serve = ServeSettings(
            database=DatabaseSettings(url="memory://model"),
            writer=WriterSettings(max_parallel_writes=k, flush_bytes=4_096),
            limits=LimitSettings(scan_message_bytes=1_024),
        )
        opening = Writer.open(store, settings=serve, runtime=self.runtime())
        writer = self.loop.run_until_complete(opening)
        self.now = Running(writer, store, self.loop.create_task(writer.run()))
        self.turn()

    @rule(k=st.integers(1, 3), data=st.data())
    def crash(self, k: int, data: st.DataObject) -> None:
        """The process dies; of its uploads some take effect, and nobody hears of it."""
        for held in self.now.store.waiting:
            if data.draw(st.booleans(), label=f"{held.name} takes effect"):
                held.apply()
                self.landed(held)
        self.now.task.cancel()
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
        self.check_replies(closed)
        assert not closed.replies
        self.open(k)

    @precondition(lambda self: bool(self.zombies))
    @rule(key=KEYS)
    def zombie_acts(self, key: bytes) -> None:
        """A writer that was taken over is told so, and nothing of it becomes visible."""
        zombie = self.zombies.pop()
        zombie.store.let_go()
        answer = self.ask(zombie.writer.kv.put, kv_pb2.PutRequest(key=key, value=b"zombie"))
        self.turn()
        assert zombie.task.done()
        assert isinstance(zombie.task.exception(), Fenced)
        for reply in [*zombie.replies.values(), answer]:
            assert isinstance(reply, Fenced) or isinstance(reply.exception(), Fenced)

    # --- writes --------------------------------------------------------------------------------

    @rule(is_holding=st.booleans())
    def hold(self, is_holding: bool) -> None:  # noqa: FBT001 - a parameter of the rule
        """Uploads are held from now on, or not any more."""
        self.now.store.is_holding = is_holding
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
            self.landed(waiting[number])
            waiting[number].release()
        self.turn()
        if not self.now.store.is_holding and not self.now.store.waiting:
            self.all_landed()

    @rule(key=KEYS, value=VALUES, durability=DURABILITIES)
    def put(self, key: bytes, value: bytes, durability: Any) -> None:
        """One key is set."""
        request = kv_pb2.PutRequest(key=key, value=value, durability=durability)
        self.submitted(self.ask(self.now.writer.kv.put, request), {key: value})

    @rule(key=KEYS, durability=DURABILITIES)
    def delete(self, key: bytes, durability: Any) -> None:
        """One key is deleted."""
        request = kv_pb2.DeleteRequest(key=key, durability=durability)
        self.submitted(self.ask(self.now.writer.kv.delete, request), {key: None})

    @rule(changes=CHANGES, durability=DURABILITIES)
    def batch(self, changes: list[tuple[bytes, bytes | None]], durability: Any) -> None:
        """Several keys are changed in one commit, some of them more than once."""
        messages = [
            kv_pb2.Change(delete=kv_pb2.DeleteChange(key=key))
            if value is None
            else kv_pb2.Change(put=kv_pb2.PutChange(key=key, value=value))
            for key, value in changes
        ]
        request = kv_pb2.WriteRequest(changes=messages, durability=durability)
        self.submitted(self.ask(self.now.writer.kv.write, request), dict(changes))

    def ask(self, method: Callable[[Any, Call], Any], request: Any) -> Any:
        """What a call answers: a reply, a future of one, or why it was refused at once."""

        async def call() -> Any:
            try:
                answer = method(request, CALL)
            except ShaleError as error:
                return error
            return await answer if asyncio.iscoroutine(answer) else answer

        return self.loop.run_until_complete(call())

    def submitted(self, answer: Any, changes: dict[bytes, bytes | None]) -> None:
        """The model hears of a commit; its number is known before its reply."""
        seq = self.now.writer.engine.log.next_seq - 1
        assert seq > self.last_seq
        self.last_seq = seq
        self.now.pending[seq] = {key: Version(seq, value) for key, value in changes.items()}
        if isinstance(answer, asyncio.Future):
            self.now.replies[seq] = answer
        else:
            assert answer.header.seq == seq
        if not self.now.store.is_holding:
            self.turn()
            if not self.now.store.waiting:
                self.all_landed()

    # --- reads ---------------------------------------------------------------------------------

    @rule(key=KEYS, level=LEVELS)
    def get(self, key: bytes, level: Any) -> None:
        """One key is read."""
        request = kv_pb2.GetRequest(header=kv_pb2.RequestHeader(read_level=level), key=key)
        reply = self.ask(self.now.writer.kv.get, request)
        version = self.visible(level).get(key)
        if version is None or version.value is None:
            assert not reply.found
        else:
            assert (reply.found, reply.value, reply.seq) == (True, version.value, version.seq)
        self.check_header(reply.header, level, [reply.seq])

    @rule(keys=st.lists(KEYS, min_size=1, max_size=4), level=LEVELS)
    def batch_get(self, keys: list[bytes], level: Any) -> None:
        """Some keys are read at one moment."""
        request = kv_pb2.BatchGetRequest(header=kv_pb2.RequestHeader(read_level=level), keys=keys)
        reply = self.ask(self.now.writer.kv.batch_get, request)
        visible = self.visible(level)
        expected = [visible.get(key, Version(0, None)).value for key in keys]
        assert [each.value if each.found else None for each in reply.results] == expected
        self.check_header(reply.header, level, [each.seq for each in reply.results])

    @rule(
        level=LEVELS,
        start=BOUNDS,
        end=BOUNDS,
        prefix=BOUNDS,
        reverse=st.booleans(),
        limit=st.integers(0, 4),
        limit_bytes=st.sampled_from([0, 0, 1, 5, 701]),
    )
    def scan(self, level: Any, start: bytes, end: bytes, prefix: bytes, **limits: Any) -> None:
        """A range is read, either way, to its end or to a limit."""
        if level != kv_pb2.READ_LEVEL_UNCOMMITTED and self.has_gap():
            return  # it would wait for the gap to close
        if end and start > end:
            start, end = end, start
        if prefix:
            start = end = b""
        request = kv_pb2.ScanRequest(
            header=kv_pb2.RequestHeader(read_level=level),
            range=kv_pb2.KeyRange(start=start, end=end, prefix=prefix),
            **limits,
        )
        replies = self.loop.run_until_complete(gathered(self.now.writer.kv.scan(request, CALL)))
        entries = [entry for reply in replies for entry in reply.entries]
        wanted: list[tuple[bytes, bytes | None]] = [
            (key, version.value)
            for key, version in sorted(self.visible(level).items(), reverse=request.reverse)
            if version.value is not None
            and key.startswith(prefix)
            and key >= start
            and (not end or key < end)
        ]
        expected = cut(wanted, request.limit, request.limit_bytes)
        assert [(entry.key, entry.value) for entry in entries] == expected
        assert replies[-1].more == (len(expected) < len(wanted))
        for reply in replies:
            self.check_header(reply.header, level, [entry.seq for entry in reply.entries])

    # --- the model -----------------------------------------------------------------------------

    def visible(self, level: Any) -> dict[bytes, Version]:
        """What a read at this level sees."""
        found = dict(self.durable)
        if level == kv_pb2.READ_LEVEL_UNCOMMITTED:
            for seq in sorted(self.now.pending):
                for key, version in self.now.pending[seq].items():
                    if key not in found or found[key].seq < seq:
                        found[key] = version
        return found

    def apply(self, versions: dict[bytes, Version]) -> None:
        """A commit is durable; a greater number wins."""
        for key, version in versions.items():
            if key not in self.durable or self.durable[key].seq < version.seq:
                self.durable[key] = version

    def landed(self, held: HeldCreate) -> None:
        """The model learns from an object's bytes which commits are in it."""
        entries = list(open_sst(held.name, held.data, database_id=None).entries())
        for entry in entries:
            value = entry.value if entry.kind is Kind.PUT else None
            assert self.now.pending[entry.seq][entry.key] == Version(entry.seq, value)
        for seq in {entry.seq for entry in entries}:
            self.apply(self.now.pending.pop(seq))

    def all_landed(self) -> None:
        """Nothing is held: everything is durable."""
        for seq in sorted(self.now.pending):
            self.apply(self.now.pending.pop(seq))

    def has_gap(self) -> bool:
        """Whether an object has landed ahead of its turn."""
        prefix = self.now.writer.engine.prefix
        return prefix.seq < prefix.landed_seq

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
        """Exactly the commits that are durable were acknowledged."""
        for seq, reply in list(running.replies.items()):
            if seq not in running.pending:
                assert reply.done()
                assert reply.result().header.seq == seq
                del running.replies[seq]
            else:
                assert not reply.done()

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


def cut(
    wanted: list[tuple[bytes, bytes | None]], limit: int, limit_bytes: int
) -> list[tuple[bytes, bytes | None]]:
    """What the limits leave."""
    kept: list[tuple[bytes, bytes | None]] = []
    size_bytes = 0
    for key, value in wanted:
        if (limit and len(kept) >= limit) or (limit_bytes and size_bytes >= limit_bytes):
            break
        kept.append((key, value))
        size_bytes += len(key) + len(value or b"")
    return kept


TestWriterModel = WriterMachine.TestCase
TestWriterModel.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
