"""Reads backups again, every byte, and tells what is wrong with them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from shalekv.engine.backup.checking import check_copy
from shalekv.errors import CorruptObject, ObjectNotFound
from shalekv.format.backup import Backup
from shalekv.format.backup_names import Copy, backup_name
from shalekv.jobs.backup.copy import Copying, CopyLimits, for_each
from shalekv.jobs.backup.plan import check_whole
from shalekv.jobs.backup.repository import Repository


@dataclass(frozen=True, slots=True)
class Damage:
    """An object of the repository that is not what it must be."""

    name: str
    problem: str
    backup_ids: tuple[str, ...]  # that cannot be restored because of it


class Verification:
    """One check of backups; copies that several share are read once."""

    def __init__(self, repository: Repository, *, limits: CopyLimits | None = None) -> None:
        """Nothing is read yet."""
        self._repository = repository
        self._limits = limits or CopyLimits()
        self.progress = Copying()

    async def run(self, backup_ids: Sequence[str]) -> list[Damage]:
        """What is wrong, by name. Raises `BackupNotFound` and `StoreError`."""
        damages: list[Damage] = []
        needed: dict[tuple[Copy, int], list[str]] = {}
        for backup_id in backup_ids:
            backup = await self._read(backup_id, damages)
            for each in () if backup is None else backup.copies:
                needed.setdefault(each, []).append(backup_id)
        self.progress.expect(len(needed), sum(size_bytes for _, size_bytes in needed))

        async def act(item: tuple[Copy, int]) -> None:
            copy, size_bytes = item
            problem = await self._problem(copy, size_bytes)
            if problem is not None:
                damages.append(Damage(str(copy), problem, tuple(needed[item])))
            self.progress.copied(size_bytes)

        await for_each(needed, act, lambda item: item[1], self._limits)
        return sorted(damages, key=lambda damage: damage.name)

    async def _read(self, backup_id: str, damages: list[Damage]) -> Backup | None:
        try:
            backup = await self._repository.read(backup_id)
            await self._repository.store.runtime.workers.run(check_whole, backup)
        except CorruptObject as error:
            damages.append(Damage(backup_name(backup_id), error.problem, (backup_id,)))
            return None
        return backup

    async def _problem(self, copy: Copy, size_bytes: int) -> str | None:
        store = self._repository.store
        try:
            data = (await store.reads.get(str(copy))).data
            await store.runtime.workers.run(check_copy, copy, size_bytes, data)
        except ObjectNotFound:
            return "is missing"
        except CorruptObject as error:
            return error.problem
        return None


def damaged_backups(damages: Iterable[Damage]) -> list[str]:
    """The ids of the backups that cannot be restored."""
    return sorted({backup_id for damage in damages for backup_id in damage.backup_ids})
