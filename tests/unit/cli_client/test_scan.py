"""`shalekv scan` and `shalekv status`: what they print."""

from __future__ import annotations

import json

import pytest

from shalekv.cli.output import TABLE_ROWS
from shalekv.cli.scan import scan
from shalekv.v1 import kv_pb2
from tests.kit.serving.dict_server import DictServer
from tests.unit.cli_client.conftest import Run


@pytest.fixture
def filled(server: DictServer) -> DictServer:
    """Keys k00 to k11 whose values are their numbers."""
    for number in range(12):
        key = b"k%02d" % number
        server.state.data[key] = kv_pb2.Entry(key=key, value=key[1:], seq=number + 1)
    return server


@pytest.mark.parametrize("output_format", ["table", "json", "raw"])
async def test_nothing_is_lost_between_pages(
    run: Run, server: DictServer, output_format: str
) -> None:
    """However many pages of output there are, every key is printed once and in order."""
    keys = [f"{number:05}" for number in range(2 * TABLE_ROWS + 1)]
    for key in keys:
        server.state.data[key.encode()] = kv_pb2.Entry(key=key.encode(), seq=1)
    result = await run(scan, "--format", output_format, "--keys-only")
    found = result.stdout.split()
    if output_format == "json":
        found = [json.loads(line)["key"] for line in result.stdout.splitlines()]
    assert [key for key in found if key != "key"] == keys


@pytest.mark.usefixtures("filled")
async def test_what_came_before_a_failure_is_printed(run: Run, server: DictServer) -> None:
    """A scan that breaks off prints what it got, and ends with an error, not as if it were all."""
    server.state.scan_failure_after = 1
    result = await run(scan, "--keys-only")
    assert result.stdout.split() == ["k00", "k01", "k02"]
    assert result.exit_code == 11
    assert "made to fail" in result.stderr
