"""What a store must bring to be put to the contract: a way to open it again and again."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable

import pytest

from shalekv.store.api import ObjectInfo, ObjectStore

OpenStore = Callable[[], ObjectStore]


class Opening:
    """The fixtures of the contract. A store adds `open_store`, and passes or does not."""

    @pytest.fixture
    def open_store(self) -> OpenStore:
        """A function whose every call opens one and the same, at first empty, database."""
        raise AssertionError("a class that tests a store overrides this fixture")

    @pytest.fixture
    async def store(self, open_store: OpenStore) -> AsyncIterator[ObjectStore]:
        """The store under test."""
        opened = open_store()
        yield opened
        await opened.close()

    @pytest.fixture
    async def rival(self, open_store: OpenStore) -> AsyncIterator[ObjectStore]:
        """Another one on the same database."""
        opened = open_store()
        yield opened
        await opened.close()


async def names_in(store: ObjectStore, prefix: str, start_after: str = "") -> list[str]:
    """The names that a list shows."""
    return [info.name for info in await listed(store, prefix, start_after)]


async def listed(store: ObjectStore, prefix: str, start_after: str = "") -> list[ObjectInfo]:
    """All that a list shows."""
    return [info async for info in store.list(prefix, start_after=start_after)]
