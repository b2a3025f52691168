"""A server over a dict, and a client that is connected to it.

The tests of this folder run over the wire of ShaleKV; those of some modules over grpcio as well.
"""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from shalekv_client import Client, Wire
from shalekv_client.routing.addresses import WIRE_VARIABLE
from tests.kit.serving.dict_server import DictServer

# What depends on how a transport ends calls, or reports them.
OVER_BOTH = {"test_calls", "test_error_names", "test_scans_of_readers", "test_watching"}
TESTS_OVER_BOTH = {
    "test_a_server_is_reached_by_the_path_of_a_socket",
    "test_bare_statuses_are_unknown",
    "test_closing_ends_what_is_under_way",
    "test_the_time_for_connecting_counts",
    "test_the_fallback_shows_a_token",
    "test_files_are_read_again",
    "test_a_session_moves_to_a_new_token",
    "test_servers_are_verified",
}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    module, test = metafunc.module.__name__.rpartition(".")[2], metafunc.function.__name__
    if metafunc.definition.get_closest_marker("asyncio") is not None:
        wires = list(Wire) if module in OVER_BOTH or test in TESTS_OVER_BOTH else [Wire.NATIVE]
        metafunc.parametrize("wire", wires, indirect=True, ids=lambda wire: wire.value)


@pytest.fixture(autouse=True)
def wire(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Wire:
    """The wire of clients that do not choose one themselves."""
    chosen: Wire = getattr(request, "param", Wire.NATIVE)
    monkeypatch.setenv(WIRE_VARIABLE, chosen.value)
    return chosen


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
