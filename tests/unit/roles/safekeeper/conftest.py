"""What all tests of archivers begin with: a database, and time."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from shalekv.runtime import Runtime
from shalekv.store.memory import MemoryObjects, MemoryStore
from tests.kit.processes.in_process import memory_store, real_runtime
from tests.kit.quorum.held_log import (
    A,
    B,
    C,
    manifest_of,
    put_manifest,
)


@pytest.fixture
def runtime() -> Iterator[Runtime]:
    """Real time, and threads."""
    with real_runtime() as runtime:
        yield runtime


@pytest.fixture
def objects() -> MemoryObjects:
    """Those of the database."""
    return MemoryObjects()


@pytest.fixture
async def store(objects: MemoryObjects) -> MemoryStore:
    """One with a manifest that names all three members."""
    store = memory_store(objects)
    await put_manifest(store, manifest_of(0, A, B, C))
    return store
