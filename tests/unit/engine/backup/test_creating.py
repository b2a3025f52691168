"""What a backup copies, and what it does not copy again."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import replace
from functools import partial

import pytest

from shalekv.core.manifest import WalMode
from shalekv.errors import DatabaseMismatch, DatabaseNotFound
from shalekv.format import names
from shalekv.format.backup_names import LevelCopy, WalCopy
from shalekv.manifest.stored import StoredManifest
from tests.kit.engine.backups import (
    Place,
    back_up,
    creation,
    database,
    household,
    restore,
    scanned,
    verify,
    write,
)
from tests.kit.engine.damage import Planted
from tests.kit.engine.interposed import InterposedStore


async def test_a_second_backup_copies_only_what_is_new() -> None:
    """After one write: its WAL object and the fence before it, and no SST is read."""
    source, _ = await database()
    repository = Place()
    first = await back_up(source, repository)
    await write(source, new="value")
    asked: Counter[str] = Counter()

    async def note(operation: str, name: str) -> None:
        if operation in {"get", "get_range"} and name.startswith(names.LEVELS_FOLDER):
            asked[name] += 1

    again = creation(source, repository, read=InterposedStore(source.store(), note))
    second = await again.run()
    added = {*second.copies} - {*first.copies}
    assert all(isinstance(copy, WalCopy) for copy, _ in added)
    assert again.progress.objects_copied == len(added) == 2
    assert again.progress.bytes_copied == sum(size for _, size in added)
    assert again.progress.objects_present == len(second.copies) - len(added)
    assert not asked
    assert second.seq > first.seq
    assert await scanned_of(repository, second.backup_id) == await scanned(source)


async def test_a_backup_of_the_same_state_copies_nothing() -> None:
    """Only what it consists of is written again."""
    source, _ = await database()
    repository = Place()
    first = await back_up(source, repository)
    again = creation(source, repository)
    second = await again.run()
    assert second.copies == first.copies
    assert (again.progress.objects_copied, again.progress.bytes_copied) == (0, 0)
    assert second.backup_id > first.backup_id


async def test_histories_that_part_share_no_slot() -> None:
    """An older copy of the database lives on with other bytes in the same slots: both restore."""
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
async def test_a_backup_shows_its_moment_though_the_source_moves_on(*, is_compacted: bool) -> None:
    """At any request to it, others write, compact, and collect what no snapshot keeps."""
    original, pairs = await database()
    moves = 0
    at = 0
    while True:
        source, repository = original.copy(), Place()
        seen = 0

        async def before(_operation: str, _name: str, source: Place = source, at: int = at) -> None:
            nonlocal seen, moves
            seen += 1
            if seen == at + 1:
                moves += 1
                await move_on(source, is_compacted=is_compacted)

        await back_up(source, repository, read=InterposedStore(source.store(), before))
        assert await verify(repository) == []
        found = await scanned_of(repository)
        assert {key: value for key, value in found.items() if key != b"moved"} == pairs
        await source.check()
        if seen <= at:
            break
        at += 3
    assert moves > 5


async def move_on(source: Place, *, is_compacted: bool) -> None:
    """Write, and let nothing stay that need not."""
    await write(source, moved="on")
    async with household(source) as roles:
        if is_compacted:
            await roles.compact()
        await roles.collect()


async def test_the_snapshot_is_renewed_while_it_is_copied() -> None:
    """Copying that takes longer than the snapshot lives goes on until it is done."""
    source, _ = await database()
    repository = Place()
    renewals = asyncio.Semaphore(0)

    async def before(operation: str, name: str) -> None:
        if (operation, name[:7]) == ("get", "levels/") and is_first():
            for _ in range(4):
                await renewals.acquire()

    async def after(operation: str, name: str) -> None:
        if operation == "create" and name.startswith(names.MANIFEST_FOLDER):
            renewals.release()

    def is_first(seen: list[bool] = []) -> bool:  # noqa: B006 - remembers that it was asked
        seen.append(True)
        return len(seen) == 1

    read = InterposedStore(source.store(), before, after)
    await back_up(source, repository, read=read, ttl_ms=60)
    assert await verify(repository) == []


async def test_loads_come_along() -> None:
    """Also those whose record is not compacted, and what their files hold."""
    planted = Planted()
    source, repository, target = Place(planted.objects), Place(), Place()
    made = await back_up(source, repository)
    assert planted.load.ssts.ids in {c.sst_id for c, _ in made.copies if isinstance(c, LevelCopy)}
    manifest = await restore(repository, target)
    assert manifest.pending_loads == planted.current.pending_loads
    await target.check()
    pairs = await scanned(target)
    assert pairs[b"f"] == pairs[b"g"]


async def test_one_place_is_for_one_database() -> None:
    """Backups of another one are refused, before anything is written there."""
    repository = Place()
    await back_up((await database())[0], repository)
    before = repository.names()
    with pytest.raises(DatabaseMismatch, match="choose another place"):
        await back_up(Place(Planted().objects), repository)
    assert repository.names() == before


async def test_there_must_be_a_database() -> None:
    """Otherwise nothing is written."""
    repository = Place()
    with pytest.raises(DatabaseNotFound):
        await back_up(Place(), repository)
    assert repository.names() == []


async def test_the_archive_of_a_database_with_safekeepers_is_copied() -> None:
    """What is restored of it has no safekeepers, and shows what was archived."""
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


async def scanned_of(repository: Place, backup_id: str | None = None) -> dict[bytes, bytes]:
    """What a scan shows of what is restored."""
    target = Place()
    await restore(repository, target, backup_id=backup_id)
    await target.check()
    return await scanned(target)
