"""Restoring a backup: copy everything, and create the manifest last, which makes it a database.

Until the manifest exists, the target is no database, and another run continues the restoration:
objects that exist are accepted if they have the right bytes. The access policy of the backup is
there before the manifest: at no time is a database open whose original was not.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import structlog

from shalekv.errors import DatabaseExists, IllegalState
from shalekv.format.backup import RESTORATION_NAME, Backup, Copy, WalCopy
from shalekv.format.coding import crc32c
from shalekv.format.manifest import encode_manifest
from shalekv.format.names import (
    LEVELS_FOLDER,
    MANIFEST_FOLDER,
    WAL_FOLDER,
    manifest_name,
    parse_manifest_name,
    parse_wal_name,
)
from shalekv.jobs.backup.copy import CopyLimits, CopyProgress, check_copy, for_each
from shalekv.jobs.backup.plan import check_whole, restored_manifest, wal_copies
from shalekv.jobs.backup.repository import Repository
from shalekv.protocol.manifest import Manifest
from shalekv.store.api import NO_METADATA, ObjectInfo
from shalekv.store.cas import CasStore, Taken
from shalekv.store.policies import begin_policy
from shalekv.write.wal import EPOCH_METADATA

log = structlog.get_logger()

Prove = Callable[[], Awaitable[None]]


class RestoreJob:
    """Restores one backup as a database in `target`."""

    def __init__(
        self,
        repository: Repository,
        target: CasStore,
        prove: Prove,
        *,
        limits: CopyLimits | None = None,
    ) -> None:
        """`prove` raises unless the target is fit to hold a database."""
        self._repository = repository
        self._target = target
        self._prove = prove
        self._limits = limits or CopyLimits()
        self.progress = CopyProgress()

    async def run(self, backup: Backup) -> Manifest:
        """Restore the backup; return the manifest. All copies are verified before they are written.

        Raises `DatabaseExists`; `IllegalState` when the target holds objects that belong neither to
        this backup nor to a database; `CorruptObject` and `ObjectNotFound` when the backup is
        damaged; `StoreUnfit` and other kinds of `StoreError`.
        """
        await self._target.repair()
        run = self._target.runtime.workers.run
        await run(check_whole, backup)
        manifest = restored_manifest(backup, self._target.cas_mode)
        data = await run(encode_manifest, manifest)
        name = manifest_name(manifest.manifest_id)
        if not await self._manifests():
            await self._prove()
            await self._begin(backup)
            if not await self._manifests():
                await self._copy(backup)
                await self._check_log(backup)  # again: another process may have written
                await begin_policy(self._target, manifest.database_id, backup.policy)
                await self._target.claim(name, data)
        await self._check_restored(name, data)
        await self._target.delete([RESTORATION_NAME])
        log.info("database restored", url=self._target.url, backup_id=backup.backup_id)
        return manifest

    async def _begin(self, backup: Backup) -> None:
        """Mark the target as being restored from this backup. Raises `IllegalState` for another.

        Concurrent restorations of one backup write the same; those of two would mix their logs.
        """
        outcome = await self._target.claim(RESTORATION_NAME, backup.backup_id.encode())
        if isinstance(outcome, Taken):
            other = outcome.data.decode(errors="replace")
            message = (
                f"{self._target.url} has a part of backup {other}, which was not restored to its "
                "end: restore that one, empty the place, or restore to another URL"
            )
            raise IllegalState(message)

    async def _check_restored(self, name: str, data: bytes) -> None:
        """Raise `DatabaseExists` unless this is the manifest of the database, and its only one."""
        if await self._manifests() != [name] or (await self._target.get(name)).data != data:
            raise self._exists()

    def _exists(self) -> DatabaseExists:
        return DatabaseExists(
            f"{self._target.url} holds a database already: restore to another URL"
        )

    async def _manifests(self) -> list[str]:
        listed = self._target.list(MANIFEST_FOLDER)
        return [info.name async for info in listed if parse_manifest_name(info.name) is not None]

    async def _check_log(self, backup: Backup) -> None:
        """Raise `IllegalState` if a slot of another log exists: a writer would go on after it."""
        own = {copy.source for copy in wal_copies(backup)}
        async for info in self._target.list(WAL_FOLDER):
            if parse_wal_name(info.name) is not None and info.name not in own:
                message = (
                    f"{self._target.url} holds {info.name}, which is not of backup "
                    f"{backup.backup_id}: empty the place, or restore to another URL"
                )
                raise IllegalState(message)

    async def _copy(self, backup: Backup) -> None:
        await self._check_log(backup)
        existing = {
            info.name: info
            for folder in (WAL_FOLDER, LEVELS_FOLDER)
            async for info in self._target.list(folder)
        }
        self.progress.expect(len(backup.copies), backup.size_bytes)

        async def act(item: tuple[Copy, int]) -> None:
            copy, size_bytes = item
            info = existing.get(copy.source)
            if info is not None:
                await self._check_existing(info, copy, size_bytes)
                self.progress.present(size_bytes)
                return
            await self._copy_one(copy, size_bytes)
            self.progress.copied(size_bytes)

        await for_each(backup.copies, act, lambda item: item[1], self._limits)

    async def _check_existing(self, info: ObjectInfo, copy: Copy, size_bytes: int) -> None:
        data = b""
        if info.size_bytes == size_bytes:
            data = (await self._target.get(info.name)).data
        if len(data) != size_bytes or crc32c(data) != copy.checksum:
            raise self._other_bytes(info.name)

    async def _copy_one(self, copy: Copy, size_bytes: int) -> None:
        data = (await self._repository.store.get(str(copy))).data
        sst = await self._target.runtime.workers.run(check_copy, copy, size_bytes, data)
        metadata = NO_METADATA
        if isinstance(copy, WalCopy):
            metadata = {EPOCH_METADATA: str(sst.properties.writer_epoch)}
        if isinstance(await self._target.claim(copy.source, data, metadata), Taken):
            raise self._other_bytes(copy.source)

    def _other_bytes(self, name: str) -> IllegalState:
        return IllegalState(
            f"{name} in {self._target.url} has other bytes than belong there: empty the place, or "
            "restore to another URL"
        )
