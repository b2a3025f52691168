"""Copies of objects: their names and checks, copying in bounded memory, and verification.

Every byte of an SST is covered by a checksum of the SST itself. In a repository, the name of a copy
contains another checksum of all its bytes.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from shalekv.concurrency import in_parallel
from shalekv.errors import BadChecksum, CorruptObject, ObjectNotFound, Truncated, WrongObject
from shalekv.format.backup import Backup, Copy, LevelCopy, WalCopy, backup_name
from shalekv.format.coding import crc32c
from shalekv.format.names import level_name
from shalekv.format.sst import Sst, open_sst
from shalekv.jobs.backup.plan import check_whole
from shalekv.jobs.backup.repository import Repository
from shalekv.protocol.sst_table import SstInfo
from shalekv.read.read_budget import ReadBudget
from shalekv.settings.model import MIB

DEFAULT_PARALLEL = 8
DEFAULT_BYTES_MAX = 256 * MIB

ItemT = TypeVar("ItemT")


def level_copy(info: SstInfo, data: bytes) -> LevelCopy:
    """Check the bytes of an SST; return the name of its copy. Raises `CorruptObject`."""
    name = level_name(info.id)
    check_size(name, data, info.size_bytes)
    open_sst(name, data, database_id=None, checksum=info.checksum)
    return LevelCopy(info.id, crc32c(data))


def wal_copy(name: str, data: bytes, wal_id: int, database_id: bytes) -> WalCopy:
    """Check the bytes of a WAL object; return the name of its copy. Raises `CorruptObject`."""
    sst = open_sst(name, data, database_id=database_id)
    return WalCopy(wal_id, sst.properties.write_id, crc32c(data))


def check_copy(copy: Copy, size_bytes: int, data: bytes) -> Sst:
    """Check the bytes of a copy; return its SST. Raises `CorruptObject`, which names the copy."""
    name = str(copy)
    check_size(name, data, size_bytes)
    checksum = crc32c(data)
    if checksum != copy.checksum:
        problem = f"checksum is {checksum:#010x}, expected {copy.checksum:#010x}"
        raise BadChecksum(name, 0, problem)
    sst = open_sst(copy.source, data, database_id=None)
    if isinstance(copy, WalCopy) and sst.properties.write_id != copy.write_id:
        raise WrongObject(name, 0, f"its write id is {sst.properties.write_id.hex()}")
    return sst


def check_size(name: str, data: bytes, size_bytes: int) -> None:
    """Raise `Truncated` unless `data` has `size_bytes`."""
    if len(data) != size_bytes:
        problem = f"has {len(data)} bytes, expected {size_bytes}"
        raise Truncated(name, min(len(data), size_bytes), problem)


@dataclass(frozen=True, slots=True)
class CopyLimits:
    """Bounds of concurrent copying; an object larger than `bytes_max` is copied alone."""

    parallel: int = DEFAULT_PARALLEL
    bytes_max: int = DEFAULT_BYTES_MAX


@dataclass(slots=True)
class CopyProgress:
    """Progress of copying, and the totals as far as they are known."""

    objects_total: int = 0
    bytes_total: int = 0
    objects_copied: int = 0
    bytes_copied: int = 0
    objects_present: int = 0  # they existed before
    bytes_present: int = 0

    def expect(self, objects: int, size_bytes: int) -> None:
        """Add objects to the totals."""
        self.objects_total += objects
        self.bytes_total += size_bytes

    def copied(self, size_bytes: int) -> None:
        """Count an object that was copied."""
        self.objects_copied += 1
        self.bytes_copied += size_bytes

    def present(self, size_bytes: int) -> None:
        """Count an object that existed before."""
        self.objects_present += 1
        self.bytes_present += size_bytes


async def for_each(
    items: Iterable[ItemT],
    act: Callable[[ItemT], Awaitable[None]],
    size_bytes: Callable[[ItemT], int],
    limits: CopyLimits,
) -> None:
    """Call `act` for every item, several at once. The first error stops all, and is raised."""
    remaining = iter(items)
    budget = ReadBudget(limits.bytes_max)

    async def work() -> None:
        for item in remaining:
            async with budget.reserve(size_bytes(item)):
                await act(item)

    await in_parallel(work, limits.parallel)


@dataclass(frozen=True, slots=True)
class Damage:
    """A damaged or missing object of a repository."""

    name: str
    problem: str
    backup_ids: tuple[str, ...]  # those that cannot be restored because of it


class VerifyJob:
    """Verifies backups by reading every byte; copies that several share are read once."""

    def __init__(self, repository: Repository, *, limits: CopyLimits | None = None) -> None:
        """Read nothing yet."""
        self._repository = repository
        self._limits = limits or CopyLimits()
        self.progress = CopyProgress()

    async def run(self, backup_ids: Sequence[str]) -> list[Damage]:
        """Verify backups; return all damage by name. Raises `BackupNotFound` and `StoreError`."""
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
            data = (await store.get(str(copy))).data
            await store.runtime.workers.run(check_copy, copy, size_bytes, data)
        except ObjectNotFound:
            return "is missing"
        except CorruptObject as error:
            return error.problem
        return None


def damaged_backups(damages: Iterable[Damage]) -> list[str]:
    """Return the ids of the backups that cannot be restored."""
    return sorted({backup_id for damage in damages for backup_id in damage.backup_ids})
