"""Mutants of how transactions are decided, and of how repeats are recognised."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from shalekv.core.entry import Entry
from shalekv.core.transaction import State
from shalekv.engine import replay
from shalekv.engine.below import Below
from shalekv.engine.commit import Claim, Commit, Group, Receipt, Settled, WalContents
from shalekv.engine.commit_queue import CommitQueue
from shalekv.engine.group_commit import GroupCommit
from shalekv.engine.idempotency import Idempotency, Pending, Remembered
from shalekv.engine.newest_state import NewestState
from shalekv.engine.overlay import Overlay
from shalekv.engine.sorted_runs import Run
from shalekv.engine.writer_engine import WriterEngine
from shalekv.errors import KeyExpired, ShaleError
from shalekv.roles.writing import Writing
from tests.sim.planting import Mutant

# ruff: noqa: SLF001 - what a mutant replaces is private, as a rule
_real_take = CommitQueue.take
_real_decide = Commit.decide
_real_resequence = Commit.resequence
_real_contents = Group.contents
_real_find = Idempotency.find
_real_newest_state = WriterEngine._newest_state
_real_add = Overlay.add


def _front_need_not_wait(self: CommitQueue, **_how: bool) -> bool:
    front = next(iter(self), None)
    return front is not None and not front.writes


def _taken_along(self: CommitQueue, bytes_max: int, *, is_alone: bool) -> list[Commit]:
    return _real_take(self, bytes_max, is_alone=is_alone or len(self) > 0)


def _decided_once(self: Commit, state: State) -> None:
    if self.decision is None:
        _real_decide(self, state)


def _told_at_once(self: GroupCommit) -> None:
    while (commit := self._queue.pop_decided()) is not None:
        self._admission.release(commit.size_bytes)
        commit.succeed(seq=self._prefix.landed_seq, wal_id=self._prefix.wal_id)


def _durable_state_only(self: WriterEngine, _overlay: Overlay, below: Below) -> NewestState:
    return _real_newest_state(self, Overlay(self.memtable), below)


def _points_only(self: Overlay, commit: Commit) -> None:
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


def _begin_unseen(self: Idempotency, claim: Claim, settle: Settled) -> Pending:

    def remember(outcome: Receipt | ShaleError) -> None:
        if isinstance(outcome, Receipt) and outcome.record is not None:
            self.land([outcome.record])

    return Pending(claim.request_hash, waiting=[remember, settle])


def _new_when_expired(
    self: Idempotency, key: bytes, request_hash: bytes
) -> Pending | Remembered | None:
    try:
        return _real_find(self, key, request_hash)
    except KeyExpired:
        return None


class _RunWithoutRangeDeletes(Run):
    @classmethod
    def from_newest(
        cls,
        newest: dict[bytes, Entry],
        *,
        max_seq: int,
        range_tombstones: Sequence[Entry] = (),
    ) -> Run:
        del range_tombstones
        return Run.from_newest(newest, max_seq=max_seq)


async def _unconfirmed(_self: Writing, future: Any, _commit: Commit) -> Any:
    return await future


MUTANTS = (
    Mutant(
        "a transaction overtakes what is in flight",
        "A transaction begins an object while others are in flight.",
        [(CommitQueue, "has_to_wait", _front_need_not_wait)],
        "writers",
        ("I1", "I14"),
        hint=3,
    ),
    Mutant(
        "a transaction is taken along",
        "A transaction goes into an object with what stands before it, while others are in flight.",
        [(CommitQueue, "take", _taken_along)],
        "writers",
        ("I1", "I14"),
        hint=7,
    ),
    Mutant(
        "a displaced transaction is not decided again",
        "What was decided stays, although other commits have come before it.",
        [(Commit, "decide", _decided_once)],
        "writers",
        ("I14", "I15"),
    ),
    Mutant(
        "a refusal is told too early",
        "A refusal is told while what it rests on is in flight.",
        [(GroupCommit, "_settle_decided", _told_at_once)],
        "writers",
        ("I1", "I14"),
        hint=1,
    ),
    Mutant(
        "a refusal is not confirmed",
        "A refusal is told without asking whether another writer has taken over.",
        [(Writing, "_confirmed", _unconfirmed)],
        "writers",
        ("I14",),
        hint=18,
    ),
    Mutant(
        "adds look at what is durable only",
        "An add, and any condition, does not see what is on its way.",
        [(WriterEngine, "_newest_state", _durable_state_only)],
        "writers",
        ("I14", "I15"),
    ),
    Mutant(
        "conditions miss range deletes in flight",
        "A condition does not see range deletes that are on their way.",
        [(Overlay, "add", _points_only)],
        "writers",
        ("I14",),
        hint=2,
    ),
    Mutant(
        "records are not durable",
        "Idempotency records are remembered, but not made durable.",
        [(Group, "contents", _without_records)],
        "writers",
        ("I15",),
    ),
    Mutant(
        "records of lost slots are kept",
        "The record of a slot that was lost to a fence stays with what is decided anew.",
        [(Commit, "resequence", _record_is_kept)],
        "writers",
        ("I1", "I15"),
        hint=32,
    ),
    Mutant(
        "records are not replayed",
        "Replay forgets idempotency records.",
        [(replay, "_records", _no_records)],
        "writers",
        ("I15",),
    ),
    Mutant(
        "requests are registered when durable",
        "A request on its way is not known: its copy is new, too.",
        [(Idempotency, "begin", _begin_unseen), (Idempotency, "abandon", lambda *_: None)],
        "writers",
        ("I15",),
    ),
    Mutant(
        "an expired key is new",
        "A key that is older than its window is taken for a new one.",
        [(Idempotency, "find", _new_when_expired)],
        "writers",
        ("I15",),
    ),
    Mutant(
        "replay ignores range deletes",
        "A writer that has replayed its log shows what range deletes have deleted.",
        [(replay, "Run", _RunWithoutRangeDeletes)],
        "writers",
        ("I2", "I14"),
    ),
)
