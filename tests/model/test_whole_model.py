"""A whole database against a dictionary: whatever is merged, collected, replicated or loaded.

Here all writes are durable when they are answered; what is in flight is the subject of
`test_engine_model`. What a writer, a replica and a snapshot show is compared with what a dictionary
holds on which the same commits were done.
"""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    precondition,
    rule,
    run_state_machine_as_test,
)

from shalekv.core.entry import Entry, Kind
from shalekv.core.key_range import KeyRange
from shalekv.core.transaction import (
    Compare,
    Delete,
    DeleteRange,
    Operation,
    Put,
    Transaction,
)
from shalekv.format.sst_message import info_message
from shalekv.v1 import admin_pb2, kv_pb2
from tests.model.messages import precondition_of, range_of, txn_of, write_of
from tests.model.oracle import (
    Effect,
    Written,
    visible,
)
from tests.model.strategies import (
    BOUNDS,
    CHANGES,
    COMPARES,
    CONDITIONS,
    IDEMPOTENCY_KEYS,
    KEYS,
    LIVES_MS,
    OPERATIONS,
    PLAIN,
    PUTS,
    RANGES,
    VALUES,
)
from tests.model.whole_machine import DURABLE, SEEDS, WholeMachine
from tests.model.writers import check_found, check_scan

LEVELS = st.sampled_from([kv_pb2.READ_LEVEL_COMMITTED, kv_pb2.READ_LEVEL_LINEARIZABLE])
SNAPSHOTS_MAX = 3
# Large enough for more than one level, and smaller than what passes the memtable.
LAYERED = st.builds(Put, KEYS, st.sampled_from([b"y" * 90, b"z" * 400]), LIVES_MS) | st.builds(
    Delete, KEYS
)
SCANS = st.builds(
    kv_pb2.ScanRequest,
    range=st.one_of(
        RANGES.map(range_of), BOUNDS.map(lambda prefix: kv_pb2.KeyRange(prefix=prefix))
    ),
    reverse=st.booleans(),
    limit=st.integers(0, 4),
    limit_bytes=st.sampled_from([0, 0, 1, 5, 701]),
)


