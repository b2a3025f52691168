"""The start of commands that talk to a server: what takes long to import is imported where used."""

import asyncio
import os
import subprocess
import sys

import pytest

from shalekv.v1 import kv_pb2
from tests.kit.serving.dict_server import DictServer

# What no command of a single call loads, though it belongs to commands or to the client.
NEVER = """
aiohttp botocore cryptography grpc numpy opentelemetry prompt_toolkit pydantic rich structlog uvloop
google.rpc hashlib json shutil tempfile
shalekv.settings shalekv.runtime shalekv.protocol shalekv.format shalekv.store
shalekv.cli.console.configuration
shalekv_client.coalescer shalekv_client.routing.access_token shalekv_client.session
shalekv_client.status shalekv_client.stream shalekv_client.sync_client shalekv_client.watch
shalekv_wire.server shalekv_wire.tls shalekv_wire.tls_transport
""".split()
ADMIN = ["shalekv.v1.admin_pb2", "shalekv_client.admin"]
# A command of one call needs no event loop, and neither the client that has one.
ONE_CALL = [
    *ADMIN,
    *"asyncio concurrent.futures hpack logging pathlib ssl urllib.parse".split(),
    *("shalekv_client.client", "shalekv_client.error_table", "shalekv_client.scan"),
    *("shalekv_client.routing.fleet", "shalekv_client.routing.retry", "shalekv_wire.client"),
]
ONE_KEY = [*ONE_CALL, "shalekv_client.changes"]
PROGRAM = """
import sys
from shalekv.cli.main import main
sys.argv = ["shalekv", *sys.argv[1:]]
try:
    main()
except SystemExit as ended:
    assert not ended.code, ended.code
print("MODULES", *sys.modules)
"""


@pytest.mark.parametrize(
    ("command", "absent"),
    [
        ("get k", ONE_KEY),
        ("put k v", ONE_KEY),
        ("delete k", ONE_KEY),
        ("add n", ONE_KEY),
        ("count", ONE_KEY),
        ("exists k", ONE_KEY),
        ("ttl k", ONE_KEY),
        ("txn --format raw --then", ONE_CALL),
        ("scan", ADMIN),
    ],
)
async def test_a_command_loads_what_it_uses(
    server: DictServer, command: str, absent: list[str]
) -> None:
    """A command of one call ends without having loaded what others need: that takes 0.1 s."""
    server.state.data[b"k"] = kv_pb2.Entry(key=b"k", value=b"v", seq=1)
    arguments = [*command.split(), "--addr", server.address]
    if "txn" in command:
        arguments[4:4] = ["get k"]
    ended = await asyncio.to_thread(
        subprocess.run,
        [sys.executable, "-c", PROGRAM, *arguments],
        capture_output=True,
        text=True,
        check=True,
    )
    loaded = set(ended.stdout.rpartition("MODULES")[2].split())
    assert "shalekv_wire.client_connection" in loaded
    assert loaded.intersection([*NEVER, *absent]) == set()


@pytest.mark.parametrize(
    ("named", "told"),
    [(f"00-{'a' * 32}-{'b' * 16}-01", f"00-{'a' * 32}-{'b' * 16}-01"), ("no span", "")],
)
async def test_a_command_belongs_to_the_span_of_the_environment(
    server: DictServer, named: str, told: str
) -> None:
    """The server gets the span that TRACEPARENT names; what names none is ignored."""
    await asyncio.to_thread(
        subprocess.run,
        [sys.executable, "-c", PROGRAM, "put", "k", "v", "--addr", server.address],
        env={**os.environ, "TRACEPARENT": named},
        stdout=subprocess.DEVNULL,
        check=True,
    )
    assert server.state.traceparents == [told]
