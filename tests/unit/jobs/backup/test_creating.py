"""Objects that a backup copies, and those that it does not copy again."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from functools import partial

import pytest

from shalekv.errors import DatabaseMismatch, DatabaseNotFound, IllegalState
from shalekv.format import names
from shalekv.format.backup import LevelCopy, WalCopy, parse_mark
from shalekv.format.records import load_entry
from shalekv.jobs.backup.copy import CopyLimits, for_each
from shalekv.jobs.backup.create import BackupJob
from shalekv.jobs.backup.repository import ABANDONED_MS, Deletion, Repository
from shalekv.protocol.manifest import WalMode
from shalekv.settings import StoreSettings
from shalekv.store.cas import CasStore
from shalekv.store.manifests import StoredManifest
from shalekv.store.memory import MemoryStore
from tests.kit.engine.backups import (
    Place,
    back_up,
    creation,
    database,
    in_process_cluster,
    restore,
    scanned,
    verify,
    write,
)
from tests.kit.engine.damage import SECOND_SEQ, Planted
from tests.kit.engine.running_log import yielding_runtime
from tests.kit.processes.in_process import wall_clock_ms
from tests.kit.store import FaultyStore, Request, at_each_request, at_request


async def test_backup_copies_only_what_is_new() -> None:
    """A second backup of the same state copies nothing; after a write, it copies the WAL object and
    the fence before it.
    """
    source, _ = await database()
    repository = Place()
    first = await back_up(source, repository)
    same = creation(source, repository)
    assert (await same.run()).copies == first.copies
    assert (same.progress.objects_copied, same.progress.bytes_copied) == (0, 0)
    await write(source, new="value")
    read = FaultyStore(source.store())
    again = creation(source, repository, read=read)
    second = await again.run()
    added = {*second.copies} - {*first.copies}
    assert all(isinstance(copy, WalCopy) for copy, _ in added)
    assert again.progress.objects_copied == len(added) == 2
    assert again.progress.bytes_copied == sum(size for _, size in added)
    assert again.progress.objects_present == len(second.copies) - len(added)
    assert not read.asked("get", names.LEVELS_FOLDER)
    assert not read.asked("get_range", names.LEVELS_FOLDER)
    assert second.seq > first.seq
    assert second.backup_id > first.backup_id
    assert await scanned_of(repository, second.backup_id) == await scanned(source)


async def test_diverged_histories_share_no_slot() -> None:
    """Backups of a database and of an older copy of it, with other bytes in the same slots, both
    restore.
    """
    source, _ = await database()
    twin = source.copy()
    repository = Place()
    await write(source, side="one")
    await write(twin, side="other")
    one = await back_up(source, repository)
    other = await back_up(twin, repository)
    assert one.manifest.wal_id_last_seen == other.manifest.wal_id_last_seen
    assert (await scanned_of(repository, one.backup_id))[b"side"] == b"one"
    assert (await scanned_of(repository, other.backup_id))[b"side"] == b"other"
    shared = {*one.copies} & {*other.copies}
    assert any(isinstance(copy, LevelCopy) for copy, _ in shared)
    assert await verify(repository) == []


@pytest.mark.parametrize("is_compacted", [False, True])
async def test_backup_shows_its_moment_though_the_source_moves_on(*, is_compacted: bool) -> None:
    """A backup holds the state of its snapshot, even if others write, compact and collect at any of
    its requests.
    """
    original, pairs = await database()

    async def run(at: int) -> FaultyStore:
        source, repository = original.copy(), Place()

        async def move_on() -> None:
            await write(source, moved="on")
            async with in_process_cluster(source) as roles:
                if is_compacted:
                    await roles.compact()
                await roles.collect()

        read = FaultyStore(source.store(), before=at_request(at, move_on))
        await back_up(source, repository, read=read)
        assert await verify(repository) == []
        found = await scanned_of(repository)
        assert {key: value for key, value in found.items() if key != b"moved"} == pairs
        await source.check()
        return read

    assert await at_each_request(run, step=4) > 12


async def test_what_protects_a_backup_is_renewed_while_it_is_made() -> None:
    """A backup that takes longer than the life of its snapshot completes.

    However long it takes, a deletion meanwhile does not treat it as interrupted.
    """
    source, _ = await database()
    repository = Place()
    renewals = asyncio.Semaphore(0)
    runtime, began_ms = yielding_runtime(), wall_clock_ms()
    ttl_ms = ABANDONED_MS

    def now_ms() -> int:
        return began_ms + int(runtime.clock.monotonic_ms())

    def there() -> Repository:
        return Repository(repository.cas(MemoryStore(now_ms, objects=repository.objects)))

    async def before(request: Request) -> None:
        if [request.name] == read.asked("get", names.LEVELS_FOLDER):  # the first of them
            for _ in range(6):
                await renewals.acquire()
            deleted = await Deletion(there()).run([])
            assert deleted.left_because
            assert len([name for name in repository.names() if parse_mark(name)]) <= 3

    async def after(request: Request) -> None:
        if request.operation == "create" and request.name.startswith(names.MANIFEST_FOLDER):
            renewals.release()

    store = MemoryStore(now_ms, objects=source.objects)
    read = FaultyStore(store, before=before, after=after)
    await BackupJob(CasStore(read, runtime, StoreSettings()), there(), ttl_ms=ttl_ms).run()
    assert runtime.clock.monotonic_ms() > ABANDONED_MS
    assert await verify(repository) == []
    assert [name for name in repository.names() if parse_mark(name)] == []


async def test_loads_are_included() -> None:
    """A backup includes committed loads and their files, even if their records are not compacted.
    Loads committed behind a gap, or not at all, are left out, and their files need not exist.
    """
    planted = Planted()
    planted.edit(fence_width=2)
    planted.wal(11, control=[load_entry(planted.batch, SECOND_SEQ + 4)], epoch=2)
    source, repository, target = Place(planted.objects), Place(), Place()
    made = await back_up(source, repository)
    assert planted.load.ssts.ids in {c.sst_id for c, _ in made.copies if isinstance(c, LevelCopy)}
    manifest = await restore(repository, target)
    assert manifest.pending_loads == (planted.load,)
    await target.check()
    pairs = await scanned(target)
    assert pairs[b"f"] == pairs[b"g"]


async def test_backup_without_a_database_or_beside_another_one_is_refused() -> None:
    """A backup without a database, or into a repository of another one, is refused before anything
    is written.
    """
    repository = Place()
    with pytest.raises(DatabaseNotFound):
        await back_up(Place(), repository)
    assert repository.names() == []
    await back_up((await database())[0], repository)
    before = repository.names()
    with pytest.raises(DatabaseMismatch, match="choose another place"):
        await back_up(Place(Planted().objects), repository)
    assert repository.names() == before


async def test_the_archive_of_a_database_with_safekeepers_is_copied() -> None:
    """A database restored from a backup of one with safekeepers has none, and holds what was
    archived.
    """
    source, _ = await database()
    before = await scanned(source)
    members = ("00" * 16 + "@sk1:7655",)
    edit = partial(replace, wal_mode=WalMode.QUORUM, wal_generation=4, wal_members=members)
    stored = StoredManifest(source.cas())
    await stored.refresh()
    await stored.edit(edit, lambda manifest: manifest.wal_members == members)
    repository, target = Place(), Place()
    await back_up(source, repository)
    await restore(repository, target)
    restored = await StoredManifest(target.cas()).refresh()
    assert (restored.wal_mode, restored.wal_generation) == (WalMode.OBJECT_STORE, 5)
    assert (restored.wal_members, restored.wal_members_next) == ((), ())
    assert await scanned(target) == before


@pytest.mark.parametrize("mode", WalMode)
async def test_what_a_gap_behind_the_log_means(mode: WalMode) -> None:
    """A writer fills slots in order, so an object far after a gap shows that one was deleted. A
    safekeeper archives several at once, and may have died: quorum seed 46 of the simulation.
    """
    planted = Planted()
    if mode is WalMode.QUORUM:
        members = ("00" * 16 + "@sk1:7655",)
        planted.edit(wal_mode=mode, wal_generation=4, wal_members=members)
    planted.wal(16, epoch=2)
    source, repository = Place(planted.objects), Place()
    if mode is WalMode.QUORUM:
        await back_up(source, repository)
    else:
        with pytest.raises(IllegalState, match="deleted by hand"):
            await back_up(source, repository)


async def scanned_of(repository: Place, backup_id: str | None = None) -> dict[bytes, bytes]:
    target = Place()
    await restore(repository, target, backup_id=backup_id)
    await target.check()
    return await scanned(target)


@pytest.mark.parametrize(("parallel", "bytes_max"), [(1, 1_000), (3, 1_000), (8, 100), (8, 7)])
async def test_copying_is_bounded(parallel: int, bytes_max: int) -> None:
    """At most the allowed numbers of objects and bytes are copied at once, except for one large
    object alone; all are copied.
    """
    sizes = [(number * 37) % 50 + 1 for number in range(60)]
    done: list[int] = []
    in_flight: list[int] = []
    peak_count = 0

    async def act(size_bytes: int) -> None:
        nonlocal peak_count
        in_flight.append(size_bytes)
        peak_count = max(peak_count, len(in_flight))
        assert len(in_flight) == 1 or sum(in_flight) <= bytes_max
        for _ in range(3):
            await asyncio.sleep(0)
        in_flight.remove(size_bytes)
        done.append(size_bytes)

    await for_each(sizes, act, lambda size_bytes: size_bytes, CopyLimits(parallel, bytes_max))
    assert sorted(done) == sorted(sizes)
    assert peak_count <= parallel
    assert peak_count == parallel or bytes_max < 1_000
