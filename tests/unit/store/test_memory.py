"""Particulars of the memory store: its clock, its views and its pages."""

from __future__ import annotations

from itertools import count

import pytest

from shalekv.store.api import Created, Exists
from shalekv.store.memory import PAGE_NAMES, MemoryObjects, MemoryStore
from tests.kit.inline_runtime import finish, gathered


def test_views_share_objects_and_not_clocks() -> None:
    """Stores on the same objects are one database, each with its own clock, which is read once for
    each object. Data and metadata of a create are copied.
    """
    objects, moments, metadata = MemoryObjects(), count(100), {"writer_epoch": "1"}
    early = MemoryStore(lambda: next(moments), objects=objects)
    late = MemoryStore(lambda: 999, objects=objects)
    assert finish(early.create("wal/1", b"", metadata)) == Created()
    metadata["writer_epoch"] = "2"
    assert finish(late.create("wal/1", b"")) == Exists()
    finish(early.create("wal/2", b""))
    assert [info.modified_ms for info in finish(gathered(late.list("wal/")))] == [100, 101]
    assert (finish(early.now_ms()), finish(late.now_ms())) == (102, 999)
    assert finish(late.get("wal/1")).metadata == {"writer_epoch": "1"}
    assert finish(MemoryStore(lambda: 0).create("wal/1", b"")) == Created()


@pytest.mark.parametrize("size", [PAGE_NAMES - 1, PAGE_NAMES, PAGE_NAMES + 1])
def test_lists_around_a_page(size: int) -> None:
    """A list ends at its last object, and shows objects that are created behind the current
    page.
    """
    store = MemoryStore(lambda: 0)
    names = [f"wal/{number:06d}" for number in range(size)]
    for name in [*names, "waa/1", "wb/1"]:
        finish(store.create(name, b""))

    async def list_and_create() -> list[str]:
        shown = []
        async for info in store.list("wal/"):
            shown.append(info.name)
            await store.create("wal/9", b"")
        return shown

    is_behind = size >= PAGE_NAMES  # and so in a page that is read later
    assert finish(list_and_create()) == [*names, *(["wal/9"] if is_behind else [])]
    shown = [info.name for info in finish(gathered(store.list("wal/")))]
    assert shown == [*names, "wal/9"]
