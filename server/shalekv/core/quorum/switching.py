"""Switching a database between the WAL modes: what must have happened before the manifest says so.

That the archive has everything is not enough (CE15): whoever was writer before would go on, and its
majority, or the next slot of the WAL, would take what it writes. So who switches is a writer of its
own, which has fenced the one before it in the way of the mode that is left.

Fences end whoever serves, but not an opener that has won an older epoch and stands still before it
lists the WAL: it creates a fence in the first slot that it finds free, and learns only then that it
is too late. What is in safekeepers has no slot yet that such a fence would respect. So the log goes
on with ids that nobody finds who looks for the first free slot of the log before: all of that is
compacted, and `LEFT_OUT_COUNT` ids are left out behind it (CE17).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from shalekv.core.quorum.archiving import is_archived
from shalekv.errors import IllegalState
from shalekv.protocol.compaction.publish import claim_compactor_epoch
from shalekv.protocol.manifest import Manifest, WalMode
from shalekv.protocol.membership import Member, check_members
from shalekv.protocol.opening import WriterId, check_owner
from shalekv.protocol.proposer import Leader

# Openers of the mode before fill some of these, each with its own width of fences, and never all.
LEFT_OUT_COUNT = 1 << 32


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


def enter_quorum(
    manifest: Manifest, own: WriterId, members: Iterable[Member], last_wal_id: int
) -> Manifest:
    """The edit after which the WAL is in safekeepers that are new.

    `last_wal_id` is the last fence of `own`. c becomes the last of the ids that are left out: the
    levels have all of the old log. A compactor that has looked at that is superseded. Raises
    `Fenced`, and `IllegalState` when something of the old log is not compacted.
    REQUIRES: `own` has finished its opening, so a run of its fences counts
    (`core.fencing.check_run_counts`): no older writer can put data into the object store any more.
    """
    check_owner(manifest, own)
    wanted = tuple(members)
    check_members(wanted)
    first = manifest.first_uncompacted_wal_id
    if first <= last_wal_id:
        raise IllegalState(
            f"WAL object {first} is not compacted, and {last_wal_id} is the last one"
        )
    left_out = range(first, first + LEFT_OUT_COUNT)
    return replace(
        claim_compactor_epoch(manifest, own.nonce),
        wal_ids_left_out=(*manifest.wal_ids_left_out, left_out),
        wal_id_last_compacted=left_out[-1],
        wal_mode=WalMode.QUORUM,
        wal_generation=manifest.wal_generation + 1,
        wal_members=tuple(map(str, wanted)),
        wal_members_next=(),
    )
