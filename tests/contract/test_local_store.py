"""The local store keeps the contract of object stores, on a real file system."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from random import SystemRandom

import pytest

from shalekv.clock import LoopClock
from shalekv.runtime import Runtime, ThreadWorkers
from shalekv.store.local import LocalStore
from tests.contract.opening import OpenStore
from tests.contract.store_contract import StoreContract

THREADS = 4


class TestLocalStore(StoreContract):
    @pytest.fixture
    def open_store(self, tmp_path: Path) -> Iterator[OpenStore]:
        """Instances on one folder that share nothing else but threads."""
        workers = ThreadWorkers(THREADS)
        runtime = Runtime(LoopClock(), SystemRandom(), workers)
        yield lambda: LocalStore(tmp_path / "new" / "database", runtime)
        workers.close()
