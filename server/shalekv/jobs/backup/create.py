"""Making a backup: protect the source, copy what the repository lacks, and publish last.

An interrupted backup leaves a mark, and copies that no backup references: the next backup does not
copy them again. A snapshot protects the source meanwhile, and expires by itself.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, replace
from typing import TypeVar

import structlog

from shalekv.errors import IllegalState, ManifestConflict, ShaleError, StoreUnavailable
from shalekv.format.backup import Backup, BackupMark, Copy, LevelCopy, MarkPurpose, WalCopy
from shalekv.format.footer import Footer, needed_tail, read_footer
from shalekv.format.manifest import decode_manifest, encode_manifest
from shalekv.format.names import WAL_FOLDER, level_name, manifest_name, parse_wal_name, wal_name
from shalekv.jobs.backup.copy import CopyLimits, CopyProgress, for_each, level_copy, wal_copy
from shalekv.jobs.backup.plan import needed_slots, needed_ssts
from shalekv.jobs.backup.repository import Repository
from shalekv.protocol.fencing import WalListing
from shalekv.protocol.loads import drop_unrecorded
from shalekv.protocol.manifest import Manifest
from shalekv.protocol.sst_table import SstInfo
from shalekv.read.origins import Origins
from shalekv.read.replay import loads_of, read_slot
from shalekv.store.cas import CasStore, log_retry
from shalekv.store.manifests import StoredManifest
from shalekv.store.policies import StoredPolicy
from shalekv.write.snapshots import Snapshots

DEFAULT_TTL_MS = 600_000
RENEWALS_PER_TTL = 3
TAIL_BYTES = 64 << 10  # holds the footer unless its keys are long; most objects are smaller

T = TypeVar("T")
log = structlog.get_logger()


async def with_renewal(
    store: CasStore,
    renew_once: Callable[[], Awaitable[None]],
    ttl_ms: int,
    work: Callable[[], Awaitable[T]],
) -> T:
    """Await ``work()`` and return its result; call ``renew_once()`` at intervals meanwhile.

    ``renew_once()`` is called `RENEWALS_PER_TTL` times in each `ttl_ms`. Raises what either raises,
    except for transient errors of a renewal.
    """
    outcome: list[T] = []

    async def run() -> None:
        outcome.append(await work())

    async def renew() -> None:
        failures = 0
        while True:
            await store.runtime.clock.sleep_ms(ttl_ms / RENEWALS_PER_TTL)
            try:
                await renew_once()
                failures = 0
            except (StoreUnavailable, ManifestConflict) as error:
                failures += 1  # one more renewal fits in before the expiry, unless two have failed
                log_retry(failures, error)

    try:
        async with asyncio.TaskGroup() as tasks:
            running = tasks.create_task(run())
            renewing = tasks.create_task(renew())
            running.add_done_callback(lambda _: renewing.cancel())
    except BaseExceptionGroup as errors:
        raise _cause(errors) from None
    return outcome[0]


def _cause(errors: BaseExceptionGroup[BaseException]) -> BaseException:
    """Return the error to raise: a `ShaleError` if there is one, since callers decide by type."""
    return next((e for e in errors.exceptions if isinstance(e, ShaleError)), errors.exceptions[0])


@dataclass(frozen=True, slots=True)
class CopiedLog:
    """The copies of a WAL in the order of their slots, and what they contain."""

    copies: list[tuple[WalCopy, int]]
    load_ids: frozenset[str]  # of the pending loads that its records commit
    seq: int  # the greatest sequence number
    logical_time_ms: int


class LogCopier:
    """Copies the WAL of a snapshot, as far as the repository lacks it.

    The footer of each object is read even if its copy exists: it has the write id by which the copy
    is found, and the sequence numbers and time of the backup.
    """

    def __init__(
        self,
        source: CasStore,
        repository: Repository,
        existing: Mapping[Copy, int],
        progress: CopyProgress,
    ) -> None:
        """`existing` are the copies in the repository, with their sizes."""
        self._source = source
        self._repository = repository
        self._existing = {
            (copy.wal_id, copy.write_id): (copy, size_bytes)
            for copy, size_bytes in existing.items()
            if isinstance(copy, WalCopy)
        }
        self._progress = progress

    async def copy(self, manifest: Manifest, limits: CopyLimits) -> CopiedLog:
        """Copy the slots of this manifest. Raises `IllegalState` when one is missing."""
        slots = needed_slots(manifest)
        sizes = await self._sizes(slots)
        self._progress.expect(len(slots), sum(sizes[wal_id] for wal_id in slots))
        copied: dict[int, WalCopy] = {}
        footers: dict[int, Footer] = {}
        load_ids: set[str] = set()

        async def act(wal_id: int) -> None:
            size_bytes = sizes[wal_id]
            tail = await self._tail(wal_id, size_bytes)
            footer = read_footer(
                wal_name(wal_id), tail, size_bytes, database_id=manifest.database_id
            )
            footers[wal_id] = footer
            if manifest.pending_loads and footer.contents.may_commit_load:
                load_ids.update(await self._load_ids(wal_id, manifest.database_id))
            existing = self._existing.get((wal_id, footer.properties.write_id))
            if existing is None:
                copied[wal_id] = await self._copy(wal_id, tail, size_bytes, manifest.database_id)
                self._progress.copied(size_bytes)
                return
            copied[wal_id], copied_bytes = existing
            if copied_bytes != size_bytes:
                message = (
                    f"{copied[wal_id]} has {copied_bytes} bytes, expected {size_bytes}: it is "
                    "damaged. Delete it, and run the command again"
                )
                raise IllegalState(message)
            self._progress.present(size_bytes)

        reset_wal_id = manifest.time_reset_wal_id
        await for_each(slots, act, lambda wal_id: sizes[wal_id], limits)
        return CopiedLog(
            [(copied[wal_id], sizes[wal_id]) for wal_id in slots],
            frozenset(load_ids),
            max((footer.contents.max_seq for footer in footers.values()), default=0),
            max((footer.proven_time_ms(reset_wal_id) for footer in footers.values()), default=0),
        )

    async def _sizes(self, slots: range) -> dict[int, int]:
        """List the objects in these slots and after them; return their sizes in bytes.

        Raises `IllegalState` when an object in these slots is missing, or a later one was deleted.
        """
        sizes = await self._list(slots)
        missing = next((wal_id for wal_id in slots if wal_id not in sizes), None)
        if missing is None and await self._is_missed(slots.stop, sizes):
            # A list takes several requests, and slots are filled meanwhile. A second list decides.
            again = await self._list(slots)
            gap = WalListing(slots.stop, frozenset(again)).first_gap
            was_there = WalListing(slots.stop, frozenset(sizes)).first_gap == gap
            missing = gap if was_there and await self._is_missed(slots.stop, again) else None
        if missing is not None:
            message = (
                f"{wal_name(missing)} is missing in {self._source.url} although it was written: it "
                "must have been deleted by hand. Put it back, or restore an older backup"
            )
            raise IllegalState(message)
        return sizes

    async def _is_missed(self, first: int, sizes: Mapping[int, int]) -> bool:
        """Return whether the object in the first gap was deleted.

        It was if a slot is filled so far after the gap that its writer had filled the gap before.
        """
        folder = WalListing(first, frozenset(sizes))
        if max(sizes, default=-1) <= folder.first_gap:
            return False
        current = await StoredManifest(self._source).refresh()
        if any(folder.first_gap in left_out for left_out in current.wal_ids_left_out):
            return False  # the log goes on after these ids
        return folder.misses_an_object(width=current.upload_window, last_seen=None)

    async def _list(self, slots: range) -> dict[int, int]:
        start_after = wal_name(slots.start - 1) if slots.start else ""
        listed = self._source.list(WAL_FOLDER, start_after=start_after)
        found = [(parse_wal_name(info.name), info.size_bytes) async for info in listed]
        return {wal_id: size_bytes for wal_id, size_bytes in found if wal_id is not None}

    async def _load_ids(self, wal_id: int, database_id: bytes) -> list[str]:
        """Read the ids of the loads that this object commits."""
        found = await read_slot(self._source, wal_id, database_id)
        if isinstance(found, ShaleError):
            raise found
        return [load.load_id for load in loads_of(found)]

    async def _tail(self, wal_id: int, size_bytes: int) -> bytes:
        """Read the end of an object with at least its footer; of a small one everything."""
        name = wal_name(wal_id)
        if size_bytes <= TAIL_BYTES:
            return (await self._source.get(name)).data
        tail = await self._source.get_range(name, -TAIL_BYTES, TAIL_BYTES)
        needed = needed_tail(name, tail, size_bytes)
        if needed > TAIL_BYTES:
            tail = await self._source.get_range(name, -needed, needed)
        return tail

    async def _copy(self, wal_id: int, tail: bytes, size_bytes: int, database_id: bytes) -> WalCopy:
        name = wal_name(wal_id)
        is_all = len(tail) == size_bytes
        data = tail if is_all else (await self._source.get(name)).data
        run = self._source.runtime.workers.run
        copy = await run(wal_copy, name, data, wal_id, database_id)
        await self._repository.put(str(copy), data)
        return copy


@dataclass(frozen=True, slots=True)
class _ExistingCopies:
    """The copies in the repository, and those of SSTs by id."""

    copies: Mapping[Copy, int]
    levels: Mapping[bytes, LevelCopy]

    @classmethod
    def of(cls, copies: Mapping[Copy, int]) -> _ExistingCopies:
        """Index the listed copies."""
        return cls(copies, {each.sst_id: each for each in copies if isinstance(each, LevelCopy)})


class BackupJob:
    """Makes one backup of the database in `source`."""

    def __init__(
        self,
        source: CasStore,
        repository: Repository,
        *,
        limits: CopyLimits | None = None,
        ttl_ms: int = DEFAULT_TTL_MS,
    ) -> None:
        """`ttl_ms` is the time after which the snapshot expires if the backup is interrupted."""
        self._source = source
        self._repository = repository
        self._limits = limits or CopyLimits()
        self._ttl_ms = ttl_ms
        self.progress = CopyProgress()

    async def run(self) -> Backup:
        """Make and return the backup. Its copies are verified before they are written.

        Raises `DatabaseNotFound`, `DatabaseMismatch`, `BackupBusy`, `ManifestConflict`,
        `CorruptObject` and `ObjectNotFound` when the source is damaged, `SnapshotNotFound` when
        this process was stopped until the snapshot had expired, and `StoreError`.
        """
        current = await StoredManifest(self._source).refresh()
        await self._repository.check_same_database(current.database_id)
        mark = await self._repository.begin(MarkPurpose.CREATION)
        try:
            backup = await self._copied(mark)
            await self._repository.publish(backup, mark)
        except BaseException:
            await self._repository.end_after_error(mark)
            raise
        log.info("backup made", backup_id=backup.backup_id, url=self._repository.url)
        return backup

    async def _copied(self, mark: BackupMark) -> Backup:
        snapshots = Snapshots(self._source)
        snapshot = await snapshots.create(name=f"backup {mark.work_id}", ttl_ms=self._ttl_ms)

        async def work() -> Backup:
            name = manifest_name(snapshot.manifest_id)
            data = (await self._source.get(name)).data
            manifest = await self._source.runtime.workers.run(decode_manifest, name, data)
            return await self._copy(mark, manifest, data)

        async def renew() -> None:
            await snapshots.renew(snapshot.id.hex(), ttl_ms=self._ttl_ms)
            await self._repository.heartbeat(mark)

        backup = await with_renewal(self._source, renew, self._ttl_ms, work)
        await snapshots.delete(snapshot.id.hex())
        return backup

    async def _copy(self, mark: BackupMark, manifest: Manifest, data: bytes) -> Backup:
        existing = _ExistingCopies.of(await self._repository.copies())
        copier = LogCopier(self._source, self._repository, existing.copies, self.progress)
        copied_log = await copier.copy(manifest, self._limits)
        # The SSTs of a load that no record commits may not exist yet, and may never.
        committed = drop_unrecorded(manifest, copied_log.load_ids)
        if committed != manifest:
            manifest, data = committed, encode_manifest(committed)
        levels = await self._copy_levels(manifest, existing)
        policy = await StoredPolicy(self._source, manifest.database_id).refresh()
        return Backup(
            backup_id=mark.work_id,
            source_url=self._source.url,
            seq=max(copied_log.seq, manifest.last_compacted_seq),
            logical_time_ms=max(copied_log.logical_time_ms, manifest.logical_time_ms),
            manifest=manifest,
            manifest_bytes=data,
            copies=(*copied_log.copies, *levels),
            policy=replace(policy, secret=b""),
        )

    async def _copy_levels(
        self, manifest: Manifest, existing: _ExistingCopies
    ) -> list[tuple[Copy, int]]:
        wanted = [*needed_ssts(manifest)]
        self.progress.expect(len(wanted), sum(info.size_bytes for info in wanted))
        found: dict[bytes, LevelCopy] = {}
        missing = []
        for info in wanted:
            copy = existing.levels.get(info.id)
            if copy is None:
                missing.append(info)
            else:
                _check_size(copy, existing.copies[copy], info)
                found[info.id] = copy
                self.progress.present(info.size_bytes)

        origins = Origins(self._source, manifest.database_id, manifest.origins)

        async def act(info: SstInfo) -> None:
            place = origins.locate(info.id)
            data = (await place.store.get(level_name(info.id))).data
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
    """Raise `IllegalState` if a copy has another size: copies are created whole or not at all."""
    if size_bytes != info.size_bytes:
        message = (
            f"{copy} has {size_bytes} bytes, expected {info.size_bytes}: it is damaged. Delete it, "
            "and run the command again"
        )
        raise IllegalState(message)
