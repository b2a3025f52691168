"""A server over a dict, and a client that is connected to it."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest_asyncio

from shalekv_client import Client
from tests.kit.serving.dict_server import DictServer


@pytest_asyncio.fixture
async def server() -> AsyncIterator[DictServer]:
    """A server with no data."""
    async with DictServer() as running:
        yield running


@pytest_asyncio.fixture
async def client(server: DictServer) -> AsyncIterator[Client]:
    """A client of that server."""
    async with Client(server.address) as connected:
        yield connected
