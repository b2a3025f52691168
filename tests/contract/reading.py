"""The part of the contract of stores about reading objects, and their times."""

from __future__ import annotations

from typing import ClassVar

import pytest

from shalekv.errors import InvalidRequest, ObjectNotFound
from shalekv.store.api import ObjectStore
from tests.contract.opening import Opening, listed

TEN = b"0123456789"


class ReadContract(Opening):
    # By how much the store's clock and its objects' times may differ. HTTP tells whole seconds.
    clock_slack_ms: ClassVar[int] = 0

    @pytest.mark.parametrize(
        ("offset", "length", "expected"),
        [
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
        ],
    )
    async def test_ranges(
        self, store: ObjectStore, offset: int, length: int, expected: bytes
    ) -> None:
        """A range is what lies inside the object, counted from the beginning or the end."""
        await store.create("levels/1.sst", TEN)
        assert await store.get_range("levels/1.sst", offset, length) == expected

    @pytest.mark.parametrize("offset", [0, 1, -1])
    async def test_ranges_of_an_empty_object(self, store: ObjectStore, offset: int) -> None:
        """Every range of an empty object is empty."""
        await store.create("levels/1.sst", b"")
        assert await store.get_range("levels/1.sst", offset, 10) == b""

    async def test_ranges_of_a_large_object(self, store: ObjectStore) -> None:
        """Ranges of an object of many blocks are those of its bytes."""
        data = bytes(range(256)) * 4096
        await store.create("levels/1.sst", data)
        for offset, length in ((0, 5), (65_535, 2), (1 << 19, 1 << 19), (len(data) - 3, 10)):
            found = await store.get_range("levels/1.sst", offset, length)
            assert found == data[offset : offset + length]
        assert await store.get_range("levels/1.sst", -70_000, 69_999) == data[-70_000:-1]

    async def test_a_negative_length_is_refused(self, store: ObjectStore) -> None:
        """There is no range of negative length."""
        await store.create("levels/1.sst", TEN)
        with pytest.raises(InvalidRequest):
            await store.get_range("levels/1.sst", 0, -1)

    @pytest.mark.parametrize("name", ["wal/1.sst", "other/1.sst", "wal/0.sst/1.sst", "wal"])
    async def test_missing_objects(self, store: ObjectStore, name: str) -> None:
        """What no object is called is not found, beside others, below others, or alone."""
        await store.create("wal/0.sst", b"")
        with pytest.raises(ObjectNotFound) as raised:
            await store.get(name)
        assert raised.value.name == name
        with pytest.raises(ObjectNotFound):
            await store.get_range(name, 0, 0)
        with pytest.raises(ObjectNotFound):
            await store.get_range(name, -1, 1)
        with pytest.raises(ObjectNotFound):
            await store.head(name)

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
        """The store's clock goes forward, and dates objects by it, whoever asks."""
        assert await store.now_ms() > 1_600_000_000_000  # 2020: since the Unix epoch
        for number in range(5):
            before_ms = await store.now_ms()
            await rival.create(f"wal/{number}.sst", b"x")
            modified_ms = (await store.head(f"wal/{number}.sst")).modified_ms
            after_ms = await rival.now_ms()
            slack_ms = self.clock_slack_ms
            assert before_ms - slack_ms <= modified_ms <= after_ms + slack_ms
            assert after_ms <= await store.now_ms()

    async def test_the_clock_runs_before_there_is_an_object(self, store: ObjectStore) -> None:
        """A database without objects has a clock, and asking for the time makes no object."""
        assert await store.now_ms() > 0
        for folder in ("wal/", "manifest/", "levels/"):
            assert await listed(store, folder) == []
