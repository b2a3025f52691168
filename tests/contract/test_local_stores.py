"""The stores without a server keep the contract of object stores."""

from __future__ import annotations

from itertools import count

import pytest

from shalekv.store.api import ObjectStore
from shalekv.store.memory import MemoryObjects, MemoryStore
from shalekv.store.two_phase.memory import MemoryRecords, Table
from shalekv.store.two_phase.store import TwoPhaseStore
from tests.contract.opening import OpenStore
from tests.contract.store_contract import StoreContract
from tests.kit.inline_runtime import inline_runtime

START_MS = 1_700_000_000_000


class TestLocalStore(StoreContract):
    @pytest.fixture
    def kind(self) -> str:
        """A folder of a real file system."""
        return "file"


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
