"""A whole database against a dictionary: compacted, collected, replicated and loaded.

All writes are durable when they are answered; `test_writer` covers those in flight. Reads of a
writer, a replica and a snapshot are compared with a dictionary to which the same commits were
applied.
"""

from __future__ import annotations

from contextlib import nullcontext, suppress
from typing import Any, NamedTuple

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from shalekv.errors import KeyReused, ShaleError, SnapshotNotFound
from shalekv.format.sst_message import info_message
from shalekv.protocol.entry import Entry, Kind
from shalekv.v1 import admin_pb2, kv_pb2
from tests.kit.model import Left, Moment, Timeline, decide
from tests.model.requests import (
    ALL_KEYS,
    CHANGES,
    DURABLE,
    IDEMPOTENCY_KEYS,
    KEYS,
    LIVES_MS,
    METHODS,
    SCANS,
    VALUES,
    batch_requests,
    check_count,
    check_refusal,
    check_reply,
    check_scan,
    count_of,
    got,
    one_key_requests,
    txn_requests,
    with_seqs,
)
from tests.model.whole_database import WholeDatabase
from tests.sim.history import Got, Refusal, WriteResult

LEVELS = st.sampled_from([kv_pb2.READ_LEVEL_COMMITTED, kv_pb2.READ_LEVEL_LINEARIZABLE])
DURABILITIES = st.just(DURABLE)
SEEDS = st.integers(0, 255)  # of settings
SNAPSHOTS_MAX = 3
# Large enough for more than one level, and smaller than what passes the memtable.
LAYERED = st.one_of(
    st.builds(
        lambda key, value, ttl_ms: {"put": {"key": key, "value": value, "ttl_ms": ttl_ms}},
        KEYS,
        st.sampled_from([b"y" * 90, b"z" * 400]),
        LIVES_MS,
    ),
    st.builds(lambda key: {"delete": {"key": key}}, KEYS),
)


class Sent(NamedTuple):
    """A request with an idempotency key, and the first answer to it."""

    request: Any
    reply: Any


