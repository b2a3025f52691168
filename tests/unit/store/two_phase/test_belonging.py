"""Records of another database, or none, are noticed before anything is written."""

from __future__ import annotations

import pytest

from shalekv.core.two_phase import Destination, Record
from shalekv.errors import StoreRefused
from shalekv.format.names import manifest_name, wal_name
from shalekv.store.api import Created
from shalekv.store.memory import MemoryObjects, MemoryStore
from shalekv.store.requests import RequestKind
from shalekv.store.two_phase.belonging import BelongingStore
from shalekv.store.two_phase.memory import MemoryRecords
from tests.kit.inline_runtime import inline_runtime

Table = dict[Destination, Record]


def opened(objects: MemoryObjects, table: Table) -> BelongingStore:
    plain = MemoryStore(lambda: 0, name="db", objects=objects)
    return BelongingStore(plain, MemoryRecords(table=table), inline_runtime(len(table)))


async def test_its_own_records_are_recognised() -> None:
    """Where there is no manifest, any records will do; another process with the same records
    creates and recovers. The manifest is looked for once.
    """
    objects, table = MemoryObjects(), Table()
    store = opened(objects, table)
    assert await store.create(manifest_name(0), b"0") == Created()
    before = store.sent.by_kind[RequestKind.LIST]
    assert await store.create(wal_name(1), b"0") == Created()
    assert store.sent.by_kind[RequestKind.LIST] == before
    assert await opened(objects, table).create(wal_name(0), b"wal") == Created()
    assert (await opened(objects, table).recover()).completed == 0


@pytest.mark.parametrize("name", [manifest_name(1), wal_name(0)])
async def test_other_records_are_refused(name: str) -> None:
    """With an empty table, or that of another database, nothing is written anywhere."""
    objects, table = MemoryObjects(), Table()
    await opened(objects, table).create(manifest_name(0), b"0")
    stranger = opened(objects, Table())
    with pytest.raises(StoreRefused, match="records_url"):
        await stranger.create(name, b"late")
    with pytest.raises(StoreRefused, match=r"0\.manifest"):
        await stranger.recover()
    assert stranger.sent.by_kind[RequestKind.WRITE] == 0
    assert stranger.sent.by_kind[RequestKind.RECORD_WRITE] == 0


async def test_a_manifest_that_goes_meanwhile_is_no_stranger() -> None:
    """The newest manifest may be superseded and collected between list and look: look again."""
    objects, table = MemoryObjects(), Table()
    own = opened(objects, table)
    await own.create(manifest_name(0), b"0")

    class Late(MemoryRecords):
        async def find(self, destination: Destination) -> Record | None:
            if destination.name == manifest_name(0):
                await own.create(manifest_name(1), b"1")
                await own.delete([manifest_name(0)])
            return await super().find(destination)

    plain = MemoryStore(lambda: 0, name="db", objects=objects)
    late = BelongingStore(plain, Late(table=table), inline_runtime(9))
    assert await late.create(manifest_name(2), b"2") == Created()
