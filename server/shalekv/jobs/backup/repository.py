"""The place where backups are: what says what each consists of, copies, and marks.

One repository has backups of one database. Copies are shared by all backups that need them, so
somebody who deletes must not meet somebody who counts on what is there. Both put a mark there and
then look for marks of the other kind; lists are consistent, so one of the two sees the other. The
mark of somebody who was interrupted may be taken away: who makes a backup looks for the own one
after the backup was made known, and takes that back if it is gone. So no clock decides. Who makes a
backup gives signs of life beside the mark, so that long ones are not taken for interrupted.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime

from shalekv.errors import (
    BackupBusy,
    BackupNotFound,
    DatabaseMismatch,
    IllegalState,
    ObjectNotFound,
    StoreError,
)
from shalekv.format.backup import Backup, decode_backup, encode_backup
from shalekv.format.backup_names import (
    BACKUPS_FOLDER,
    LEVELS_FOLDER,
    MARKS_FOLDER,
    RANDOM_BYTES,
    WAL_FOLDER,
    Copy,
    Mark,
    Work,
    backup_name,
    begun_ms,
    new_backup_id,
    parse_backup_name,
    parse_copy,
    parse_mark,
)
from shalekv.store.cas import CasStore
from shalekv.store.claim import Taken


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

    async def begin(self, work: Work) -> Mark:
        """Put a mark there. Raises `BackupBusy` when a backup would meet a deletion."""
        now_ms = await self.store.reads.now_ms()
        random_bytes = self.store.runtime.random.randbytes(RANDOM_BYTES)
        mark = Mark(new_backup_id(now_ms, random_bytes), work)
        await self.put(str(mark), mark.work_id.encode())
        if work is Work.CREATION:
            for other in await self.marks():
                if other.work is Work.DELETION:
                    await self.end(mark)
                    raise BackupBusy(busy_message(self.url, other))
        return mark

    async def marks(self) -> list[Mark]:
        """All that are there, each with its latest sign of life."""
        latest = {(each.work_id, each.work): each for each in await self._marks_and_signs()}
        return [*latest.values()]

    async def show_life(self, mark: Mark) -> None:
        """Say that the work still goes on. Raises `BackupBusy` when somebody has ended it."""
        before = [each for each in await self._signs(mark) if each.sign_id]
        random_bytes = self.store.runtime.random.randbytes(RANDOM_BYTES)
        sign_id = new_backup_id(await self.store.reads.now_ms(), random_bytes)
        await self.put(str(replace(mark, sign_id=sign_id)), sign_id.encode())
        await self.store.reads.delete(map(str, before))
        await self._check(mark)

    async def end(self, mark: Mark) -> None:
        """Take a mark away, and its signs of life."""
        await self.store.reads.delete(map(str, await self._signs(mark)))

    async def abandon(self, mark: Mark) -> None:
        """The same, on the way out of an error: what stays is told by its name."""
        with suppress(StoreError):
            await self.end(mark)

    async def publish(self, backup: Backup, mark: Mark) -> None:
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

    async def _marks_and_signs(self) -> list[Mark]:
        """In the order of time, as far as they are of one work."""
        listed = [info.name async for info in self.store.reads.list(MARKS_FOLDER)]
        return [found for name in listed if (found := parse_mark(name)) is not None]

    async def _signs(self, mark: Mark) -> list[Mark]:
        return [each for each in await self._marks_and_signs() if each.work_id == mark.work_id]

    async def _check(self, mark: Mark) -> None:
        try:
            await self.store.reads.head(str(mark))
        except ObjectNotFound:
            message = (
                f"somebody has deleted backups in {self.url} and taken this one for abandoned: "
                "what it had copied may be gone. Run the command again"
            )
            raise BackupBusy(message) from None


def busy_message(url: str, mark: Mark) -> str:
    """What to do about somebody else who is at work."""
    begun = datetime.fromtimestamp(begun_ms(mark.work_id) / 1_000, UTC)
    at = begun.isoformat(timespec="seconds")
    if mark.work is Work.DELETION:
        return (
            f"a deletion in {url} that began at {at} has not ended. Wait for it; if it was "
            "interrupted, run `shalekv backup delete` there with --abandon"
        )
    return (
        f"a backup into {url} that began at {at} has not ended. Wait for it; if it was "
        "interrupted, and nobody will go on with it, use --abandon"
    )
