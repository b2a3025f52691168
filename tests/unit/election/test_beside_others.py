"""Leases in the bucket beside all else that is there."""

from __future__ import annotations

from random import Random

from shalekv.core.leasing import KEPT, ElectionLease
from shalekv.engine.collection.collecting import Collecting
from shalekv.format.election import encode_lease
from shalekv.format.names import ELECTION_FOLDER, election_name
from shalekv.roles.database import create_database
from shalekv.roles.electors.bucket import BucketLease
from shalekv.settings import CollectorSettings, StoreSettings
from shalekv.store.api import Created
from shalekv.store.cas import CasStore
from shalekv.store.memory import MemoryObjects, MemoryStore
from shalekv.store.two_phase.memory import MemoryRecords, Table
from shalekv.store.two_phase.store import TwoPhaseStore
from tests.kit.engine.running_log import yielding_runtime
from tests.kit.store import STORE_NOW_MS

RENEWALS = 200
LEASE = ElectionLease("a", bytes(16), 3_000)
OLD_MS = 10**9  # all that is there is older than a collector has to wait for


class Bucket:
    """A bucket without conditional writes: records decide who has created an object."""

    def __init__(self) -> None:
        self.objects = MemoryObjects()
        self.table: Table = {}
        self.now_ms = STORE_NOW_MS
        self._seeds = Random(1)

    def cas(self) -> CasStore:
        """As one more process sees it."""
        runtime = yielding_runtime(self._seeds.getrandbits(32))
        plain = MemoryStore(lambda: self.now_ms, objects=self.objects)
        store = TwoPhaseStore(plain, MemoryRecords(table=self.table), runtime)
        return CasStore(store, runtime, StoreSettings())

    def leases(self) -> list[str]:
        """The names in the folder of the election."""
        return [info.name for info in self.objects.page(ELECTION_FOLDER, "")]


async def test_records_of_leases_do_not_pile_up() -> None:
    """Where a create leaves a record, it goes with the lease; what a crash has left of a deletion
    the collector forgets, and the leases that are there it leaves alone.
    """
    bucket = Bucket()
    store = bucket.cas()
    await create_database(store.reads, store.runtime, StoreSettings())
    records_before = len(bucket.table)
    assert await store.reads.create(election_name(0), encode_lease(0, LEASE)) == Created()
    lease = BucketLease(store, LEASE, 0, bucket.leases())
    for _ in range(RENEWALS):
        assert await lease.renew() is None
    left = bucket.leases()
    assert KEPT < len(left) <= 2 * KEPT + 1
    assert len(bucket.table) == records_before + len(left)
    crashed = MemoryStore(lambda: bucket.now_ms, objects=bucket.objects)
    await crashed.delete(left[:3])
    bucket.now_ms += OLD_MS
    await Collecting(bucket.cas(), CollectorSettings(wal_retention_s=0)).collect()
    assert bucket.leases() == left[3:]
    assert len(bucket.table) == records_before + len(left[3:])
    assert await lease.renew() is None


async def test_what_a_crash_left_half_done_is_deleted_with_the_leases() -> None:
    """A temporary object of two-phase compare-and-swap goes with the lease that it was to be."""
    bucket = Bucket()
    store = bucket.cas()
    half_done = f"{election_name(3)}.{'0' * 8}-0000-4000-8000-{'0' * 12}.00000000"
    plain = MemoryStore(lambda: bucket.now_ms, objects=bucket.objects)
    await plain.create(half_done, b"half done")
    lease = BucketLease(store, LEASE, 0, bucket.leases())
    for _ in range(3 * KEPT):
        assert await lease.renew() is None
    assert half_done not in bucket.leases()
