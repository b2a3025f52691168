"""The contract of object stores: a store that passes it is fit to be used."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from random import Random
from typing import ClassVar

import pytest

from shalekv.errors import InvalidRequest, ObjectNotFound
from shalekv.store.api import Created, Exists, ObjectStore
from tests.contract.opening import OpenStore, create_many, listed, names_in

MIB = 1024 * 1024
BAD_NAMES = ("", "/", "/etc/passwd", "wal/", "wal//1", "../1", "wal/../1", "wal/..", "./1", "a\0b")
BAD_NEW_NAMES = ("wal/1.tmp", "wal/é", "wal/a\nb", "wal/\\1", "wal/" + 201 * "1", 60 * "wal/12345/")
BAD_PREFIXES = ("", "wal", "/", "/etc/", "../", "wal/../", "wal//")
TEN = b"0123456789"
RANGES = [
    (0, 10, TEN),
    (0, 1, b"0"),
    (0, 0, b""),
    (3, 4, b"3456"),
    (9, 1, b"9"),
    (9, 2, b"9"),
    (0, 11, TEN),
    (0, 1 << 40, TEN),
    (10, 1, b""),
    (10, 0, b""),
    (11, 5, b""),
    (1 << 40, 5, b""),
    (-1, 1, b"9"),
    (-1, 5, b"9"),
    (-4, 4, b"6789"),
    (-4, 2, b"67"),
    (-4, 0, b""),
    (-10, 10, TEN),
    (-11, 3, b"012"),
    (-(1 << 40), 1 << 40, TEN),
]


class Opening:
    """The fixtures of the contract. A store adds `open_store`."""

    @pytest.fixture
    async def store(self, open_store: OpenStore) -> AsyncIterator[ObjectStore]:
        """The store under test."""
        opened = open_store()
        yield opened
        await opened.close()

    @pytest.fixture
    async def rival(self, open_store: OpenStore) -> AsyncIterator[ObjectStore]:
        """Another one on the same database."""
        opened = open_store()
        yield opened
        await opened.close()


class RaceContract(Opening):
    """Creates are exclusive: one object per name, for good."""

    racers: ClassVar[int] = 8
    rounds: ClassVar[int] = 30  # of races

    async def test_first_create_wins(self, store: ObjectStore, rival: ObjectStore) -> None:
        """The first create of a name makes the object, every later one changes nothing."""
        assert await store.create("wal/1.sst", b"first") == Created()
        assert await rival.create("wal/1.sst", b"second") == Exists()
        assert await store.create("wal/1.sst", b"first") == Exists()
        assert (await store.get("wal/1.sst")).data == b"first"
        assert (await rival.get("wal/1.sst")).data == b"first"

    async def test_races_have_one_winner(self, open_store: OpenStore) -> None:
        """One of several creates of a name at once wins, and all racers read its bytes at once."""
        racers = [open_store() for _ in range(self.racers)]

        async def create_and_read(at: ObjectStore, name: str, body: bytes) -> tuple[object, bytes]:
            return await at.create(name, body), (await at.get(name)).data

        for number in range(self.rounds):
            name = f"wal/{number:020d}.sst"
            bodies = [f"{name} by {racer}".encode() * 2_000 for racer in range(self.racers)]
            reported = await asyncio.gather(
                *(create_and_read(at, name, body) for at, body in zip(racers, bodies, strict=True))
            )
            outcomes = [outcome for outcome, _ in reported]
            winners = [i for i, outcome in enumerate(outcomes) if outcome == Created()]
            assert len(winners) == 1, outcomes
            assert outcomes.count(Exists()) == self.racers - 1, outcomes
            assert {seen for _, seen in reported} == {bodies[winners[0]]}
        for racer in racers:
            await racer.close()


class CreateContract(RaceContract):
    """Objects made by a create."""

    async def test_created_is_seen_by_everyone(
        self, store: ObjectStore, rival: ObjectStore
    ) -> None:
        """A create that has ended is in every later read and list of any client."""
        for number in range(5):
            name = f"wal/{number:020d}.sst"
            await store.create(name, str(number).encode())
            assert (await rival.get(name)).data == str(number).encode()
            assert (await names_in(rival, "wal/"))[-1] == name
            assert (await rival.head(name)).size_bytes == len(str(number))

    async def test_names_do_not_touch_each_other(self, store: ObjectStore) -> None:
        """Names that are close to each other are different objects."""
        names = ["a/1", "a/1.sst", "a/10", "a/11", "a/A", "a/a", "b/1", "a/b/1", "a/1 1"]
        for name in names:
            assert await store.create(name, name.encode()) == Created()
        for name in names:
            assert (await store.get(name)).data == name.encode()

    async def test_bytes_are_exact(self, store: ObjectStore, rival: ObjectStore) -> None:
        """An object of any size, and of any bytes, is read as it was written."""
        every_byte = bytes(range(256)) + b"\r\n\0\xff\xfe" + bytes(reversed(range(256)))
        sizes = (0, 1, 4095, 4096, 65_537, 8 * MIB)
        for number, data in enumerate([every_byte, *(Random(n).randbytes(n) for n in sizes)]):
            name = f"levels/{number}.sst"
            assert await store.create(name, data) == Created()
            found = await rival.get(name)
            assert found.data == data
            assert (found.info.name, found.info.size_bytes) == (name, len(data))

    async def test_metadata_is_kept_or_left_out(self, store: ObjectStore) -> None:
        """User metadata comes back as it was given, or not at all."""
        given = {"writer_epoch": "7"}
        await store.create("wal/1.sst", b"x", given)
        assert dict((await store.get("wal/1.sst")).metadata) in (given, {})

    async def test_names_stay_in_the_database(self, store: ObjectStore) -> None:
        """No operation takes a name that could leave the database, or that no store creates."""
        for name in (*BAD_NAMES, *BAD_NEW_NAMES):
            with pytest.raises(InvalidRequest):
                await store.create(name, b"")
        for name in BAD_NAMES:
            for call in (
                store.get(name),
                store.get_range(name, 0, 1),
                store.head(name),
                store.delete(["wal/1.sst", name]),
            ):
                with pytest.raises(InvalidRequest):
                    await call


class ReadContract(Opening):
    """Reading objects, and their times."""

    # By how much the store's clock and its objects' times may differ. HTTP has whole seconds.
    clock_slack_ms: ClassVar[int] = 0

    async def test_ranges(self, store: ObjectStore) -> None:
        """A range is what lies inside the object, counted from the beginning or the end."""
        data = bytes(range(256)) * 4096
        for name, body in (("ten", TEN), ("empty", b""), ("large", data)):
            await store.create(f"levels/{name}", body)
        for offset, length, expected in RANGES:
            assert await store.get_range("levels/ten", offset, length) == expected
        for offset in (0, 1, -1):
            assert await store.get_range("levels/empty", offset, 10) == b""
        for offset, length in ((0, 5), (65_535, 2), (1 << 19, 1 << 19), (len(data) - 3, 10)):
            found = await store.get_range("levels/large", offset, length)
            assert found == data[offset : offset + length]
        assert await store.get_range("levels/large", -70_000, 69_999) == data[-70_000:-1]
        with pytest.raises(InvalidRequest):
            await store.get_range("levels/ten", 0, -1)

    async def test_missing_objects(self, store: ObjectStore) -> None:
        """A name without an object is not found, beside others, below others, or alone."""
        await store.create("wal/0.sst", b"")
        for name in ("wal/1.sst", "other/1.sst", "wal/0.sst/1.sst", "wal"):
            calls = (store.get_range(name, 0, 0), store.get_range(name, -1, 1), store.head(name))
            for call in (store.get(name), *calls):
                with pytest.raises(ObjectNotFound) as raised:
                    await call
                assert raised.value.name == name

    async def test_head_get_and_list_agree(self, store: ObjectStore, rival: ObjectStore) -> None:
        """An object has one name, size and time, whichever way one asks, and keeps them."""
        await store.create("wal/1.sst", TEN)
        head = await store.head("wal/1.sst")
        assert (head.name, head.size_bytes) == ("wal/1.sst", 10)
        assert (await rival.get("wal/1.sst")).info == head
        assert await listed(rival, "wal/") == [head]
        await rival.create("wal/1.sst", b"too late")
        assert await store.head("wal/1.sst") == head

    async def test_the_clock_of_the_store(self, store: ObjectStore, rival: ObjectStore) -> None:
        """The clock runs before there is an object, goes forward, and dates objects."""
        assert await store.now_ms() > 1_600_000_000_000  # 2020: since the Unix epoch
        for folder in ("wal/", "manifest/", "levels/"):
            assert await listed(store, folder) == []
        for number in range(5):
            before_ms = await store.now_ms()
            await rival.create(f"wal/{number}.sst", b"x")
            modified_ms = (await store.head(f"wal/{number}.sst")).modified_ms
            after_ms = await rival.now_ms()
            slack_ms = self.clock_slack_ms
            assert before_ms - slack_ms <= modified_ms <= after_ms + slack_ms
            assert after_ms <= await store.now_ms()


class ListContract(Opening):
    """Lists and deletion."""

    many: ClassVar[int] = 2_050  # of a long list: more than two pages of any store
    passing_objects: ClassVar[int] = 100  # deleted and created while lists go on

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
        for start_after, first in (
            ("", 0),
            ("wal/", 0),
            ("wal/000.sst", 1),
            ("wal/000.ss", 0),
            ("wal/000.sst0", 1),
            ("wal/001", 1),
            ("wal/003.sst", 4),
            ("wal/004.sst", 5),
            ("wal0", 5),
            ("a", 0),
            ("z", 5),
        ):
            assert await names_in(store, "wal/", start_after) == names[first:], start_after

    async def test_long_lists(self, store: ObjectStore, rival: ObjectStore) -> None:
        """A list of many pages shows each object once, and can be begun at every boundary."""
        names = [f"wal/{number:020d}.sst" for number in range(self.many)]
        await create_many(store, names)
        found = await listed(rival, "wal/")
        assert [info.name for info in found] == names
        assert {info.size_bytes for info in found} == {len(names[0])}
        for first in (1, 999, 1000, 1001, 2000, 2001, self.many):
            if first <= self.many:
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
        for prefix in BAD_PREFIXES:
            with pytest.raises(InvalidRequest):
                await listed(store, prefix)

    async def test_a_list_can_be_abandoned(self, store: ObjectStore) -> None:
        """A caller may stop in the midst of a list, and begin another one."""
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
        stay = [f"wal/{number:04d}.stay" for number in range(0, 2 * self.passing_objects, 2)]
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
        """Deleted objects are gone for everyone; a missing one is no error. The name can be created
        again (rules F1 to F3).
        """
        names = [f"levels/{number}.sst" for number in range(6)]
        await create_many(store, [*names, "wal/1", "wal/2", "manifest/1"])
        await store.delete(name for name in [names[1], "wal/1", names[4], "manifest/1"])
        assert await names_in(rival, "levels/") == [names[0], names[2], names[3], names[5]]
        assert await names_in(rival, "wal/") == ["wal/2"]
        assert await names_in(rival, "manifest/") == []
        with pytest.raises(ObjectNotFound):
            await rival.get(names[1])
        assert (await rival.get(names[0])).data == names[0].encode()
        await store.delete([])
        await store.delete([names[0], "levels/none", "nowhere/1", f"{names[0]}/3", names[0]])
        await rival.delete([names[0]])
        assert await names_in(store, "levels/") == [names[2], names[3], names[5]]
        assert await store.create(names[0], b"second") == Created()
        assert (await rival.get(names[0])).data == b"second"


class StoreContract(CreateContract, ReadContract, ListContract):
    """All of the contract. A store is tested by a subclass with an `open_store` fixture."""


class HttpStoreContract(StoreContract):
    """The same with fewer repetitions, for stores whose every request goes to a server."""

    # versitygw renews the Date of its replies once a second, and dates files by the kernel's ticks.
    clock_slack_ms = 2_000
    rounds = 6
    many = 1_010
    passing_objects = 6
