"""The manifest of a simulated database and what else is in its bucket."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from shalekv.core.manifest import Manifest, WalMode
from shalekv.core.quorum import archiving
from shalekv.core.quorum.archiving import LogObject
from shalekv.core.quorum.membership import Member
from shalekv.core.quorum.record import Record
from tests.sim.quorum.judge import Judge
from tests.sim.quorum.safekeeper import Safekeeper


class Bucket:
    """Edits of the manifest happen at once, and one after the other."""

    def __init__(
        self, members: Sequence[Member], judge: Judge, mode: WalMode = WalMode.QUORUM
    ) -> None:
        """A new database with these safekeepers."""
        self.judge = judge
        self.manifest = Manifest(
            database_id=bytes(16),
            manifest_id=0,
            write_id=bytes(16),
            wal_mode=mode,
            wal_members=tuple(map(str, members)),
        )

    def edit(self, change: Callable[[Manifest], Manifest]) -> None:
        """Replace the manifest. Raises what `change` does."""
        changed = change(self.manifest)
        self.manifest = replace(changed, manifest_id=self.manifest.manifest_id + 1)

    def claim(self, epoch: int, nonce: bytes) -> None:
        """Name another writer."""
        self.judge.claimed(epoch)
        self.edit(lambda m: replace(m, writer_epoch=epoch, writer_nonce=nonce))

    @property
    def archive_tip(self) -> int | None:
        """The last object of the archive."""
        return archiving.archive_tip(self.judge.archive, None)


def complete(safekeeper: Safekeeper) -> Sequence[tuple[LogObject, Sequence[Record]]]:
    """The objects of a member's log that may be archived, with their records."""
    assert safekeeper.state is not None
    records = safekeeper.readable()
    objects = archiving.complete_objects(records, safekeeper.state.committed_lsn)
    by_lsn = {record.lsn: record for record in records}
    return [
        (each, [by_lsn[lsn] for lsn in range(each.first_lsn, each.last.lsn + 1)])
        for each in objects
    ]


def archive(safekeeper: Safekeeper, bucket: Bucket, *, count_max: int = 1_000) -> int:
    """Put objects that are complete and missing; how many."""
    tip = bucket.archive_tip
    found = [(o, r) for o, r in complete(safekeeper) if not archiving.is_archived(o.wal_id, tip)]
    for each, records in found[:count_max]:
        bucket.judge.put(safekeeper.name, each.wal_id, records)
    return len(found[:count_max])


def trim(safekeeper: Safekeeper, bucket: Bucket) -> bool:
    """Drop what the member sees in the archive; whether there was anything."""
    assert safekeeper.state is not None
    tip = bucket.archive_tip
    mark = archiving.trim_mark(
        (each for each, _ in complete(safekeeper)),
        seen_wal_id=tip,
        committed_lsn=safekeeper.state.committed_lsn,
    )
    if mark is None or tip is None:
        return False
    safekeeper.note_archived(tip, mark)
    return True
