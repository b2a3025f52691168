"""Every kind of store keeps the contract of object stores, those with a server on a real one.

moto is run with one request at a time: it has no locks, so its races only show that the store tells
outcomes apart. versitygw shows that a condition holds under races.
"""

from __future__ import annotations

from itertools import count
from random import Random

import pytest

from shalekv.store.api import Created, ObjectStore, RequestKind
from shalekv.store.memory import MemoryObjects, MemoryStore
from shalekv.store.two_phase.store import TwoPhaseStore
from tests.contract.opening import OpenStore, create_many, names_in
from tests.contract.store_contract import (
    MIB,
    HttpStoreContract,
    ListContract,
    RaceContract,
    StoreContract,
)
from tests.kit.inline_runtime import inline_runtime
from tests.kit.memory_records import MemoryRecords, Table

START_MS = 1_700_000_000_000


@pytest.mark.parametrize("kind", ["file"])
class TestLocalStore(StoreContract):
    """A folder of a real file system."""


@pytest.mark.parametrize("is_two_phase", [False, True])
class TestMemoryStore(StoreContract):
    @pytest.fixture
    def open_store(self, *, is_two_phase: bool) -> OpenStore:
        """Views of the same objects, with a clock that is later each time it is read."""
        objects, moments = MemoryObjects(), count(START_MS)
        table: Table = {}
        runtime = inline_runtime()

        def open_one() -> ObjectStore:
            plain = MemoryStore(lambda: next(moments), objects=objects)
            return (
                TwoPhaseStore(plain, MemoryRecords(table=table), runtime) if is_two_phase else plain
            )

        return open_one


@pytest.mark.parametrize("kind", ["s3"])
class TestOnVersitygw(HttpStoreContract):
    """S3."""


@pytest.mark.parametrize("kind", ["s3+botocore"])
class TestReadByBotocore(HttpStoreContract):
    """S3, of which parts of objects are read by botocore, too."""


@pytest.mark.soak
@pytest.mark.parametrize("kind", ["minio"])
class TestOnMinio(HttpStoreContract):
    """S3."""


@pytest.mark.parametrize("kind", ["moto"])
class TestOnMoto(RaceContract, ListContract):
    rounds = 2
    many = 60  # pages are tested on versitygw
    passing_objects = 3


class BucketContract(HttpStoreContract):
    async def test_a_large_object_is_one_request(self, store: ObjectStore) -> None:
        """24 MiB are created on a condition, in one piece; the writer's epoch comes back, too."""
        data, metadata = Random(1).randbytes(24 * MIB), {"writer_epoch": "7"}
        assert await store.create("levels/1.sst", data, metadata) == Created()
        assert store.sent.by_kind[RequestKind.WRITE] == 1
        found = await store.get("levels/1.sst")
        assert found.data == data
        assert dict(found.metadata) == metadata

    async def test_requests_are_counted(self, store: ObjectStore, kind: str) -> None:
        """Deletes count by the batch (of 256 on Azure) or the object, lists by the page, the
        clock as a write and a read; a name that is gone makes Azure's batch be sent one by one.
        """
        names = [f"wal/{number:04d}" for number in range(260)]
        await create_many(store, names)
        before = dict(store.sent.by_kind)
        assert len(await names_in(store, "wal/")) == len(names)
        await store.delete(names)
        await store.now_ms()
        spent = {kind: store.sent.by_kind[kind] - before[kind] for kind in RequestKind}
        assert {kind: number for kind, number in spent.items() if number} == {
            RequestKind.LIST: 1,
            RequestKind.DELETE: 2 if kind == "azure" else len(names),
            RequestKind.WRITE: 1,
            RequestKind.READ: 1,
        }
        await create_many(store, names[:5])
        await store.delete(["wal/none", *names[:5], "wal/none"])
        assert await names_in(store, "wal/") == []


@pytest.mark.parametrize("kind", ["azure"])
class TestAzure(BucketContract):
    many = 60  # its pages are 5,000 names


@pytest.mark.parametrize("kind", ["google"])
class TestGoogle(BucketContract):
    """fake-gcs-server."""
