"""The simulation finds bugs in how transactions are decided, and how repeats are recognised.

As in `test_planted_bugs`: each replaces a function by a plausible wrong one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest

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
from tests.sim.planting import SEEDS_MAX, Patch, first_failure

# ruff: noqa: SLF001 - what a bug replaces is private, as a rule
_take = CommitQueue.take
_decide = Commit.decide
_resequence = Commit.resequence
_contents = Group.contents
_find = Idempotency.find
_newest_state = WriterEngine._newest_state
_add = Overlay.add


def front_need_not_wait(self: CommitQueue) -> bool:
    """A transaction begins an object while others are in flight."""
    front = next(iter(self), None)
    return front is not None and not front.writes


def taken_along(self: CommitQueue, bytes_max: int, *, is_alone: bool) -> list[Commit]:
    """A transaction goes into an object with what stands before it, while others are in flight."""
    return _take(self, bytes_max, is_alone=is_alone or len(self) > 0)


def decided_once(self: Commit, state: State) -> None:
    """What was decided stays, although other commits have come before it."""
    if self.decision is None:
        _decide(self, state)


def told_at_once(self: GroupCommit) -> None:
    """A refusal is told while what it rests on is in flight."""
    while (commit := self._queue.pop_decided()) is not None:
        self._admission.release(commit.size_bytes)
        commit.succeed(seq=self._prefix.landed_seq, wal_id=self._prefix.wal_id)


def durable_state_only(self: WriterEngine, _overlay: Overlay, below: Below) -> NewestState:
    """An add, and any condition, looks at what is durable only."""
    return _newest_state(self, Overlay(self.memtable), below)


def points_only(self: Overlay, commit: Commit) -> None:
    """A condition does not see range deletes that are on their way."""
    commit.range_tombstones, kept = (), commit.range_tombstones
    _add(self, commit)
    commit.range_tombstones = kept


def without_records(self: Group) -> WalContents:
    """Idempotency records are remembered, but not made durable."""
    return _contents(self)._replace(records=())


def record_is_kept(self: Commit, seq: int) -> None:
    """The record of a slot that was lost to a fence stays with what is decided anew."""
    record = self.record
    _resequence(self, seq)
    self.record = record


def no_records(_found: object) -> list[Entry]:
    """Replay forgets idempotency records."""
    return []


def begin_unseen(self: Idempotency, claim: Claim, settle: Settled) -> Pending:
    """A request on its way is not known before it is durable: its copy is new, too."""

    def remember(outcome: Receipt | ShaleError) -> None:
        if isinstance(outcome, Receipt) and outcome.record is not None:
            self.land([outcome.record])

    return Pending(claim.request_hash, waiting=[remember, settle])


def new_when_expired(
    self: Idempotency, key: bytes, request_hash: bytes
) -> Pending | Remembered | None:
    """A key that is older than its window is taken for a new one."""
    try:
        return _find(self, key, request_hash)
    except KeyExpired:
        return None


class RunWithoutRangeDeletes(Run):
    """Replay ignores range tombstones."""

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


async def unconfirmed(_self: Writing, future: Any, _commit: Commit) -> Any:
    """A refusal is told without asking whether another writer has taken over."""
    return await future


BUGS: Mapping[str, Sequence[Patch]] = {
    "a transaction overtakes what is in flight": [
        (CommitQueue, "rests_on_state", property(front_need_not_wait))
    ],
    "a transaction is taken along": [(CommitQueue, "take", taken_along)],
    "a displaced transaction is not decided again": [(Commit, "decide", decided_once)],
    "a refusal is told too early": [(GroupCommit, "_settle_decided", told_at_once)],
    "a refusal is not confirmed": [(Writing, "_confirmed", unconfirmed)],
    "adds look at what is durable only": [(WriterEngine, "_newest_state", durable_state_only)],
    "conditions miss range deletes in flight": [(Overlay, "add", points_only)],
    "records are not durable": [(Group, "contents", without_records)],
    "records of lost slots are kept": [(Commit, "resequence", record_is_kept)],
    "records are not replayed": [(replay, "_records", no_records)],
    "requests are registered when durable": [
        (Idempotency, "begin", begin_unseen),
        (Idempotency, "abandon", lambda *_: None),
    ],
    "an expired key is new": [(Idempotency, "find", new_when_expired)],
    "replay ignores range deletes": [(replay, "Run", RunWithoutRangeDeletes)],
}


@pytest.mark.parametrize("bug", BUGS)
def test_a_planted_bug_is_caught(bug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each planted bug breaks an invariant for some seed."""
    seed = first_failure(BUGS[bug], monkeypatch)
    assert seed is not None, f"{SEEDS_MAX} seeds did not notice that {bug}"
