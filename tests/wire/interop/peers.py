"""gRPC's interop clients and servers of other languages, as processes."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

import grpc

from tests.kit.processes.child import Child
from tests.kit.processes.processes import Processes
from tests.servers.obtain import obtained
from tests.servers.process import free_port

HERE = Path(__file__).parent
START_S = 60.0
# Of the soak cases, which otherwise count a call as failed that waits for a busy processor.
SOAK_FLAGS = (
    "soak_per_iteration_max_acceptable_latency_ms=30000",
    "soak_overall_timeout_seconds=300",
)

COMMON_CASES = (
    "empty_unary",
    "large_unary",
    "client_streaming",
    "server_streaming",
    "ping_pong",
    "empty_stream",
    "cancel_after_begin",
    "cancel_after_first_response",
    "timeout_on_sleeping_server",
    "status_code_and_message",
    "special_status_message",
    "unimplemented_method",
    "unimplemented_service",
)
GO_CASES = (*COMMON_CASES, "custom_metadata", "rpc_soak", "channel_soak")
# Those of compressed requests without the probe: a server that cannot see whether one message was
# compressed, as ours, decompresses it and does not judge it.
JAVA_CASES = (
    *COMMON_CASES,
    "custom_metadata",
    "client_compressed_unary_noprobe",
    "client_compressed_streaming_noprobe",
    "server_compressed_unary",
    "server_compressed_streaming",
    "very_large_request",
    "rpc_soak",
    "channel_soak",
)
JS_CASES = (
    *COMMON_CASES,
    "custom_metadata",
    "server_compressed_unary",
    "compressed_requests",
    "concurrent_large_unaries",
)


async def go_client(processes: Processes, address: str, case: str) -> None:
    host, port = _split(address)
    program = obtained("interop-go") / "bin" / "client"
    flags = [f"-server_host={host}", f"-server_port={port}", f"-test_case={case}"]
    flags += [f"-{flag}" for flag in SOAK_FLAGS]
    await processes.run(*flags, program=str(program), code=0)


async def java_client(processes: Processes, address: str, case: str, *more: str) -> None:
    host, port = _split(address)
    flags = [f"--server_host={host}", f"--server_port={port}", f"--test_case={case}"]
    flags += [f"--{flag}" for flag in SOAK_FLAGS]
    client = "io.grpc.testing.integration.TestServiceClient"
    await processes.run(*_java(client), *flags, "--use_tls=false", *more, program="java", code=0)


async def js_client(processes: Processes, address: str, cases: Sequence[str]) -> None:
    """All cases in one process: it prints those that have passed."""
    env = {"NODE_PATH": str(obtained("interop-js") / "node_modules")}
    driver = str(HERE / "js" / "driver.js")
    ran = await processes.run(driver, address, *cases, program="node", env=env)
    assert ran.stdout().split() == [*cases], ran.report()


async def go_server(processes: Processes) -> str:
    """Start gRPC's own server in Go; returns its address."""
    port = free_port()
    program = obtained("interop-go") / "bin" / "server"
    return await _ready(processes.start(f"-port={port}", program=str(program)), port)


async def java_server(processes: Processes) -> str:
    """Start gRPC's own server in Java; returns its address."""
    port = free_port()
    flags = [f"--port={port}", "--use_tls=false"]
    server = "io.grpc.testing.integration.TestServiceServer"
    return await _ready(processes.start(*_java(server), *flags, program="java"), port)


async def _ready(child: Child, port: int) -> str:
    address = f"localhost:{port}"
    async with grpc.aio.insecure_channel(address) as channel:
        try:
            async with asyncio.timeout(START_S):
                await channel.channel_ready()
        except TimeoutError:
            raise AssertionError(child.report()) from None
    return address


def _java(main: str) -> list[str]:
    return ["-cp", f"{obtained('interop-java') / 'lib'}/*", main]


def _split(address: str) -> tuple[str, int]:
    """Host and port of an address; a path of a socket has the port 0."""
    if address.startswith("unix:"):
        return address, 0
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)
