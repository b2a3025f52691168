"""Mutants of the writer: taking over, fencing, making durable, telling the truth."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from shalekv.clock import Clock
from shalekv.core import fencing
from shalekv.core.fencing import FenceRun, Occupant, Verdict, WriterId
from shalekv.core.manifest import Manifest
from shalekv.engine import group_commit, opening_steps, recover, replay
from shalekv.engine.admission import Admission
from shalekv.engine.commit import Commit, Group
from shalekv.engine.commit_queue import CommitQueue
from shalekv.engine.group_commit import GroupCommit
from shalekv.engine.memtable import Memtable
from shalekv.engine.ownership import Ownership
from shalekv.engine.prefix import Prefix
from shalekv.engine.wal import WalFolder
from shalekv.errors import ObjectNotFound, ShaleError, Stopping, StoreBroken
from shalekv.format.sst import Sst
from shalekv.store import claim
from shalekv.store.api import Created, ObjectStore, Unknown
from shalekv.store.cas import CasStore
from tests.sim.planting import Mutant

# ruff: noqa: SLF001 - what a mutant replaces is private, as a rule
_real_claim_attempt = claim._attempt
_real_claim_epoch = fencing.claim_epoch
_real_read_slot = replay.read_slot
_real_settle = Prefix.settle
_real_judge = fencing.judge


async def _unknown_is_success(
    store: ObjectStore, name: str, data: bytes, metadata: Mapping[str, str]
) -> claim.ClaimOutcome:
    outcome = await store.create(name, data, metadata)
    if isinstance(outcome, Created | Unknown):
        return claim.Claimed()
    return await _real_claim_attempt(store, name, data, metadata)


async def _unknown_is_failure(
    store: ObjectStore, name: str, data: bytes, metadata: Mapping[str, str]
) -> claim.ClaimOutcome:
    outcome = await store.create(name, data, metadata)
    if isinstance(outcome, Unknown) and name.startswith("wal/"):
        raise StoreBroken(store.url, "create", name, outcome.cause)
    return await _real_claim_attempt(store, name, data, metadata)


def _nothing_was_applied(_self: GroupCommit) -> ShaleError:
    return Stopping("the object store did not answer: nothing was applied")


async def _exists_is_a_rival(
    store: ObjectStore, name: str, data: bytes, metadata: Mapping[str, str]
) -> claim.ClaimOutcome:
    outcome = await store.create(name, data, metadata)
    if isinstance(outcome, Created):
        return claim.Claimed()
    return claim.Taken((await store.get(name)).data)


async def _told_when_sent(self: GroupCommit, group: Group) -> None:
    self._end(group)
    self._land(group)
    self._settle_decided()
    await self._slots.create(group.wal_id, group.contents(), position=group.position)


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


def _behind_all_that_is_there(self: WalFolder) -> int:
    return max(self.filled, default=self.first - 1) + 1


async def _empty_if_missing(store: CasStore, wal_id: int, database_id: bytes) -> Sst | ShaleError:
    """The next object that is there, in place of one that is not."""
    while True:
        found = await _real_read_slot(store, wal_id, database_id)
        if not isinstance(found, ObjectNotFound):
            return found
        wal_id += 1


def _older_than_any(occupant: Occupant, own: WriterId) -> Verdict:
    verdict = _real_judge(occupant, own)
    is_passed = verdict is Verdict.NEWER and occupant.is_fence
    return Verdict.OLDER_FENCE if is_passed else verdict


def _numbers_stay(self: CommitQueue, taken: list[Commit], next_seq: int) -> int:
    commits = [*taken, *self._commits]
    self._commits.clear()
    self._commits.extend(sorted(commits, key=lambda commit: commit.place))
    self.size_bytes += sum(commit.size_bytes for commit in taken)
    return next_seq


def _past_the_gap(self: Prefix, group: Group, *, landed: bool) -> None:
    if landed:
        group.landed = landed
        self._window.pop(group.position)
        self._window = {group.position: group} | self._window
    _real_settle(self, group, landed=landed)


async def _nobody_is_asked(_self: Ownership) -> None:
    """It is taken for ours still."""


def _always_room(_self: Admission, _size_bytes: int, _kept_bytes: int) -> bool:
    return True


def _release_nothing(_self: Admission, _size_bytes: int) -> None:
    """Its bytes are counted for ever."""


async def _drop_nothing(_self: Memtable, _seq: int, _clock: Clock) -> int:
    return 0


MUTANTS = (
    Mutant(
        "treat unknown as success",
        "A create without an answer is taken for one that has created.",
        [(claim, "_attempt", _unknown_is_success)],
        "writers",
        ("I1", "I4"),
        hint=6,
    ),
    Mutant(
        "treat unknown as failed",
        "A write whose object may have been created is told not to be applied.",
        [
            (claim, "_attempt", _unknown_is_failure),
            (GroupCommit, "_unknown", _nothing_was_applied),
        ],
        "writers",
        ("I1",),
        also=("I13",),
    ),
    Mutant(
        "an object that exists is a rival's",
        "The lost reply of an own success is taken for a rival.",
        [(claim, "_attempt", _exists_is_a_rival)],
        "writers",
        ("I1", "I3"),
        also=("IllegalState",),
        hint=1,
    ),
    Mutant(
        "ack before durable",
        "A write is acknowledged when its object is sent.",
        [(GroupCommit, "_upload", _told_when_sent)],
        "writers",
        ("I1",),
    ),
    Mutant(
        "an opener forgets others' width",
        "An opener forgets that older writers may have more objects in flight than itself.",
        [(recover, "claim_epoch", _own_width_only)],
        "writers",
        ("I3",),
    ),
    Mutant(
        "fence with one SST when k are needed",
        "One fence is taken for enough, however many objects may be in flight.",
        [(FenceRun, "is_complete", property(_one_fence_will_do))],
        "writers",
        ("I3",),
    ),
    Mutant(
        "epoch not bumped",
        "A writer takes over under the epoch of the writer before it.",
        [(recover, "claim_epoch", _same_epoch)],
        "writers",
        ("I3", "I5"),
        hint=4,
    ),
    Mutant(
        "reuse a sequence number",
        "A new writer goes on counting where the log ends.",
        [(opening_steps, "first_seq_of_writer", _next_number)],
        "writers",
        ("I5",),
        hint=7,
    ),
    Mutant(
        "displaced commits keep their numbers",
        "What an older writer's fence displaces is written behind what has greater numbers.",
        [(CommitQueue, "put_back", _numbers_stay)],
        "writers",
        ("I4",),
        also=("I13",),
        hint=3,
    ),
    Mutant(
        "list before manifest",
        "Fences count by the manifest that was read before the WAL was listed.",
        [(recover, "check_run_counts", _every_run_counts)],
        "database",
        ("I3", "I8"),
        test="tests/unit/engine/test_recover.py::test_fences_in_recycled_slots_do_not_count",
    ),
    Mutant(
        "replay past a gap",
        "An opener fences behind all that is there, and replays what it finds before that.",
        [
            (WalFolder, "first_gap", property(_behind_all_that_is_there)),
            (replay, "read_slot", _empty_if_missing),
        ],
        "writers",
        ("I4",),
        also=("I13",),
        hint=2,
    ),
    Mutant(
        "a newer writer's fence is passed",
        "A writer that finds a newer writer's fence in its slot takes the next one.",
        [(group_commit, "judge", _older_than_any)],
        "writers",
        ("I3",),
        also=("IllegalState",),
        hint=48,
    ),
    Mutant(
        "scans see past a gap",
        "What has landed behind a gap is shown to scans.",
        [(Prefix, "settle", _past_the_gap)],
        "writers",
        ("I14",),
        hint=2,
    ),
    Mutant(
        "linearizable reads are not confirmed",
        "A writer answers LINEARIZABLE reads without asking whether it was overtaken.",
        [(Ownership, "confirm", _nobody_is_asked)],
        "writers",
        ("I14",),
        hint=18,
    ),
    Mutant(
        "admission lets everything in",
        "Nothing waits for room, however many bytes are queued.",
        [(Admission, "_has_room", _always_room)],
        "writers",
        ("I13",),
        hint=4,
    ),
    Mutant(
        "admission releases nothing",
        "The bytes of a write stay counted when it has ended.",
        [(Admission, "release", _release_nothing)],
        "writers",
        ("I13",),
        hint=6,
    ),
    Mutant(
        "memory is never let go of",
        "What the levels hold stays in memory.",
        [(Memtable, "drop_through", _drop_nothing)],
        "database",
        ("I13",),
    ),
)
