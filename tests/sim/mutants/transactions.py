"""Mutants of how transactions are decided, and of how repeats are recognised."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from shalekv.errors import KeyExpired, ShaleError
from shalekv.protocol.entry import Entry
from shalekv.protocol.log import LogState
from shalekv.protocol.transaction import DatabaseState
from shalekv.read import replay
from shalekv.read.read_set import ReadSet
from shalekv.read.sorted_runs import MemoryRun
from shalekv.server.writes import Writes
from shalekv.write.commit import Commit, Group, KeyedRequest, OnSettled, Receipt, WalContents
from shalekv.write.engine import WriterEngine
from shalekv.write.group_commit import CommitQueue, GroupCommit
from shalekv.write.idempotency import AppliedRequest, Idempotency, RequestInFlight
from shalekv.write.pending_writes import NewestState, PendingWrites
from tests.sim.planting import mutant

_real_take = CommitQueue.take
_real_may_take = LogState.may_take
_real_decide = Commit.decide
_real_resequence = Commit.resequence
_real_contents = Group.contents
_real_find = Idempotency.find
_real_newest_state = WriterEngine.newest_state
_real_add = PendingWrites.add


def _front_need_not_wait(
    self: LogState, *, writes: bool, depends_on_state: bool, is_load: bool
) -> bool:
    del depends_on_state, is_load
    return _real_may_take(self, writes=writes, depends_on_state=False, is_load=False)


def _taken_along(self: CommitQueue, bytes_max: int, *, takes_dependents: bool) -> list[Commit]:
    return _real_take(self, bytes_max, takes_dependents=takes_dependents or len(self) > 0)


def _decided_once(self: Commit, state: DatabaseState) -> None:
    if self.decision is None:
        _real_decide(self, state)


def _refused_at_once(self: GroupCommit) -> None:
    while (commit := self._queue.pop_read_only()) is not None:
        self.pending_writes.remove(commit)
        self.admission.release(commit.size_bytes)
        commit.succeed(seq=self.watermark.landed_seq, wal_id=self.watermark.wal_id)


def _durable_state_only(
    self: WriterEngine, _pending: PendingWrites, read_set: ReadSet
) -> NewestState:
    return _real_newest_state(self, PendingWrites(self.memtable), read_set)


def _points_only(self: PendingWrites, commit: Commit) -> None:
    commit.range_tombstones, kept = (), commit.range_tombstones
    _real_add(self, commit)
    commit.range_tombstones = kept


def _without_records(self: Group) -> WalContents:
    return _real_contents(self)._replace(records=())


def _record_is_kept(self: Commit, seq: int) -> None:
    record = self.record
    _real_resequence(self, seq)
    self.record = record


def _no_records(_found: object) -> list[Entry]:
    return []


def _begin_unseen(self: Idempotency, keyed: KeyedRequest, settle: OnSettled) -> RequestInFlight:

    def remember(outcome: Receipt | ShaleError) -> None:
        if isinstance(outcome, Receipt) and outcome.record is not None:
            self.land([outcome.record])

    return RequestInFlight(keyed, waiting=[remember, settle])


def _new_when_expired(
    self: Idempotency,
    key: bytes,
    request_hash: bytes,
    record: Entry | None = None,
    *,
    chosen: bytes | None = None,
) -> RequestInFlight | AppliedRequest | None:
    try:
        return _real_find(self, key, request_hash, record, chosen=chosen)
    except KeyExpired:
        return None


class _RunWithoutRangeDeletes(MemoryRun):
    @classmethod
    def from_newest(
        cls,
        newest: dict[bytes, Entry],
        *,
        max_seq: int,
        range_tombstones: Sequence[Entry] = (),
        size_bytes: int | None = None,
    ) -> MemoryRun:
        del range_tombstones, size_bytes
        return MemoryRun.from_newest(newest, max_seq=max_seq)


def _present_time(self: WriterEngine) -> int:
    return self.time.now_ms()


async def _unconfirmed(_self: Writes, future: Any, _commit: Commit) -> Any:
    return await future


MUTANTS = (
    mutant(
        "a transaction overtakes what is in flight",
        (LogState, "may_take", _front_need_not_wait),
        hint=3,
    ),
    mutant("a transaction is taken along", (CommitQueue, "take", _taken_along), hint=22),
    mutant("a displaced transaction is not decided again", (Commit, "decide", _decided_once)),
    mutant(
        "a refusal is sent too early", (GroupCommit, "_settle_read_only", _refused_at_once), hint=1
    ),
    mutant("a refusal is not confirmed", (Writes, "_confirmed", _unconfirmed), hint=41),
    mutant(
        "reads expire what a transaction has found",
        (WriterEngine, "now_ms", _present_time),
        test="tests/unit/server/test_reads_of_expiring_values.py"
        "::test_what_a_pending_transaction_has_found_does_not_expire",
    ),
    mutant(
        "adds look at what is durable only", (WriterEngine, "newest_state", _durable_state_only)
    ),
    mutant("conditions miss range deletes in flight", (PendingWrites, "add", _points_only), hint=2),
    mutant("records are not durable", (Group, "contents", _without_records)),
    mutant("records of lost slots are kept", (Commit, "resequence", _record_is_kept), hint=32),
    mutant("records are not replayed", (replay, "_records", _no_records)),
    mutant(
        "requests are registered when durable",
        (Idempotency, "begin", _begin_unseen),
        (Idempotency, "abandon", lambda *_: None),
    ),
    mutant("an expired key is new", (Idempotency, "find", _new_when_expired)),
    mutant("replay ignores range deletes", (replay, "MemoryRun", _RunWithoutRangeDeletes)),
)
