"""Damage of any object is reported: by readers of a repository, and by a backup of the source."""

from __future__ import annotations

from dataclasses import replace
from itertools import cycle

import pytest

from shalekv.errors import (
    BadChecksum,
    CorruptObject,
    DatabaseNotFound,
    IllegalState,
    ObjectNotFound,
    ShaleError,
    WrongObject,
)
from shalekv.format import names
from shalekv.format.backup import WalCopy
from shalekv.format.sst_writer import encode_sst
from shalekv.jobs.backup.copy import check_copy, wal_copy
from tests.kit.engine.backups import Place, back_up, backup_ids, database, restore, verify
from tests.kit.engine.damage import DATABASE_ID, properties


def flip(place: Place, name: str) -> None:
    data = bytearray(place.data(name))
    data[len(data) // 2] ^= 4
    place.overwrite(name, bytes(data))


def cut(place: Place, name: str) -> None:
    place.overwrite(name, place.data(name)[:-1])


def prolong(place: Place, name: str) -> None:
    place.overwrite(name, place.data(name) + b"\0")


def empty(place: Place, name: str) -> None:
    place.overwrite(name, b"")


HARMS = (flip, cut, prolong, empty)


async def test_damage_of_any_object_of_a_backup_is_found() -> None:
    """`verify` names a damaged object of a backup, and nothing is restored from it."""
    source, _ = await database()
    sound = Place()
    made = await back_up(source, sound)
    for name, harm in zip(sound.names(), cycle(HARMS), strict=False):
        repository, target = sound.copy(), Place()
        harm(repository, name)
        (damage,) = await verify(repository)
        assert (damage.name, damage.backup_ids) == (name, (made.backup_id,))
        with pytest.raises(CorruptObject):
            await restore(repository, target)
        with pytest.raises(DatabaseNotFound):
            await target.manifest()


async def test_missing_copy_is_found() -> None:
    """`verify` and `restore` find a missing copy."""
    source, _ = await database()
    sound = Place()
    made = await back_up(source, sound)
    for copy, _ in made.copies:
        repository = sound.copy()
        repository.lose(str(copy))
        (damage,) = await verify(repository)
        assert (damage.name, damage.problem) == (str(copy), "is missing")
        with pytest.raises(ObjectNotFound):
            await restore(repository, Place())


async def test_the_name_of_a_copy_must_have_its_checksum() -> None:
    """A copy whose name has another checksum is damaged, even if its SST is sound."""
    data = encode_sst(properties(names.wal_name(1), 1), [], block_bytes=64)
    copy = wal_copy(names.wal_name(1), data, 1, DATABASE_ID)
    check_copy(copy, len(data), data)
    with pytest.raises(BadChecksum):
        check_copy(replace(copy, checksum=copy.checksum ^ 1), len(data), data)
    with pytest.raises(WrongObject):
        check_copy(replace(copy, write_id=bytes(16)), len(data), data)


async def test_damaged_source_is_not_backed_up() -> None:
    """If any object that a backup needs is damaged, there is no backup, and a typed error."""
    sound, _ = await database()
    made = await back_up(sound.copy(), Place())
    for (copy, _), harm in zip(made.copies, cycle(HARMS), strict=False):
        source, repository = sound.copy(), Place()
        harm(source, copy.source)
        with pytest.raises(CorruptObject):
            await back_up(source, repository)
        assert await backup_ids(repository) == []


async def test_incomplete_source_is_not_backed_up() -> None:
    """A missing object is an error, except in the last slot: nothing shows that this was filled."""
    sound, _ = await database()
    made = await back_up(sound.copy(), Place())
    last = made.manifest.wal_id_last_seen
    for copy, _ in made.copies:
        if isinstance(copy, WalCopy) and copy.wal_id == last:
            continue
        source, repository = sound.copy(), Place()
        source.lose(copy.source)
        with pytest.raises((ObjectNotFound, IllegalState)):
            await back_up(source, repository)
        assert await backup_ids(repository) == []


async def test_truncated_copy_is_not_used() -> None:
    """The next backup names a truncated copy; once that is deleted, it is copied again."""
    source, _ = await database()
    sound = Place()
    made = await back_up(source, sound)
    for copy, _ in (made.copies[0], made.copies[-1]):
        repository = sound.copy()
        cut(repository, str(copy))
        with pytest.raises(IllegalState, match="damaged"):
            await back_up(source, repository)
        assert await backup_ids(repository) == [made.backup_id]
        repository.lose(str(copy))
        await back_up(source, repository)
        assert await verify(repository) == []


async def test_objects_at_the_target_must_have_the_right_bytes() -> None:
    """An object at the target with the name of a needed one and other bytes is never kept."""
    source, _ = await database()
    repository = Place()
    made = await back_up(source, repository)
    for (copy, _), harm in zip(made.copies, cycle(HARMS), strict=False):
        target = Place()
        await target.store().create(copy.source, repository.data(str(copy)))
        harm(target, copy.source)
        with pytest.raises(IllegalState, match="other bytes"):
            await restore(repository, target)
        with pytest.raises(ShaleError):
            await target.manifest()


async def test_another_log_at_the_target_is_refused() -> None:
    """A slot after the last restored one would come back as data, so the restoration is refused."""
    source, _ = await database()
    repository, target = Place(), Place()
    made = await back_up(source, repository)
    last = made.manifest.wal_id_last_seen
    assert last is not None
    await target.store().create(names.wal_name(last + 1), b"of a lost database")
    with pytest.raises(IllegalState, match="not of backup"):
        await restore(repository, target)
