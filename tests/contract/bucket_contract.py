"""What stores on Google and Azure keep beyond the contract of all stores."""

from __future__ import annotations

from random import Random

from shalekv.store.api import Created, ObjectStore
from shalekv.store.requests import RequestKind
from tests.contract.store_contract import StoreContract

LARGE_BYTES = 64 * 1024 * 1024


class BucketContract(StoreContract):
    async def test_metadata_is_kept(self, store: ObjectStore) -> None:
        """The epoch of the writer comes back with the object, and nothing else does."""
        await store.create("wal/1.sst", b"x", {"writer_epoch": "7"})
        assert dict((await store.get("wal/1.sst")).metadata) == {"writer_epoch": "7"}

    async def test_a_large_object_is_one_request(self, store: ObjectStore) -> None:
        """64 MiB are created on a condition, in one piece, and read as they were written."""
        data = Random(1).randbytes(LARGE_BYTES)
        assert await store.create("levels/1.sst", data) == Created()
        assert store.sent.by_kind[RequestKind.WRITE] == 1
        assert (await store.get("levels/1.sst")).data == data
