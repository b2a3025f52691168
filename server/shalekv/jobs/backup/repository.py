"""The place where backups are: what says what each consists of, copies, and marks.

One repository has backups of one database. Copies are shared by all backups that need them, so
somebody who deletes must not meet somebody who counts on what is there. Both put a mark there and
then look for marks of the other kind; lists are consistent, so one of the two sees the other. The
mark of somebody who was interrupted may be taken away: who makes a backup looks for the own one
after the backup was made known, and takes that back if it is gone. So no clock decides. Who makes a
backup gives signs of life beside the mark, so that long ones are not taken for interrupted.
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


class Repository:
    """The backups in one store."""

    def __init__(self, store: CasStore) -> None:
        """Nothing is read yet."""
        self.store = store

    @property
    def url(self) -> str:
        """Where it is, without credentials."""
        return self.store.url

    async def ids(self) -> list[str]:
        """Of all backups, the oldest first."""
        listed = [info.name async for info in self.store.reads.list(BACKUPS_FOLDER)]
        return [found for name in listed if (found := parse_backup_name(name)) is not None]

    async def read(self, backup_id: str) -> Backup:
        """This backup. Raises `BackupNotFound` and `CorruptObject`."""
        name = backup_name(backup_id)
        try:
            data = (await self.store.reads.get(name)).data
        except ObjectNotFound:
            problem = f"{self.url} has no backup {backup_id}: see `shalekv backup list`"
            raise BackupNotFound(problem) from None
        return await self.store.runtime.workers.run(decode_backup, name, data)

    async def newest(self) -> Backup | None:
        """The last one; None: there is none yet."""
        ids = await self.ids()
        return await self.read(ids[-1]) if ids else None

    async def chosen(self, backup_id: str | None) -> Backup:
        """The backup with this id; without one, the newest. Raises `BackupNotFound`."""
        if backup_id is not None:
            return await self.read(backup_id)
        newest = await self.newest()
        if newest is None:
            raise BackupNotFound(f"{self.url} has no backup: make one, or give another URL")
        return newest

    async def copies(self) -> dict[Copy, int]:
        """All copies that are there, and how many bytes they have."""
        folders = (WAL_FOLDER, LEVELS_FOLDER)
        listed = [info for folder in folders async for info in self.store.reads.list(folder)]
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
        """Create an object, or find that it is there already. Raises `IllegalState`."""
        if isinstance(await self.store.claim(name, data), Taken):
            message = (
                f"{name} in {self.url} has other bytes than belong under this name: it is damaged. "
                "Delete it, and run the command again"
            )
            raise IllegalState(message)

    async def begin(self, work: MarkPurpose) -> BackupMark:
        """Put a mark there. Raises `BackupBusy` when a backup would meet a deletion."""
        now_ms = await self.store.reads.now_ms()
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
        """All that are there, each with its latest sign of life."""
        latest = {(each.work_id, each.work): each for each in await self._marks_and_signs()}
        return [*latest.values()]

    async def show_life(self, mark: BackupMark) -> None:
        """Say that the work still goes on. Raises `BackupBusy` when somebody has ended it."""
        before = [each for each in await self._signs(mark) if each.sign_id]
        random_bytes = self.store.runtime.random.randbytes(RANDOM_BYTES)
        sign_id = new_backup_id(await self.store.reads.now_ms(), random_bytes)
        await self.put(str(replace(mark, sign_id=sign_id)), sign_id.encode())
        await self.store.reads.delete(map(str, before))
        await self._check(mark)

    async def end(self, mark: BackupMark) -> None:
        """Take a mark away, and its signs of life."""
        await self.store.reads.delete(map(str, await self._signs(mark)))

    async def abandon(self, mark: BackupMark) -> None:
        """The same, on the way out of an error: what stays is told by its name."""
        with suppress(StoreError):
            await self.end(mark)

    async def publish(self, backup: Backup, mark: BackupMark) -> None:
        """Make the backup known, whose copies are all there. Raises `BackupBusy`.

        `mark` was put there before it was looked which copies there are.
        """
        await self._check(mark)
        data = await self.store.runtime.workers.run(encode_backup, backup)
        await self.put(backup.name, data)
        try:
            await self._check(mark)
        except BackupBusy:
            await self.store.reads.delete([backup.name])
            raise
        await self.end(mark)

    async def _marks_and_signs(self) -> list[BackupMark]:
        """In the order of time, as far as they are of one work."""
        listed = [info.name async for info in self.store.reads.list(MARKS_FOLDER)]
        return [found for name in listed if (found := parse_mark(name)) is not None]

    async def _signs(self, mark: BackupMark) -> list[BackupMark]:
        return [each for each in await self._marks_and_signs() if each.work_id == mark.work_id]

    async def _check(self, mark: BackupMark) -> None:
        try:
            await self.store.reads.head(str(mark))
        except ObjectNotFound:
            message = (
                f"somebody has deleted backups in {self.url} and taken this one for abandoned: "
                "what it had copied may be gone. Run the command again"
            )
            raise BackupBusy(message) from None


def busy_message(url: str, mark: BackupMark) -> str:
    """What to do about somebody else who is at work."""
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


# --- deleting
# Deletes backups, and then the copies that no backup names any more.


log = structlog.get_logger()

ABANDONED_MS = 86_400_000  # a backup without a sign of life for so long is taken for interrupted
PER_S_COUNT = 1_000


@dataclass(frozen=True, slots=True)
class Deleted:
    """What a deletion came to."""

    backups: int
    objects: int  # copies that nothing named
    size_bytes: int  # of them
    left_because: tuple[str, ...] = ()  # copies were left alone: somebody is at work


class Deletion:
    """Deletes backups from one repository."""

    def __init__(self, repository: Repository, *, is_abandoning: bool = False) -> None:
        """With `is_abandoning`, whoever else has put a mark there is taken for interrupted."""
        self._repository = repository
        self._is_abandoning = is_abandoning

    async def run(self, backup_ids: Sequence[str]) -> Deleted:
        """Delete these backups, or none, and all copies that no backup needs.

        While a backup is made, its copies cannot be told from those that nobody needs: then copies
        are left for the next deletion. Raises `BackupNotFound`, and then nothing was deleted;
        `CorruptObject` when it cannot be read what a backup needs, and then no copy was deleted;
        `StoreError`.
        """
        repository = self._repository
        missing = sorted({*backup_ids} - {*await repository.ids()})
        if missing:
            raise BackupNotFound(f"{repository.url} has no backup {', '.join(missing)}")
        mark = await repository.begin(MarkPurpose.DELETION)
        try:
            await repository.store.reads.delete(map(backup_name, backup_ids))
            left_because = await self._others(mark)
            doomed = {} if left_because else await self._doomed()
        except BaseException:
            await repository.abandon(mark)
            raise
        await self._delete(doomed)  # if this fails, it may still take effect: the mark stays
        await repository.end(mark)
        size_bytes = sum(doomed.values())
        return Deleted(len(backup_ids), len(doomed), size_bytes, left_because)

    async def _others(self, own: BackupMark) -> tuple[str, ...]:
        """Who makes a backup now; marks of those who were interrupted are taken away."""
        now_ms = await self._repository.store.reads.now_ms()
        told = []
        for mark in await self._repository.marks():
            is_old = mark.seen_ms < now_ms - ABANDONED_MS
            if mark.work_id == own.work_id:
                continue
            if self._is_abandoning or (mark.work is MarkPurpose.CREATION and is_old):
                await self._repository.end(mark)
            elif mark.work is MarkPurpose.CREATION:
                told.append(busy_message(self._repository.url, mark))
        return tuple(told)

    async def _doomed(self) -> dict[Copy, int]:
        """Copies that no backup names. A backup that is made known from now on was told to wait."""
        copies = await self._repository.copies()
        for backup_id in await self._repository.ids():
            for copy, _ in (await self._repository.read(backup_id)).copies:
                copies.pop(copy, None)
        return copies

    async def _delete(self, doomed: dict[Copy, int]) -> None:
        store = self._repository.store
        gone = {str(copy) for copy in doomed}
        deleter = Deleter(store.reads, store.runtime.clock, per_s_count=PER_S_COUNT)
        await deleter.delete(sorted(gone))
        await store.recover(partial(_is_gone, gone))
        log.info("copies deleted", url=store.url, objects=len(gone))


def _is_gone(copies: Collection[str], name: str) -> bool:
    """Whether nobody misses an object that was there: ids of backups and marks never come back."""
    return name in copies or name.startswith((BACKUPS_FOLDER, MARKS_FOLDER))
