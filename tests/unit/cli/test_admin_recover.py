"""`shalekv admin recover`: the creates that it completes, and when it refuses."""

from __future__ import annotations

from random import Random

import pytest

from shalekv.cli.commands.admin_recover import repair_store
from shalekv.clock import LoopClock
from shalekv.errors import DatabaseMismatch, StoreUnavailable
from shalekv.format.names import manifest_name
from shalekv.protocol.manifest import CasMode
from shalekv.runtime import Runtime
from shalekv.server.database import create_database
from shalekv.settings import StoreSettings
from shalekv.store.api import ObjectStore, Repaired, Unknown
from shalekv.store.cas import CasStore
from shalekv.store.memory import MemoryObjects, MemoryStore
from shalekv.store.two_phase.store import TwoPhaseStore
from tests.kit.inline_runtime import InlineWorkers
from tests.kit.memory_records import MemoryRecords, Table

NOW_MS = 1_700_000_000_000
NAME = "wal/00000000000000000007.sst"


class Crashing(MemoryStore):
    """A store that ends a create between its record and its copy, like a crash."""

    async def copy(self, source: str, destination: str) -> None:
        raise StoreUnavailable(self.url, "copy", destination, f"crashed before {source} was copied")


class Cluster:
    """The objects and records of a store, shared by successive processes."""

    def __init__(self) -> None:
        self.objects = MemoryObjects()
        self.table: Table = {}
        self.runtime = Runtime(LoopClock(), Random(7), InlineWorkers())

    def store(self, kind: type[MemoryStore] = MemoryStore) -> TwoPhaseStore:
        plain = kind(lambda: NOW_MS, objects=self.objects)
        return TwoPhaseStore(plain, MemoryRecords(table=self.table), self.runtime)

    def native(self) -> MemoryStore:
        return MemoryStore(lambda: NOW_MS, objects=self.objects)

    def cas(self, store: ObjectStore | None = None) -> CasStore:
        return CasStore(store or self.store(), self.runtime, StoreSettings())

    async def create_database(self) -> None:
        await create_database(self.store(), self.runtime, StoreSettings())

    async def crash_creating(self, name: str, data: bytes = b"data") -> None:
        assert isinstance(await self.store(Crashing).create(name, data), Unknown)


async def test_half_done_creates_are_completed() -> None:
    """A crashed create is completed, and a second run finds nothing to do."""
    sim = Cluster()
    await sim.create_database()
    await sim.crash_creating(NAME)
    assert sim.objects.find(NAME) is None
    outcome = await repair_store(sim.cas())
    assert outcome == (CasMode.TWO_PHASE, Repaired(completed=1), None)
    found = sim.objects.find(NAME)
    assert found is not None
    assert found.data == b"data"
    assert (await repair_store(sim.cas())).repaired == Repaired()


async def test_a_creation_that_crashed_is_completed() -> None:
    """The first manifest of a crashed creation of a database is completed."""
    sim, whole = Cluster(), Cluster()
    await whole.create_database()
    manifest = whole.objects.find(manifest_name(0)) or whole.objects.find(manifest_name(1))
    assert manifest is not None
    await sim.crash_creating(manifest.info.name, manifest.data)
    outcome = await repair_store(sim.cas())
    assert (outcome.repaired, outcome.missing) == (Repaired(completed=1), None)
    assert (await repair_store(sim.cas())).missing is None


async def test_another_mode_is_refused() -> None:
    """A database of the other --cas is refused before anything is changed, in both directions."""
    sim = Cluster()
    await sim.create_database()
    await sim.crash_creating(NAME)
    with pytest.raises(DatabaseMismatch):
        await repair_store(sim.cas(sim.native()))
    other = Cluster()
    await create_database(other.native(), other.runtime, StoreSettings())
    await other.crash_creating(NAME)
    with pytest.raises(DatabaseMismatch):
        await repair_store(other.cas())
    assert sim.objects.find(NAME) is None
    assert other.objects.find(NAME) is None