class DatabaseMachine(RuleBasedStateMachine):
    """`commits` is what must be found in the database."""

    def __init__(self) -> None:
        super().__init__()
        self.database = WholeDatabase()
        self.commits: dict[int, Left] = {}  # by sequence number
        self.timeline = Timeline(ALL_KEYS)
        self.last_seq = 0
        self.sent: dict[bytes, Sent] = {}
        self.snapped: dict[bytes, dict[bytes, Got]] = {}
        self.loads_count = self.snaps_count = 0

    @initialize(seed=SEEDS)
    def create(self, seed: int) -> None:
        self.database.create()
        self.database.open(seed)

    # --- what goes on beside -------------------------------------------------------------------

    @rule(duration_ms=st.sampled_from([1, 30, 1_000, 20_000]))
    def pass_time(self, duration_ms: int) -> None:
        """Values expire, ages are reached, and what waits wakes up."""
        self.database.pass_ms(duration_ms)

    @rule(seed=SEEDS)
    def compact(self, seed: int) -> None:
        """The log and the levels are merged as far as these settings want."""
        self.database.compact(seed)

    @rule(seed=SEEDS)
    def collect(self, seed: int) -> None:
        """Delete what is not needed."""
        self.database.collect(seed)

    @rule(seed=SEEDS)
    def reopen(self, seed: int) -> None:
        """A graceful end, and another opening."""
        self.database.end_writer()
        self.database.open(seed)

    @rule(
        seed=SEEDS,
        changes=st.lists(CHANGES, min_size=1, max_size=3),
        after_ms=st.sampled_from([0, 1, 20]),
    )
    def crash(self, seed: int, changes: Any, after_ms: int) -> None:
        """Lose the writer's memory, in the middle of a write whose answer is lost."""
        request = kv_pb2.WriteRequest(changes=changes, durability=DURABLE)
        effect = decide(request, self.now())
        is_write = effect.writes
        asked = self.database.begin("write", request)
        self.database.pass_ms(after_ms)
        if asked.done() and isinstance(effect.answer, Refusal):
            check_refusal(asked.exception(), effect.answer)
        elif asked.done() and is_write:
            self.landed(effect.left, asked.result().header.seq)
        self.database.crash_writer()
        self.database.open(seed)
        if not asked.done() and is_write:
            self.see_whether_applied(effect.left)

    def see_whether_applied(self, left: Left) -> None:
        """A write that was cut off is there as a whole, or not at all."""
        replies = self.database.scan(kv_pb2.ScanRequest())
        shown = {e.key: Got(e.value, e.seq, e.expire_at_ms) for r in replies for e in r.entries}
        newer = {each.seq for each in shown.values() if each.seq > self.last_seq}
        assert len(newer) <= 1
        seq = min(newer, default=replies[0].header.seq)
        if seq <= self.last_seq:
            return
        applied = Timeline.of(ALL_KEYS, self.commits | {seq: left})
        if shown == Moment(applied, seq, self.database.now_ms).visible():
            self.landed(left, seq)

    @invariant()
    def all_is_there(self) -> None:
        """The writer shows everything, and nothing has ended by itself."""
        if hasattr(self.database, "writer"):
            self.database.check_alive()
            request = kv_pb2.ScanRequest()
            check_scan(self.database.scan(request), request, self.now().visible())

    def teardown(self) -> None:
        self.database.close()

    def now(self) -> Moment:
        return Moment(self.timeline, self.last_seq, self.database.now_ms)

    def landed(self, left: Left, seq: int) -> None:
        assert seq > self.last_seq
        self.commits[seq] = left
        self.timeline.append(seq, left)
        self.last_seq = seq

    # --- writes --------------------------------------------------------------------------------

    @rule(request=one_key_requests(DURABILITIES), key=IDEMPOTENCY_KEYS)
    def change_one(self, request: Any, key: bytes) -> None:
        """One key is set or deleted, perhaps on a condition."""
        self.send(request, key)

    @rule(request=batch_requests(DURABILITIES), key=IDEMPOTENCY_KEYS)
    def change_many(self, request: Any, key: bytes) -> None:
        """Several changes in one commit; a large one becomes files of the levels at once."""
        self.send(request, key)

    @rule(request=txn_requests(DURABILITIES), key=IDEMPOTENCY_KEYS)
    def transact(self, request: Any, key: bytes) -> None:
        """Something is compared, and then one branch or the other is done."""
        self.send(request, key)

    def send(self, request: Any, key: bytes = b"") -> None:
        """A request, which is new unless its idempotency key is in use."""
        found = self.now().visible().values()
        with_seqs(request, [self.last_seq, *(each.seq for each in found)])
        if key:
            request.header.idempotency_key = key
            if key in self.sent:
                self.resend(request, self.sent[key])
                return
        effect = decide(request, self.now())
        try:
            reply = self.database.ask(METHODS[type(request)], request)
        except ShaleError as error:
            assert isinstance(effect.answer, Refusal), error  # noqa: PT017 - raised or not, the model knows
            check_refusal(error, effect.answer)
            return
        assert isinstance(effect.answer, WriteResult)
        check_reply(reply, effect.answer)
        if effect.writes:
            self.landed(effect.left, reply.header.seq)
            if key:
                self.sent[key] = Sent(request, reply)

    @rule(key=st.sampled_from([b"k1", b"k2"]))
    def repeat(self, key: bytes) -> None:
        """A request that was applied comes again: it gets the first answer, and does nothing."""
        if key in self.sent:
            self.resend(self.sent[key].request, self.sent[key])

    def resend(self, request: Any, sent: Sent) -> None:
        """The same idempotency key again; with something else it is refused."""
        method = METHODS[type(request)]
        if request != sent.request:
            with pytest.raises(KeyReused):
                self.database.ask(method, request)
            return
        reply = self.database.ask(method, request)
        assert reply.header.seq == sent.reply.header.seq
        reply.header.CopyFrom(sent.reply.header)  # it names the process that answers, too
        assert reply == sent.reply

    @rule(
        batches=st.lists(st.lists(LAYERED, min_size=1, max_size=4), min_size=3, max_size=6),
        seeds=st.lists(SEEDS, min_size=6, max_size=6),
        wait_ms=st.sampled_from([1, 2_000]),
    )
    def pile_up(self, batches: list[Any], seeds: list[int], wait_ms: int) -> None:
        """Commit after commit is compacted, so that levels have something above and below them."""
        for changes, seed in zip(batches, seeds, strict=False):
            self.send(kv_pb2.WriteRequest(changes=changes, durability=DURABLE))
            self.pass_time(wait_ms)
            self.compact(seed)

    @rule(values=st.dictionaries(KEYS, st.none() | VALUES, min_size=1, max_size=4))
    def load(self, values: dict[bytes, bytes | None]) -> None:
        """Load a file of puts and tombstones that another process has written."""
        entries = [
            Entry(key, 0, Kind.TOMBSTONE if value is None else Kind.PUT, value or b"")
            for key, value in sorted(values.items())
        ]
        info = self.database.write_file(entries)
        self.loads_count += 1
        request = admin_pb2.IngestSstRequest(
            load_id=f"load{self.loads_count}", ssts=[info_message(info)]
        )
        reply = self.database.administer("ingest_sst", request)
        self.landed({key: (value, 0) for key, value in values.items()}, reply.header.seq)
        assert self.database.administer("ingest_sst", request).already_applied

    # --- reads ---------------------------------------------------------------------------------

    @rule(keys=st.lists(KEYS, min_size=1, max_size=4), level=LEVELS)
    def get(self, keys: list[bytes], level: Any) -> None:
        """Some keys are read, together and one by one."""
        header, now = kv_pb2.RequestHeader(read_level=level), self.now()
        together = self.database.ask("batch_get", kv_pb2.BatchGetRequest(header=header, keys=keys))
        alone = [
            self.database.ask("get", kv_pb2.GetRequest(header=header, key=key)) for key in keys
        ]
        for replies in (together.results, alone):
            assert [got(each) for each in replies] == [now.got(key) for key in keys]

    @rule(request=SCANS, level=LEVELS)
    def scan(self, request: kv_pb2.ScanRequest, level: Any) -> None:
        """A range is read, either way, to its end or to a limit."""
        request.header.read_level = level
        check_scan(self.database.scan(request), request, self.now().visible())
        count = count_of(request)
        check_count(self.database.ask("count", count), count, self.now().visible())

    # --- snapshots -----------------------------------------------------------------------------

    @precondition(lambda self: len(self.snapped) < SNAPSHOTS_MAX)
    @rule()
    def snap(self) -> None:
        """A snapshot holds all that was acknowledged, and will show it as it is now."""
        now = self.now().visible()
        self.snaps_count += 1
        name = f"snapshot{self.snaps_count}"
        request = admin_pb2.CreateSnapshotRequest(name=name, forever=True)
        made = self.database.snapshots("create", request).snapshot
        assert made.seq >= self.last_seq
        self.snapped[made.id] = now

    @precondition(lambda self: bool(self.snapped))
    @rule(data=st.data(), request=SCANS, key=KEYS)
    def read_snapshot(self, data: st.DataObject, request: kv_pb2.ScanRequest, key: bytes) -> None:
        """A snapshot shows for ever what was there when it was made."""
        snapshot_id = data.draw(st.sampled_from(sorted(self.snapped)))
        then = self.snapped[snapshot_id]
        request.header.snapshot_id = snapshot_id
        get = kv_pb2.GetRequest(header=request.header, key=key)
        check_scan(self.database.scan(request), request, then)
        check_count(self.database.ask("count", count_of(request)), count_of(request), then)
        assert got(self.database.ask("get", get)) == then.get(key, Got())
        if self.database.reader is not None:
            check_scan(self.database.scan_replica(request), request, then)

    @precondition(lambda self: bool(self.snapped))
    @rule(data=st.data())
    def drop_snapshot(self, data: st.DataObject) -> None:
        """A snapshot is deleted, and may be collected."""
        snapshot_id = data.draw(st.sampled_from(sorted(self.snapped)))
        del self.snapped[snapshot_id]
        self.database.snapshots("delete", admin_pb2.DeleteSnapshotRequest(id=snapshot_id))

    # --- replicas ------------------------------------------------------------------------------

    @rule(seed=SEEDS)
    def start_replica(self, seed: int) -> None:
        """A replica joins; one that was there is gone."""
        self.database.start_replica(seed)

    @precondition(lambda self: self.database.reader is not None)
    @rule()
    def crash_replica(self) -> None:
        """The replica is gone."""
        self.database.crash_replica()

    @precondition(lambda self: self.database.reader is not None)
    @rule(request=SCANS, key=KEYS, waits=st.booleans())
    def read_replica(self, request: kv_pb2.ScanRequest, key: bytes, waits: bool) -> None:  # noqa: FBT001 - a parameter of the rule
        """A replica shows a state that was there, and the newest one if that is asked for.

        Without a snapshot, what it reads may be gone, and it says so.
        """
        is_protected = self.database.is_replica_protected
        with nullcontext() if is_protected else suppress(SnapshotNotFound):
            self.check_replica(request, key, waits=waits)

    def check_replica(self, request: kv_pb2.ScanRequest, key: bytes, *, waits: bool) -> None:
        get = kv_pb2.GetRequest(key=key)
        if waits:
            get.header.min_seq = request.header.min_seq = self.last_seq
            self.database.ask_replica("get", get)  # it has seen that now
        reader = self.database.reader
        assert reader is not None
        now_ms = reader.engine.now_ms()
        replies = self.database.scan_replica(request)
        seq = replies[0].header.seq
        assert not waits or seq >= self.last_seq
        then = Moment(self.timeline, seq, now_ms)
        check_scan(replies, request, then.visible())
        assert got(self.database.ask_replica("get", get)) == then.got(key)


TestDatabaseModel = DatabaseMachine.TestCase
TestDatabaseModel.settings = settings(
    max_examples=20, stateful_step_count=40, deadline=None, derandomize=True
)


@pytest.mark.soak
@pytest.mark.timeout(7_200)  # half an hour alone on 2 cores, more beside other tests
def test_database_model_for_long() -> None:
    """The property of `test_database_model` holds for many more and longer histories."""
    long = settings(max_examples=2_000, stateful_step_count=100, deadline=None, derandomize=False)
    run_state_machine_as_test(DatabaseMachine, settings=long)
