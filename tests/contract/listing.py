"""The part of the contract of stores about lists and deletion."""

from __future__ import annotations

import asyncio
from typing import ClassVar

import pytest

from shalekv.errors import InvalidRequest, ObjectNotFound
from shalekv.store.api import Created, ObjectStore
from tests.contract.opening import Opening, listed, names_in

MANY = 2_500  # more than two pages of any store
AT_ONCE = 50


async def create_many(store: ObjectStore, names: list[str]) -> None:
    """Create an object of each name, some at a time."""
    for first in range(0, len(names), AT_ONCE):
        await asyncio.gather(*(store.create(n, n.encode()) for n in names[first : first + AT_ONCE]))


class ListContract(Opening):
    # How many objects are deleted and others created while lists go on: fewer where that is slow.
    passing_objects: ClassVar[int] = 200

    async def test_order_is_by_bytes(self, store: ObjectStore) -> None:
        """A list is ordered by the bytes of the names, whatever the order of creation."""
        names = ["w/b", "w/a", "w/Z", "w/10", "w/9", "w/1", "w/1.sst", "w/a-", "w/c/b", "w/c0"]
        for name in names:
            await store.create(name, b"")
        assert await names_in(store, "w/") == sorted(names, key=str.encode)

    async def test_start_after_is_exclusive(self, store: ObjectStore) -> None:
        """A list begins behind `start_after`, whether an object has that name or not."""
        names = [f"wal/{number:03d}.sst" for number in range(5)]
        await create_many(store, names)
        assert await names_in(store, "wal/", "") == names
        assert await names_in(store, "wal/", "wal/") == names
        assert await names_in(store, "wal/", "wal/000.sst") == names[1:]
        assert await names_in(store, "wal/", "wal/000.ss") == names
        assert await names_in(store, "wal/", "wal/000.sst0") == names[1:]
        assert await names_in(store, "wal/", "wal/001") == names[1:]
        assert await names_in(store, "wal/", "wal/003.sst") == names[4:]
        assert await names_in(store, "wal/", "wal/004.sst") == []
        assert await names_in(store, "wal/", "wal0") == []
        assert await names_in(store, "wal/", "a") == names
        assert await names_in(store, "wal/", "z") == []

    async def test_long_lists(self, store: ObjectStore, rival: ObjectStore) -> None:
        """A list of many pages shows each object once, and can be begun at every boundary."""
        names = [f"wal/{number:020d}.sst" for number in range(MANY)]
        await create_many(store, names)
        found = await listed(rival, "wal/")
        assert [info.name for info in found] == names
        assert {info.size_bytes for info in found} == {len(names[0])}
        for first in (1, 998, 999, 1000, 1001, 1999, 2000, 2001, 2498, 2499, 2500):
            assert await names_in(rival, "wal/", names[first - 1]) == names[first:]

    async def test_a_prefix_is_a_folder(self, store: ObjectStore) -> None:
        """A list shows what lies in its folder and in folders of that, and nothing beside it."""
        names = ["wal/1", "wal/2/3", "wal/2/4/5", "wal1/6", "wa/7", "wal.8", "xwal/9", "x/wal/10"]
        await create_many(store, names)
        assert await names_in(store, "wal/") == ["wal/1", "wal/2/3", "wal/2/4/5"]
        assert await names_in(store, "wal/2/") == ["wal/2/3", "wal/2/4/5"]
        assert await names_in(store, "wal/", "wal/2/3") == ["wal/2/4/5"]
        assert await names_in(store, "wal/2/3/") == []
        assert await names_in(store, "none/") == []

    @pytest.mark.parametrize("prefix", ["", "wal", "/", "/etc/", "../", "wal/../", "wal//"])
    async def test_other_prefixes_are_refused(self, store: ObjectStore, prefix: str) -> None:
        """A prefix that is no folder of the database is refused."""
        with pytest.raises(InvalidRequest):
            await listed(store, prefix)

    async def test_a_list_can_be_left(self, store: ObjectStore) -> None:
        """Whoever has seen enough of a list may stop, and begin another one."""
        names = [f"wal/{number:04d}" for number in range(10)]
        await create_many(store, names)
        async for info in store.list("wal/"):
            assert info.name == names[0]
            break
        assert await names_in(store, "wal/") == names

    async def test_a_list_while_objects_come_and_go(
        self, store: ObjectStore, rival: ObjectStore
    ) -> None:
        """A list shows every object that is there from its beginning to its end."""
        stay = [f"wal/{number:04d}.stay" for number in range(0, 400, 2)]
        go = [f"wal/{number:04d}.go" for number in range(1, 2 * self.passing_objects, 2)]
        await create_many(store, stay + go)

        async def disturb() -> None:
            for name in go:
                await rival.delete([name])
                await rival.create(f"{name}.come", b"")

        async with asyncio.TaskGroup() as tasks:
            disturbing = tasks.create_task(disturb())
            while not disturbing.done():
                names = await names_in(store, "wal/")
                assert [name for name in names if name.endswith(".stay")] == stay
                assert names == sorted(set(names))
                await asyncio.sleep(0)

    async def test_deletion(self, store: ObjectStore, rival: ObjectStore) -> None:
        """What is deleted is gone for everyone, and nothing else is."""
        names = [f"levels/{number}.sst" for number in range(6)]
        await create_many(store, names)
        await store.delete([names[1], names[4]])
        assert await names_in(rival, "levels/") == [names[0], names[2], names[3], names[5]]
        with pytest.raises(ObjectNotFound):
            await rival.get(names[1])
        assert (await rival.get(names[0])).data == names[0].encode()

    async def test_deletion_is_idempotent(self, store: ObjectStore, rival: ObjectStore) -> None:
        """To delete what is not there is no error, and deletes the others."""
        await create_many(store, ["levels/1", "levels/2"])
        await store.delete([])
        await store.delete(["levels/1", "levels/none", "nowhere/1", "levels/2/3", "levels/1"])
        await rival.delete(["levels/1"])
        assert await names_in(store, "levels/") == ["levels/2"]

    async def test_deletion_in_several_folders(self, store: ObjectStore) -> None:
        """One call deletes objects of any folders, from anything that can be gone through."""
        names = ["wal/1", "levels/1", "manifest/1", "wal/2"]
        await create_many(store, names)
        await store.delete(name for name in names[:3])
        assert await names_in(store, "wal/") == ["wal/2"]
        assert await names_in(store, "levels/") == await names_in(store, "manifest/") == []

    async def test_a_deleted_name_is_free(self, store: ObjectStore, rival: ObjectStore) -> None:
        """A store forgets what was deleted: the name can be created again (rules F1 to F3)."""
        await store.create("wal/1.sst", b"first")
        await rival.delete(["wal/1.sst"])
        assert await store.create("wal/1.sst", b"second") == Created()
        assert (await rival.get("wal/1.sst")).data == b"second"
