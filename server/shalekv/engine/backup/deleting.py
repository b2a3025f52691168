"""Deletes backups, and then the copies that no backup names any more."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import partial

import structlog

from shalekv.engine.collection.deleting import Deleter
from shalekv.errors import BackupNotFound
from shalekv.format.backup_names import (
    BACKUPS_FOLDER,
    MARKS_FOLDER,
    Copy,
    Mark,
    Work,
    backup_name,
)
from shalekv.jobs.backup.repository import Repository, busy_message

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
        mark = await repository.begin(Work.DELETION)
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

    async def _others(self, own: Mark) -> tuple[str, ...]:
        """Who makes a backup now; marks of those who were interrupted are taken away."""
        now_ms = await self._repository.store.reads.now_ms()
        told = []
        for mark in await self._repository.marks():
            is_old = mark.seen_ms < now_ms - ABANDONED_MS
            if mark.work_id == own.work_id:
                continue
            if self._is_abandoning or (mark.work is Work.CREATION and is_old):
                await self._repository.end(mark)
            elif mark.work is Work.CREATION:
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
