"""Why an object of the levels is not there, as the writer finds out."""

from __future__ import annotations

from shalekv.errors import ObjectNotFound, ShaleError, SnapshotNotFound
from shalekv.read.version import HeldTree
from shalekv.read.version_set import TreeKeeper
from shalekv.write.ownership import Ownership


async def reason_missing(
    missing: ObjectNotFound, held: HeldTree, ownership: Ownership, levels: TreeKeeper
) -> ShaleError:
    """`SnapshotNotFound` when nothing protects `held` any more; else `missing`, or a worse one."""
    try:
        await ownership.confirm()
    except ShaleError as error:
        return error
    if levels.protects(held):
        return missing
    return SnapshotNotFound(
        f"{missing.name} is gone: the snapshot that protected the levels of manifest "
        f"{held.tree.manifest_id} has expired, because this process was stopped for long. Read "
        "again, from the beginning"
    )
