"""Mutants of replicas and of their tailing of the log."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from shalekv.core.tree import Tree
from shalekv.engine.applying import Applying
from shalekv.engine.following import Follower
from shalekv.engine.progress import Progress
from shalekv.engine.replay import read_slot
from shalekv.engine.tree_keeper import TreeKeeper
from shalekv.errors import ObjectNotFound, ShaleError
from shalekv.format.sst import Sst
from shalekv.roles.freshness import Freshness
from shalekv.roles.service import Call
from shalekv.v1 import kv_pb2
from tests.sim.mutants.mutant import Mutant

# ruff: noqa: SLF001 - what a mutant replaces is private, as a rule
_real_apply_all = Follower._apply_all


async def _apply_as_news(self: Follower) -> None:
    try:
        await _real_apply_all(self)
    finally:
        self.is_fresh(self._clock.monotonic_ms())


async def _read_past_gaps(self: Follower, first: int, count: int) -> tuple[Sequence[Sst], bool]:
    slots = range(first, first + max(count, 4))
    database_id = self._stored.current.database_id
    async with asyncio.TaskGroup() as tasks:
        reading = [
            tasks.create_task(read_slot(self._store, wal_id, database_id)) for wal_id in slots
        ]
    found: list[Sst] = []
    for each in (task.result() for task in reading):
        if isinstance(each, ShaleError) and not isinstance(each, ObjectNotFound):
            raise each
        if isinstance(each, Sst):
            found.append(each)
    return found, not found


def _any_seq(self: Freshness, header: kv_pb2.RequestHeader) -> bool:
    return self._is_too_stale(header)


async def _not_waited(_self: Freshness, _header: kv_pb2.RequestHeader, _call: Call) -> None:
    """What is there will do."""


def _anything(self: Progress, seq: int, wal_id: int | None) -> None:
    self.seq = self.landed_seq = seq
    self.wal_id = wal_id
    self._wake()


def _back_to_the_tree(self: Applying, tree: Tree, *, epoch: int, logical_time_ms: int) -> None:
    _real_jump(self, tree, epoch=epoch, logical_time_ms=logical_time_ms)
    self._replayed.last_seq = tree.last_seq
    self._prefix.advance(tree.last_seq, tree.wal_id)


_real_jump = Applying.jump


async def _leave_what_was_applied(self: TreeKeeper, *, is_forced: bool = False) -> None:
    """When the snapshot was lost, all is begun anew with the tree that is protected then."""
    is_lost, jump = self.is_lost, self._jump
    await _real_keep(self, is_forced=is_forced)
    if is_lost and jump is not None:
        jump(self.current.tree)


_real_keep = TreeKeeper._keep

MUTANTS = (
    Mutant(
        "what a replica applies is fresh",
        "What a replica has applied just now is taken for all that there is.",
        [(Follower, "_apply_all", _apply_as_news)],
        "database",
        ("I6",),
        hint=15,
    ),
    Mutant(
        "a replica reads past a gap",
        "A replica goes on with the next object that is there.",
        [(Follower, "_read", _read_past_gaps)],
        "database",
        ("I4", "I6"),
        hint=10,
    ),
    Mutant(
        "min_seq ignored",
        "A replica answers with what it has, whatever a read demands.",
        [(Freshness, "is_due", _any_seq), (Freshness, "reach", _not_waited)],
        "database",
        ("I6",),
    ),
    Mutant(
        "a replica goes backwards",
        "A replica that has lost its snapshot begins anew with the levels, behind what it showed.",
        [
            (TreeKeeper, "_keep", _leave_what_was_applied),
            (Applying, "jump", _back_to_the_tree),
            (Progress, "advance", _anything),
        ],
        "database",
        ("I6",),
        test="tests/unit/engine/test_reader_engine.py::"
        "test_lost_snapshot_takes_nothing_back_and_is_made_again",
    ),
)