class ClientMachine(WholeMachine):
    """The rules are what clients do."""

    # --- writes --------------------------------------------------------------------------------

    @rule(put=PUTS, condition=CONDITIONS, key=IDEMPOTENCY_KEYS)
    def put(self, put: Put, condition: Compare | None, key: bytes) -> None:
        """One key is set, perhaps on a condition."""
        compares = self.about(put.key, condition)
        request = kv_pb2.PutRequest(
            key=put.key,
            value=put.value,
            ttl_ms=put.ttl_ms,
            durability=DURABLE,
            precondition=precondition_of(compares[0]) if compares else None,
        )
        self.send("put", request, Transaction([put], compares), key)

    @rule(delete=st.builds(Delete, KEYS), condition=CONDITIONS)
    def delete(self, delete: Delete, condition: Compare | None) -> None:
        """One key is deleted, perhaps on a condition."""
        compares = self.about(delete.key, condition)
        request = kv_pb2.DeleteRequest(
            key=delete.key,
            durability=DURABLE,
            precondition=precondition_of(compares[0]) if compares else None,
        )
        self.send("delete", request, Transaction([delete], compares))

    @rule(keys=RANGES)
    def delete_range(self, keys: KeyRange) -> None:
        """All keys of a range are deleted, perhaps all there are."""
        request = kv_pb2.DeleteRangeRequest(
            range=range_of(keys), all=not any(keys), durability=DURABLE
        )
        self.send("delete_range", request, Transaction([DeleteRange(keys)]))

    @rule(
        changes=st.lists(PLAIN, min_size=1, max_size=5) | st.lists(CHANGES, min_size=1, max_size=5),
        key=IDEMPOTENCY_KEYS,
    )
    def write(self, changes: list[Operation], key: bytes) -> None:
        """Several changes in one commit; a large one becomes files of the levels at once."""
        self.send("write", write_of(changes, DURABLE), Transaction(changes), key)

    @rule(
        compares=st.lists(COMPARES, max_size=2),
        then=OPERATIONS,
        otherwise=OPERATIONS,
        key=IDEMPOTENCY_KEYS,
    )
    def txn(
        self,
        compares: list[Compare],
        then: list[Operation],
        otherwise: list[Operation],
        key: bytes,
    ) -> None:
        """Something is compared, and then one branch or the other is done."""
        compares = [self.with_seq(compare) for compare in compares]
        if compares or then or otherwise:
            request = txn_of(compares, then, otherwise, DURABLE)
            self.send("txn", request, Transaction(then, compares, otherwise), key)

    @rule(key=st.sampled_from([b"k1", b"k2"]))
    def repeat(self, key: bytes) -> None:
        """A request that was applied comes again: it gets the first answer, and does nothing."""
        if key in self.sent:
            self.resend(self.sent[key].method, self.sent[key].request, self.sent[key])

    @rule(
        batches=st.lists(st.lists(LAYERED, min_size=1, max_size=4), min_size=3, max_size=6),
        seeds=st.lists(SEEDS, min_size=6, max_size=6),
        wait_ms=st.sampled_from([1, 2_000]),
    )
    def pile_up(self, batches: list[list[Operation]], seeds: list[int], wait_ms: int) -> None:
        """Commit after commit is compacted, so that levels have something above and below them."""
        for changes, seed in zip(batches, seeds, strict=False):
            self.write(changes, b"")
            self.pass_time(wait_ms)
            self.compact(seed)

    @rule(values=st.dictionaries(KEYS, st.none() | VALUES, min_size=1, max_size=4))
    def load(self, values: dict[bytes, bytes | None]) -> None:
        """A file of puts and tombstones that somebody else has written is taken in."""
        effects: list[Effect] = []
        entries = []
        for key, value in sorted(values.items()):
            kind = Kind.TOMBSTONE if value is None else Kind.PUT
            entries.append(Entry(key, 0, kind, value or b""))
            effects.append(Delete(key) if value is None else Written(key, value, 0))
        info = self.database.write_file(entries)
        self.loads_count += 1
        request = admin_pb2.IngestSstRequest(
            load_id=f"load{self.loads_count}", ssts=[info_message(info)]
        )
        self.landed(effects, self.database.administer("ingest_sst", request).header.seq)
        assert self.database.administer("ingest_sst", request).already_applied

    # --- reads ---------------------------------------------------------------------------------

    @rule(keys=st.lists(KEYS, min_size=1, max_size=4), level=LEVELS)
    def get(self, keys: list[bytes], level: Any) -> None:
        """Some keys are read, together and one by one."""
        header, now = kv_pb2.RequestHeader(read_level=level), self.visible()
        together = self.database.ask("batch_get", kv_pb2.BatchGetRequest(header=header, keys=keys))
        alone = [
            self.database.ask("get", kv_pb2.GetRequest(header=header, key=key)) for key in keys
        ]
        for replies in (together.results, alone):
            for key, reply in zip(keys, replies, strict=True):
                check_found(reply, now.get(key))

    @rule(request=SCANS, level=LEVELS)
    def scan(self, request: kv_pb2.ScanRequest, level: Any) -> None:
        """A range is read, either way, to its end or to a limit."""
        request.header.read_level = level
        check_scan(self.database.scan(request), request, self.visible())

    # --- snapshots -----------------------------------------------------------------------------

    @precondition(lambda self: len(self.snapped) < SNAPSHOTS_MAX)
    @rule()
    def snap(self) -> None:
        """A snapshot holds all that was acknowledged, and will show it as it is now."""
        now = self.visible()
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
        check_found(self.database.ask("get", get), then.get(key))
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
        """A replica shows a state that was there, and the newest one to who asks for it."""
        get = kv_pb2.GetRequest(key=key)
        if waits:
            get.header.min_seq = request.header.min_seq = self.last_seq
            self.database.ask_replica("get", get)  # it has seen that now
        reader = self.database.reader
        assert reader is not None
        now_ms = reader.engine.time.now_ms()
        replies = self.database.scan_replica(request)
        seq = replies[0].header.seq
        assert not waits or seq >= self.last_seq
        then = visible(self.state_at(seq), now_ms)
        check_scan(replies, request, then)
        check_found(self.database.ask_replica("get", get), then.get(key))


TestWholeModel = ClientMachine.TestCase
TestWholeModel.settings = settings(
    max_examples=40, stateful_step_count=40, deadline=None, derandomize=True
)


@pytest.mark.soak
@pytest.mark.timeout(3_600)
def test_whole_model_for_long() -> None:
    """The same, with many more and longer histories, drawn anew each time."""
    long = settings(max_examples=2_000, stateful_step_count=100, deadline=None, derandomize=False)
    run_state_machine_as_test(ClientMachine, settings=long)
