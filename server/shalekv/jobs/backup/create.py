"""Making a backup: protect, copy what is not there yet, and make it known last.

Whatever this leaves when it is interrupted is copies that no backup names, and a mark: the next
backup copies none of them again. A snapshot protects the source meanwhile, and expires by itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import structlog

from shalekv.engine.backup.checking import level_copy
from shalekv.engine.backup.log import LogCopier
from shalekv.engine.backup.protecting import protected
from shalekv.engine.levels.origins import Origins
from shalekv.errors import IllegalState
from shalekv.format.backup import Backup
from shalekv.format.backup_names import Copy, LevelCopy, Mark, Work
from shalekv.format.manifest import decode_manifest, encode_manifest
from shalekv.format.names import level_name, manifest_name
from shalekv.jobs.backup.copy import Copying, CopyLimits, for_each
from shalekv.jobs.backup.plan import wanted_ssts
from shalekv.jobs.backup.repository import Repository
from shalekv.protocol.loads import drop_unrecorded
from shalekv.protocol.manifest import Manifest
from shalekv.protocol.sst_table import SstInfo
from shalekv.store.cas import CasStore
from shalekv.store.manifests import StoredManifest
from shalekv.write.snapshots import Snapshots

log = structlog.get_logger()

DEFAULT_TTL_MS = 600_000


@dataclass(frozen=True, slots=True)
class _There:
    """The copies that are there, by what they are of."""

    copies: Mapping[Copy, int]
    levels: Mapping[bytes, LevelCopy]

    @classmethod
    def of(cls, copies: Mapping[Copy, int]) -> _There:
        """Of a list of them."""
        return cls(copies, {each.sst_id: each for each in copies if isinstance(each, LevelCopy)})


class BackupCreation:
    """Makes one backup of the database in `source`."""

    def __init__(
        self,
        source: CasStore,
        repository: Repository,
        *,
        limits: CopyLimits | None = None,
        ttl_ms: int = DEFAULT_TTL_MS,
    ) -> None:
        """`ttl_ms` is how long the snapshot in the source lives on if this is interrupted."""
        self._source = source
        self._repository = repository
        self._limits = limits or CopyLimits()
        self._ttl_ms = ttl_ms
        self.progress = Copying()

    async def run(self) -> Backup:
        """Make it. Its copies are verified before they are written.

        Raises `DatabaseNotFound`, `DatabaseMismatch`, `BackupBusy`, `ManifestConflict`,
        `CorruptObject` and `ObjectNotFound` when the source is damaged, `SnapshotNotFound` when
        this stood still until the snapshot had expired, and `StoreError`.
        """
        current = await StoredManifest(self._source).refresh()
        await self._repository.check_same_database(current.database_id)
        mark = await self._repository.begin(Work.CREATION)
        try:
            backup = await self._copied(mark)
            await self._repository.publish(backup, mark)
        except BaseException:
            await self._repository.abandon(mark)
            raise
        log.info("backup made", backup_id=backup.backup_id, url=self._repository.url)
        return backup

    async def _copied(self, mark: Mark) -> Backup:
        snapshots = Snapshots(self._source)
        snapshot = await snapshots.create(name=f"backup {mark.work_id}", ttl_ms=self._ttl_ms)

        async def work() -> Backup:
            name = manifest_name(snapshot.manifest_id)
            data = (await self._source.reads.get(name)).data
            manifest = await self._source.runtime.workers.run(decode_manifest, name, data)
            return await self._copy(mark, manifest, data)

        async def renew() -> None:
            await snapshots.renew(snapshot.id.hex(), ttl_ms=self._ttl_ms)
            await self._repository.show_life(mark)

        backup = await protected(self._source, renew, self._ttl_ms, work)
        await snapshots.delete(snapshot.id.hex())
        return backup

    async def _copy(self, mark: Mark, manifest: Manifest, data: bytes) -> Backup:
        there = _There.of(await self._repository.copies())
        copier = LogCopier(self._source, self._repository, there.copies, self.progress)
        copied_log = await copier.copy(manifest, self._limits)
        # The files of a load that no record commits may not be there yet, and need never come.
        committed = drop_unrecorded(manifest, copied_log.load_ids)
        if committed != manifest:
            manifest, data = committed, encode_manifest(committed)
        levels = await self._copy_levels(manifest, there)
        return Backup(
            backup_id=mark.work_id,
            source_url=self._source.url,
            seq=max(copied_log.seq, manifest.last_compacted_seq),
            logical_time_ms=max(copied_log.logical_time_ms, manifest.logical_time_ms),
            manifest=manifest,
            manifest_bytes=data,
            copies=(*copied_log.copies, *levels),
        )

    async def _copy_levels(self, manifest: Manifest, there: _There) -> list[tuple[Copy, int]]:
        wanted = [*wanted_ssts(manifest)]
        self.progress.expect(len(wanted), sum(info.size_bytes for info in wanted))
        found: dict[bytes, LevelCopy] = {}
        missing = []
        for info in wanted:
            copy = there.levels.get(info.id)
            if copy is None:
                missing.append(info)
            else:
                _check_size(copy, there.copies[copy], info)
                found[info.id] = copy
                self.progress.present(info.size_bytes)

        origins = Origins(self._source, manifest.database_id, manifest.origins)

        async def act(info: SstInfo) -> None:
            place = origins.locate(info.id)
            data = (await place.store.reads.get(level_name(info.id))).data
            copy = await self._source.runtime.workers.run(level_copy, info, data)
            await self._repository.put(str(copy), data)
            found[info.id] = copy
            self.progress.copied(info.size_bytes)

        try:
            await for_each(missing, act, lambda info: info.size_bytes, self._limits)
        finally:
            await origins.close()
        return [(found[info.id], info.size_bytes) for info in wanted]


def _check_size(copy: LevelCopy, size_bytes: int, info: SstInfo) -> None:
    """A copy is there whole or not at all: one of another size is damaged."""
    if size_bytes != info.size_bytes:
        message = (
            f"{copy} has {size_bytes} bytes, expected {info.size_bytes}: it is damaged. Delete it, "
            "and run the command again"
        )
        raise IllegalState(message)
