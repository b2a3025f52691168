"""The memory store keeps the contract of object stores."""

from __future__ import annotations

from itertools import count

import pytest

from shalekv.store.memory import MemoryObjects, MemoryStore
from tests.contract.opening import OpenStore
from tests.contract.store_contract import StoreContract

START_MS = 1_700_000_000_000


class TestMemoryStore(StoreContract):
    @pytest.fixture
    def open_store(self) -> OpenStore:
        """Views of the same objects, with a clock that is later each time it is read."""
        objects = MemoryObjects()
        moments = count(START_MS)
        return lambda: MemoryStore(lambda: next(moments), objects=objects)
