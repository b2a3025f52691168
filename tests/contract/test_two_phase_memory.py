"""A store in memory with two-phase compare-and-swap keeps the contract of object stores."""

from __future__ import annotations

from itertools import count
from random import SystemRandom

import pytest

from shalekv.clock import LoopClock
from shalekv.runtime import Runtime
from shalekv.store.memory import MemoryObjects, MemoryStore
from shalekv.store.two_phase.memory import MemoryRecords, Table
from shalekv.store.two_phase.store import TwoPhaseStore
from tests.contract.opening import OpenStore
from tests.contract.store_contract import StoreContract
from tests.kit.inline_runtime import InlineWorkers

START_MS = 1_700_000_000_000


class TestTwoPhaseStore(StoreContract):
    @pytest.fixture
    def open_store(self) -> OpenStore:
        """Stores that share objects and records, and nothing else."""
        objects = MemoryObjects()
        table: Table = {}
        moments = count(START_MS)
        runtime = Runtime(LoopClock(), SystemRandom(), InlineWorkers())
        return lambda: TwoPhaseStore(
            MemoryStore(lambda: next(moments), objects=objects),
            MemoryRecords(table=table),
            runtime,
        )
