"""A repository: the place where the backups of one database are, and the deletion of backups.

A repository holds an object for each backup, which lists the copies that belong to it; the copies;
and marks. Backups share copies, so a deletion must not remove a copy that a running backup relies
on. Each operation puts a *mark* into the repository, and then searches for marks of the other kind.
Lists are consistent, so at least one of the two finds the mark of the other. A backup that finds a
deletion fails; a deletion that finds a backup deletes no copies.

The mark of an interrupted backup may be removed. If the backup is running nevertheless, it finds
after its publication that its mark is gone, and removes the publication. So correctness depends on
no clock. A backup also renews a heartbeat beside its mark, so that a long one is not taken for an
interrupted one.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial

import structlog

from shalekv.errors import (
    BackupBusy,
    BackupNotFound,
    DatabaseMismatch,
    IllegalState,
    ObjectNotFound,
    StoreError,
)
from shalekv.format.backup import (
    BACKUPS_FOLDER,
    LEVELS_FOLDER,
    MARKS_FOLDER,
    RANDOM_BYTES,
    WAL_FOLDER,
    Backup,
    BackupMark,
    Copy,
    MarkPurpose,
    backup_name,
    begun_ms,
    decode_backup,
    encode_backup,
    new_backup_id,
    parse_backup_name,
    parse_copy,
    parse_mark,
)
from shalekv.jobs.collect import Deleter
from shalekv.store.cas import CasStore, Taken

ABANDONED_MS = 86_400_000  # a backup without a heartbeat for so long counts as interrupted
PER_S_COUNT = 1_000  # deleted objects a second

log = structlog.get_logger()


class Repository:
    """The backups, copies and marks in one store."""

    def __init__(self, store: CasStore) -> None:
        """Read nothing yet."""
        self.store = store

    @property
    def url(self) -> str:
        """The URL of the repository, without credentials."""
        return self.store.url

    async def ids(self) -> list[str]:
        """Return the ids of all backups, oldest first."""
        listed = [info.name async for info in self.store.list(BACKUPS_FOLDER)]
        return [found for name in listed if (found := parse_backup_name(name)) is not None]

    async def read(self, backup_id: str) -> Backup:
        """Read a backup. Raises `BackupNotFound` and `CorruptObject`."""
        name = backup_name(backup_id)
        try:
            data = (await self.store.get(name)).data
        except ObjectNotFound:
            problem = f"{self.url} has no backup {backup_id}: see `shalekv backup list`"
            raise BackupNotFound(problem) from None
        return await self.store.runtime.workers.run(decode_backup, name, data)

    async def newest(self) -> Backup | None:
        """Read the newest backup; None: there is none yet."""
        ids = await self.ids()
        return await self.read(ids[-1]) if ids else None

    async def chosen(self, backup_id: str | None) -> Backup:
        """Read the backup with this id; without an id, the newest. Raises `BackupNotFound`."""
        if backup_id is not None:
            return await self.read(backup_id)
        newest = await self.newest()
        if newest is None:
            raise BackupNotFound(f"{self.url} has no backup: make one, or give another URL")
        return newest

    async def copies(self) -> dict[Copy, int]:
        """List all copies in the repository, with their sizes in bytes."""
        folders = (WAL_FOLDER, LEVELS_FOLDER)
        listed = [info for folder in folders async for info in self.store.list(folder)]
        parsed = ((parse_copy(info.name), info.size_bytes) for info in listed)
        return {copy: size_bytes for copy, size_bytes in parsed if copy is not None}

    async def check_same_database(self, database_id: bytes) -> None:
        """Raise `DatabaseMismatch` unless the backups here are of this database."""
        newest = await self.newest()
        if newest is not None and newest.manifest.database_id != database_id:
            message = (
                f"{self.url} has backups of the database {newest.manifest.database_id.hex()}, not "
                f"of {database_id.hex()}: choose another place for those of this one"
            )
            raise DatabaseMismatch(message)

    async def put(self, name: str, data: bytes) -> None:
        """Create an object, unless it exists. Raises `IllegalState` if it has other bytes."""
        if isinstance(await self.store.claim(name, data), Taken):
            message = (
                f"{name} in {self.url} has other bytes than belong under this name: it is damaged. "
                "Delete it, and run the command again"
            )
            raise IllegalState(message)

    async def begin(self, work: MarkPurpose) -> BackupMark:
        """Put a mark into the repository. For a backup, raises `BackupBusy` if a deletion runs."""
        now_ms = await self.store.now_ms()
        random_bytes = self.store.runtime.random.randbytes(RANDOM_BYTES)
        mark = BackupMark(new_backup_id(now_ms, random_bytes), work)
        await self.put(str(mark), mark.work_id.encode())
        if work is MarkPurpose.CREATION:
            for other in await self.marks():
                if other.work is MarkPurpose.DELETION:
                    await self.end(mark)
                    raise BackupBusy(busy_message(self.url, other))
        return mark

    async def marks(self) -> list[BackupMark]:
        """Return all marks, each with its latest heartbeat."""
        latest = {(each.work_id, each.work): each for each in await self._marks_and_heartbeats()}
        return [*latest.values()]

    async def heartbeat(self, mark: BackupMark) -> None:
        """Put a new heartbeat beside a mark. Raises `BackupBusy` if the mark was removed."""
        before = [each for each in await self._marks_of(mark) if each.heartbeat_id]
        random_bytes = self.store.runtime.random.randbytes(RANDOM_BYTES)
        heartbeat_id = new_backup_id(await self.store.now_ms(), random_bytes)
        await self.put(str(replace(mark, heartbeat_id=heartbeat_id)), heartbeat_id.encode())
        await self.store.delete(map(str, before))
        await self._check(mark)

    async def end(self, mark: BackupMark) -> None:
        """Remove a mark, and its heartbeats."""
        await self.store.delete(map(str, await self._marks_of(mark)))

    async def end_after_error(self, mark: BackupMark) -> None:
        """Remove the mark of an operation that has failed; its error is raised by the caller.

        Errors of the store are ignored: later operations report a mark that remains.
        """
        with suppress(StoreError):
            await self.end(mark)

    async def publish(self, backup: Backup, mark: BackupMark) -> None:
        """Publish a backup. Raises `BackupBusy` if its mark was removed meanwhile.

        REQUIRES: all its copies are in the repository, and the existing copies were listed only
        after `mark` was put there.
        """
        await self._check(mark)
        data = await self.store.runtime.workers.run(encode_backup, backup)
        await self.put(backup.name, data)
        try:
            await self._check(mark)
        except BackupBusy:
            await self.store.delete([backup.name])
            raise
        await self.end(mark)

    async def _marks_and_heartbeats(self) -> list[BackupMark]:
        """Return all marks and heartbeats; those of one operation are in the order of time."""
        listed = [info.name async for info in self.store.list(MARKS_FOLDER)]
        return [found for name in listed if (found := parse_mark(name)) is not None]

    async def _marks_of(self, mark: BackupMark) -> list[BackupMark]:
        return [each for each in await self._marks_and_heartbeats() if each.work_id == mark.work_id]

    async def _check(self, mark: BackupMark) -> None:
        try:
            await self.store.head(str(mark))
        except ObjectNotFound:
            message = (
                f"somebody has deleted backups in {self.url} and taken this one for abandoned: "
                "what it had copied may be gone. Run the command again"
            )
            raise BackupBusy(message) from None


def busy_message(url: str, mark: BackupMark) -> str:
    """Format what to do about another operation that has not ended."""
    begun = datetime.fromtimestamp(begun_ms(mark.work_id) / 1_000, UTC)
    at = begun.isoformat(timespec="seconds")
    if mark.work is MarkPurpose.DELETION:
        return (
            f"a deletion in {url} that began at {at} has not ended. Wait for it; if it was "
            "interrupted, run `shalekv backup delete` there with --abandon"
        )
    return (
        f"a backup into {url} that began at {at} has not ended. Wait for it; if it was "
        "interrupted, and nobody will go on with it, use --abandon"
    )


@dataclass(frozen=True, slots=True)
class Deleted:
    """The outcome of a deletion."""

    backups: int
    objects: int  # deleted copies, which no backup referenced
    size_bytes: int  # of them
    left_because: tuple[str, ...] = ()  # why copies were not deleted: running backups


class Deletion:
    """Deletes backups from a repository, and then the copies that no backup references any more."""

    def __init__(self, repository: Repository, *, is_abandoning: bool = False) -> None:
        """`is_abandoning`: treat every other operation that has a mark as interrupted."""
        self._repository = repository
        self._is_abandoning = is_abandoning

    async def run(self, backup_ids: Sequence[str]) -> Deleted:
        """Delete these backups, or none, and all copies that no backup needs.

        The copies of a running backup cannot be distinguished from those that no backup needs.
        While there is one, copies are left for the next deletion. Raises `BackupNotFound`, in which
        case nothing was deleted; `CorruptObject` when a backup cannot be read, in which case no
        copy was deleted; `StoreError`.
        """
        repository = self._repository
        missing = sorted({*backup_ids} - {*await repository.ids()})
        if missing:
            raise BackupNotFound(f"{repository.url} has no backup {', '.join(missing)}")
        mark = await repository.begin(MarkPurpose.DELETION)
        try:
            await repository.store.delete(map(backup_name, backup_ids))
            left_because = await self._others(mark)
            unreferenced = {} if left_because else await self._unreferenced()
        except BaseException:
            await repository.end_after_error(mark)
            raise
        await self._delete(unreferenced)  # after an error the mark stays: it may still take effect
        await repository.end(mark)
        size_bytes = sum(unreferenced.values())
        return Deleted(len(backup_ids), len(unreferenced), size_bytes, left_because)

    async def _others(self, own: BackupMark) -> tuple[str, ...]:
        """Describe the running backups; remove the marks of interrupted operations."""
        now_ms = await self._repository.store.now_ms()
        busy = []
        for mark in await self._repository.marks():
            is_old = mark.seen_ms < now_ms - ABANDONED_MS
            if mark.work_id == own.work_id:
                continue
            if self._is_abandoning or (mark.work is MarkPurpose.CREATION and is_old):
                await self._repository.end(mark)
            elif mark.work is MarkPurpose.CREATION:
                busy.append(busy_message(self._repository.url, mark))
        return tuple(busy)

    async def _unreferenced(self) -> dict[Copy, int]:
        """Find the copies that no backup references.

        No backup is published from now on: it would have seen the mark of this deletion.
        """
        copies = await self._repository.copies()
        for backup_id in await self._repository.ids():
            for copy, _ in (await self._repository.read(backup_id)).copies:
                copies.pop(copy, None)
        return copies

    async def _delete(self, unreferenced: dict[Copy, int]) -> None:
        store = self._repository.store
        gone = {str(copy) for copy in unreferenced}
        deleter = Deleter(store, per_s_count=PER_S_COUNT)
        await deleter.delete(sorted(gone))
        await store.repair(partial(_is_gone, gone))
        log.info("copies deleted", url=store.url, objects=len(gone))


def _is_gone(copies: Collection[str], name: str) -> bool:
    """Return whether a missing object was deleted on purpose, for `ObjectStore.repair`.

    Backups and marks count as well: their names are never used again.
    """
    return name in copies or name.startswith((BACKUPS_FOLDER, MARKS_FOLDER))
