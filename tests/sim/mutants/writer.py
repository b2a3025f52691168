"""Mutants of the writer: taking over, fencing, making durable, telling the truth."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

from shalekv.clock import Clock
from shalekv.errors import ObjectNotFound, ShaleError, Stopping, StoreBroken
from shalekv.format.sst import Sst
from shalekv.protocol import fencing, opening
from shalekv.protocol import log as protocol_log
from shalekv.protocol.fencing import FenceRun, Occupant, SlotVerdict, WalListing, WriterId
from shalekv.protocol.log import Advance, LogSlot, LogState, Outcome, SlotFilled
from shalekv.protocol.manifest import Manifest
from shalekv.read import replay
from shalekv.read.memtable import Memtable
from shalekv.server.writes import Writes
from shalekv.store.api import Exists, Unknown
from shalekv.store.cas import CasStore, Claimed, ClaimOutcome, Taken
from shalekv.v1 import kv_pb2
from shalekv.write import group_commit
from shalekv.write import opening as log_opening
from shalekv.write.admission import Admission
from shalekv.write.commit import Commit, Group
from shalekv.write.engine import Ownership
from shalekv.write.group_commit import CommitQueue, GroupCommit
from tests.sim.planting import mutant

# ruff: noqa: SLF001 - what a mutant replaces is private, as a rule
_real_compare = CasStore._compare
_real_claim_epoch = opening.claim_epoch
_real_read_slot = replay.read_slot
_real_settle = protocol_log._settle
_real_judge = fencing.judge


async def _unknown_is_success(
    self: CasStore, name: str, data: bytes, created: Exists | Unknown, *, is_first_owner: bool
) -> ClaimOutcome:
    if isinstance(created, Unknown):
        return Claimed()
    return await _real_compare(self, name, data, created, is_first_owner=is_first_owner)


async def _unknown_is_failure(
    self: CasStore, name: str, data: bytes, created: Exists | Unknown, *, is_first_owner: bool
) -> ClaimOutcome:
    if isinstance(created, Unknown) and name.startswith("wal/"):
        raise StoreBroken(self.url, "create", name, created.cause)
    return await _real_compare(self, name, data, created, is_first_owner=is_first_owner)


def _nothing_was_applied(_who: str) -> ShaleError:
    return Stopping("the object store did not answer: nothing was applied")


async def _exists_is_a_rival(
    self: CasStore, name: str, _data: bytes, _created: Exists | Unknown, *, is_first_owner: bool
) -> ClaimOutcome:
    del is_first_owner
    return Taken((await self._store.get(name)).data)


async def _acknowledged_when_sent(self: GroupCommit, group: Group) -> None:
    self._apply(SlotFilled(group.position, None))
    self._settle_read_only()
    self._wake.set()
    await self.wal.create(group.wal_id, group.contents(), position=group.position)


def _own_width_only(manifest: Manifest, **arguments: object) -> Manifest:
    claimed = _real_claim_epoch(manifest, **arguments)  # type: ignore[arg-type]
    return replace(claimed, fence_width=claimed.max_parallel_writes)


def _same_epoch(manifest: Manifest, **arguments: object) -> Manifest:
    claimed = _real_claim_epoch(manifest, **arguments)  # type: ignore[arg-type]
    return replace(claimed, writer_epoch=max(manifest.writer_epoch, 1))


def _next_number(_manifest: Manifest, last_seq: int) -> int:
    return last_seq + 1


def _one_fence_will_do(self: FenceRun) -> bool:
    return self.length >= 1


def _every_run_counts(_run: FenceRun, _manifest: Manifest, _own: WriterId) -> bool:
    return True


def _behind_all_that_is_there(self: WalListing) -> int:
    return max(self.filled, default=self.first - 1) + 1


async def _empty_if_missing(store: CasStore, wal_id: int, database_id: bytes) -> Sst | ShaleError:
    """The next object that is there, in place of one that is not."""
    while True:
        found = await _real_read_slot(store, wal_id, database_id)
        if not isinstance(found, ObjectNotFound):
            return found
        wal_id += 1


def _older_than_any(occupant: Occupant, own: WriterId) -> SlotVerdict:
    verdict = _real_judge(occupant, own)
    is_passed = verdict is SlotVerdict.NEWER and occupant.is_fence
    return SlotVerdict.OLDER_FENCE if is_passed else verdict


def _numbers_stay(self: CommitQueue, taken: list[Commit]) -> None:
    commits = [*taken, *self._commits]
    self._commits.clear()
    self._commits.extend(sorted(commits, key=lambda commit: commit.submit_order))
    self.size_bytes += sum(commit.size_bytes for commit in taken)


def _past_the_gap(
    state: LogState, slot: LogSlot, outcome: Outcome
) -> tuple[LogState, list[Advance]]:
    settled, advances = _real_settle(state, slot, Outcome.LOST)
    early = [Advance(replace(slot, outcome=outcome))] if outcome is Outcome.LANDED else []
    return settled, [*early, *advances]


async def _nobody_is_asked(_self: Ownership) -> None:
    """It is taken for ours still."""


def _always_fits(_self: Admission, _size_bytes: int, _kept_bytes: int) -> bool:
    return True


def _release_nothing(_self: Admission, _size_bytes: int) -> None:
    """Its bytes are counted for ever."""


async def _drop_nothing(_self: Memtable, _seq: int, _clock: Clock) -> int:
    return 0


async def _future_stays(
    self: Writes, future: asyncio.Future[Any], commit: Commit
) -> kv_pb2.PutReply:
    try:
        reply: kv_pb2.PutReply = await future
    except ShaleError:
        await self._engine.ownership.confirm()
        raise
    if not commit.writes:
        await self._engine.ownership.confirm()
    return reply


MUTANTS = (
    mutant("treat unknown as success", (CasStore, "_compare", _unknown_is_success), hint=32),
    mutant(
        "treat unknown as failed",
        (CasStore, "_compare", _unknown_is_failure),
        (group_commit, "outcome_unknown", _nothing_was_applied),
        also=("I13",),
    ),
    mutant(
        "an object that exists is a rival's",
        (CasStore, "_compare", _exists_is_a_rival),
        also=("IllegalState",),
        hint=1,
    ),
    mutant("ack before durable", (GroupCommit, "_upload", _acknowledged_when_sent)),
    mutant("an opener forgets others' width", (log_opening, "claim_epoch", _own_width_only)),
    mutant(
        "fence with one SST when k are needed",
        (FenceRun, "is_complete", property(_one_fence_will_do)),
    ),
    mutant("epoch not bumped", (log_opening, "claim_epoch", _same_epoch), hint=4),
    mutant("reuse a sequence number", (opening, "first_seq_of_writer", _next_number), hint=2),
    mutant(
        "displaced commits keep their numbers",
        (CommitQueue, "put_back", _numbers_stay),
        also=("I13",),
        hint=3,
    ),
    mutant(
        "list before manifest",
        (opening, "run_counts", _every_run_counts),
        test="tests/unit/write/test_opening.py::test_fences_in_recycled_slots_do_not_count",
    ),
    mutant(
        "replay past a gap",
        (WalListing, "first_gap", property(_behind_all_that_is_there)),
        (replay, "read_slot", _empty_if_missing),
        also=("I13",),
        hint=2,
    ),
    mutant(
        "a newer writer's fence is passed",
        (protocol_log, "judge", _older_than_any),
        also=("IllegalState",),
        hint=10,
    ),
    mutant("scans see past a gap", (protocol_log, "_settle", _past_the_gap), hint=2),
    mutant(
        "linearizable reads are not confirmed", (Ownership, "confirm", _nobody_is_asked), hint=18
    ),
    mutant("admission lets everything in", (Admission, "_fits", _always_fits), hint=4),
    mutant("admission releases nothing", (Admission, "release", _release_nothing), hint=6),
    mutant("a refusal holds its frames", (Writes, "_confirmed", _future_stays)),
    mutant("memory is never freed", (Memtable, "drop_through", _drop_nothing)),
)
