"""Switching a database between the WAL modes: what must have happened before the manifest says so.

That the archive has everything is not enough (CE15): whoever was writer before would go on, and its
majority, or the next slot of the WAL, would take what it writes. So who switches is a writer of its
own, which has fenced the one before it in the way of the mode that is left.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from shalekv.core.fencing import WriterId, check_owner
from shalekv.core.manifest import Manifest, WalMode
from shalekv.core.quorum.archiving import is_archived
from shalekv.core.quorum.election import Leader
from shalekv.core.quorum.membership import Member, check_members
from shalekv.errors import IllegalState


def leave_quorum(manifest: Manifest, leader: Leader, archive_tip: int | None) -> Manifest:
    """The edit after which the WAL is in the object store. Raises `Fenced` and `IllegalState`.

    `archive_tip` is the last object of the archive, by a list that was sent after the last record
    of `leader` was committed.
    """
    check_owner(manifest, WriterId(*leader.ballot))
    last = leader.log.last
    if last.epoch != leader.ballot.epoch or not last.ends_object or leader.committed_lsn < last.lsn:
        raise IllegalState("the last record of the log is not a committed one of who switches it")
    if last.wal_id is None or not is_archived(last.wal_id, archive_tip):
        raise IllegalState(f"WAL object {last.wal_id}, the last one, is not in the archive")
    return replace(
        manifest,
        wal_mode=WalMode.OBJECT_STORE,
        wal_generation=manifest.wal_generation + 1,
        wal_members=(),
        wal_members_next=(),
    )


def enter_quorum(manifest: Manifest, own: WriterId, members: Iterable[Member]) -> Manifest:
    """The edit after which the WAL is in safekeepers that are new. Raises `Fenced`.

    REQUIRES: `own` has finished its opening, so a run of its fences counts
    (`core.fencing.check_run_counts`): nobody older can put anything into the object store any more.
    """
    check_owner(manifest, own)
    wanted = tuple(members)
    check_members(wanted)
    return replace(
        manifest,
        wal_mode=WalMode.QUORUM,
        wal_generation=manifest.wal_generation + 1,
        wal_members=tuple(map(str, wanted)),
        wal_members_next=(),
    )
