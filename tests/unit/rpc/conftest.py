"""The tests of this folder run over the native wire; those of some modules over grpcio as well."""

from __future__ import annotations

import pytest

from shalekv.settings import Wire
from tests.kit.serving import rpc

# What depends on how a transport ends calls, or reports them.
OVER_BOTH = {
    "test_calls",
    "test_cycles",
    "test_names",
    "test_reflection",
    "test_safekeeper",
    "test_safekeeper_reads",
    "test_server",
    "test_session_end",
    "test_standing_by",
    "test_tls",
    "test_unread_streams",
    "test_wires",
}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    name = metafunc.module.__name__.rpartition(".")[2]
    wires = list(Wire) if name in OVER_BOTH else [Wire.NATIVE]
    if metafunc.definition.get_closest_marker("asyncio") is not None:
        metafunc.parametrize("wire", wires, indirect=True, ids=lambda wire: wire.value)


@pytest.fixture(autouse=True)
def wire(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Wire:
    """The transport of servers that a test starts without naming one."""
    chosen: Wire = getattr(request, "param", Wire.NATIVE)
    monkeypatch.setattr(rpc, "WIRE", chosen)
    return chosen
