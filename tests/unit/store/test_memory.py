"""What is particular to the memory store: its clock, its views and its metadata."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count

import pytest

from shalekv.store.api import Created, Exists
from shalekv.store.memory import PAGE_NAMES, MemoryObjects, MemoryStore, named_objects
from tests.kit.inline_runtime import finish, gathered


@pytest.fixture
def moments() -> Iterator[int]:
    """A clock that goes on by one whenever it is read."""
    return count(100)


def test_time_is_an_argument(moments: Iterator[int]) -> None:
    """Objects are dated by the clock that the store was given, which is read once for each."""
    store = MemoryStore(lambda: next(moments))
    finish(store.create("wal/1", b""))
    finish(store.create("wal/2", b""))
    assert [info.modified_ms for info in finish(gathered(store.list("wal/")))] == [100, 101]
    assert finish(store.now_ms()) == 102


def test_nothing_waits() -> None:
    """Every call ends without giving way to others: a simulation decides itself when to."""
    store = MemoryStore(lambda: 0)
    assert finish(store.create("wal/1", b"x")) == Created()
    assert finish(store.get("wal/1")).data == b"x"
    assert finish(store.get_range("wal/1", 0, 1)) == b"x"
    assert finish(store.head("wal/1")).size_bytes == 1
    finish(store.delete(["wal/1"]))
    assert finish(gathered(store.list("wal/"))) == []
    finish(store.close())


def test_views_share_objects_and_not_clocks() -> None:
    """Stores on the same objects are one database; a store without any has its own."""
    objects = MemoryObjects()
    early = MemoryStore(lambda: 1, objects=objects)
    late = MemoryStore(lambda: 2, objects=objects)
    assert finish(early.create("wal/1", b"")) == Created()
    assert finish(late.create("wal/1", b"")) == Exists()
    assert finish(late.head("wal/1")).modified_ms == 1
    assert finish(MemoryStore(lambda: 0).create("wal/1", b"")) == Created()


def test_names_are_kept_for_the_process() -> None:
    """A name leads to the same objects whenever it is asked for."""
    assert named_objects("test-memory-a") is named_objects("test-memory-a")
    assert named_objects("test-memory-a") is not named_objects("test-memory-b")


def test_what_is_stored_cannot_be_changed() -> None:
    """Later changes to the metadata that was given to a create do not reach the object."""
    store = MemoryStore(lambda: 0)
    metadata = {"writer_epoch": "1"}
    finish(store.create("wal/1", b"data", metadata))
    metadata["writer_epoch"] = "2"
    assert finish(store.get("wal/1")).metadata == {"writer_epoch": "1"}


@pytest.mark.parametrize("size", [PAGE_NAMES - 1, PAGE_NAMES, PAGE_NAMES + 1, 2 * PAGE_NAMES])
def test_lists_around_a_page(size: int) -> None:
    """A list that just fills its pages ends where it should."""
    store = MemoryStore(lambda: 0)
    names = [f"wal/{number:06d}" for number in range(size)]
    for name in [*names, "waa/1", "wb/1"]:
        finish(store.create(name, b""))
    assert [info.name for info in finish(gathered(store.list("wal/")))] == names


def test_a_list_sees_what_comes_behind_it() -> None:
    """A list is read page by page: what is created behind the page that it shows is in it."""
    store = MemoryStore(lambda: 0)
    names = [f"wal/{number:06d}" for number in range(PAGE_NAMES)]
    for name in names:
        finish(store.create(name, b""))

    async def list_and_create() -> list[str]:
        shown = []
        async for info in store.list("wal/"):
            shown.append(info.name)
            await store.create("wal/9", b"")
        return shown

    assert finish(list_and_create()) == [*names, "wal/9"]
