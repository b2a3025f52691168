"""The suites on the stores that need no server."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from shalekv.store.local import LocalStore
from shalekv.store.memory import MemoryObjects
from tests.contract.opening import OpenStore
from tests.kit.processes.in_process import memory_store, real_runtime
from tests.stores.engine_suite import EngineSuite
from tests.stores.fencing_suite import FencingSuite


class TestInMemory(FencingSuite, EngineSuite):
    tick_ms = 10

    @pytest.fixture
    def open_store(self) -> OpenStore:
        """Views of the same objects."""
        objects = MemoryObjects()
        return lambda: memory_store(objects)


class TestOnFiles(FencingSuite, EngineSuite):
    tick_ms = 10

    @pytest.fixture
    def open_store(self, tmp_path: Path) -> Iterator[OpenStore]:
        """Stores on one folder."""
        with real_runtime() as runtime:
            yield lambda: LocalStore(tmp_path / "database", runtime)
