"""Servers behind a proxy, and servers that are replaced under load."""

from __future__ import annotations

import asyncio
import getpass
import socket
from collections.abc import Iterator
from contextlib import AsyncExitStack, contextmanager
from itertools import cycle
from pathlib import Path
from typing import Any

import grpc
import pytest

from shalekv_wire.client import WireChannel
from shalekv_wire.server import WireServer
from shalekv_wire.status import CallFailed
from tests.kit.timeouts import until
from tests.servers.debian import libraries
from tests.servers.obtain import obtained
from tests.servers.process import HOST, Program, folder, free_port, free_ports, running
from tests.wire.interop.cases import CASES
from tests.wire.interop.grpcio_peers import grpcio_channel
from tests.wire.interop.messages import SERVICE
from tests.wire.interop.service import KINDS, OPTIONS, bound, find, served

CONFIGURATION = """
daemon off;
user {user};
worker_processes 1;
pid {work}/pid;
error_log stderr warn;
events {{ worker_connections 256; }}
http {{
    access_log off;
    client_max_body_size 0;
    client_body_temp_path {work}/body;
    proxy_temp_path {work}/proxy;
    fastcgi_temp_path {work}/fastcgi;
    uwsgi_temp_path {work}/uwsgi;
    scgi_temp_path {work}/scgi;
    upstream servers {{
        {servers}
        keepalive 16;
    }}
    server {{
        listen {listen} http2;
        location / {{ grpc_pass grpc://servers; }}
    }}
}}
"""
CALLERS = 8
CALLS_BETWEEN = 200  # answered calls between two events of a replacement
GRACE_S = 30.0
# Chooses another server for a call that has not reached one; a server that leaves says so.
ROUND_ROBIN = '{"loadBalancingConfig": [{"round_robin": {}}]}'


@contextmanager
def nginx(*upstreams: str) -> Iterator[str]:
    """A proxy before these servers, HOST:PORT or unix:PATH; yields its own address."""
    usr = obtained("nginx") / "usr"
    with folder() as work:
        listen = f"{HOST}:{free_port()}"
        servers = "".join(f"server {each} max_fails=0;" for each in upstreams)
        text = CONFIGURATION.format(
            work=work, servers=servers, listen=listen, user=getpass.getuser()
        )
        (work / "nginx.conf").write_text(text)
        argv = [str(usr / "sbin" / "nginx"), "-p", str(work), "-c", str(work / "nginx.conf")]
        with running(Program(argv, libraries(usr)), work / "log", (work / "pid").exists):
            yield listen


@pytest.mark.parametrize("kind", KINDS)
async def test_nginx_passes_all_cases_on(kind: str, tmp_path: Path) -> None:
    """Clients of grpcio and our own reach our server through nginx, over TCP and Unix sockets."""
    async with served(bound(kind, tmp_path)) as address:
        with nginx(address) as proxy:
            for channel in (grpcio_channel(proxy), WireChannel(proxy)):
                for name, case in CASES.items():
                    if name != "timeout_on_sleeping_server":  # the answer may be that of nginx
                        await case(channel)
                await channel.close()


class Replaced:
    """Two servers of one service, which are replaced one after the other."""

    def __init__(self) -> None:
        self.ports = free_ports(2)
        self._servers: dict[int, WireServer] = {}

    @property
    def addresses(self) -> list[str]:
        return [f"{HOST}:{port}" for port in self.ports]

    async def start(self, port: int) -> None:
        server = WireServer(find, OPTIONS)
        await server.serve(socket.create_server((HOST, port), reuse_port=True))
        self._servers[port] = server

    async def stop(self, port: int) -> None:
        """Let the server finish what it has begun, and refuse nothing that is on its way."""
        await self._servers.pop(port).stop(GRACE_S)

    async def close(self) -> None:
        for port in [*self._servers]:
            await self._servers.pop(port).stop(0)


class Load:
    """Callers that call again and again, and never again after a failure."""

    def __init__(self) -> None:
        self.answered = 0
        self.is_over = False

    async def more(self) -> None:
        """Wait until some more calls are answered."""
        wanted = self.answered + CALLS_BETWEEN
        await until(lambda: self.answered >= wanted, "answers")

    async def call(self, unary: Any) -> None:
        while not self.is_over:
            await unary(f"{SERVICE}EmptyCall", b"")
            self.answered += 1

    async def replace(self, servers: Replaced) -> None:
        """Stop and start each server while calls go on."""
        for port in servers.ports:
            await self.more()
            await servers.stop(port)
            await self.more()
            await servers.start(port)
        await self.more()
        self.is_over = True


async def test_no_call_of_grpcio_fails_when_servers_are_replaced() -> None:
    """A client that balances over two servers sees no failed call when each is stopped in turn."""
    servers, load = Replaced(), Load()
    async with AsyncExitStack() as closing:
        closing.push_async_callback(servers.close)
        for port in servers.ports:
            await servers.start(port)
        options = [("grpc.service_config", ROUND_ROBIN)]
        target = f"ipv4:{','.join(servers.addresses)}"
        channel = await closing.enter_async_context(grpc.aio.insecure_channel(target, options))

        async def unary(path: str, request: bytes) -> None:
            call: Any = channel.unary_unary(path)
            await call(request, wait_for_ready=True)  # while it connects to the new server

        async with asyncio.TaskGroup() as tasks:
            for _ in range(CALLERS):
                tasks.create_task(load.call(unary))
            tasks.create_task(load.replace(servers))
    assert load.answered >= 5 * CALLS_BETWEEN


async def test_a_stop_tells_our_client_which_calls_to_repeat() -> None:
    """A client of two servers repeats what no server has seen, and no other call fails."""
    servers, load = Replaced(), Load()
    async with AsyncExitStack() as closing:
        closing.push_async_callback(servers.close)
        for port in servers.ports:
            await servers.start(port)
        channels = [WireChannel(address) for address in servers.addresses]
        for channel in channels:
            closing.push_async_callback(channel.close)

        async def unary(path: str, request: bytes) -> None:
            for channel in cycle(channels):
                try:
                    await channel.unary(path, request)
                    return
                except CallFailed as error:
                    if not error.is_unsent:
                        raise
                await asyncio.sleep(0)  # while a channel waits before it connects again

        async with asyncio.TaskGroup() as tasks:
            for _ in range(CALLERS):
                tasks.create_task(load.call(unary))
            tasks.create_task(load.replace(servers))
    assert load.answered >= 5 * CALLS_BETWEEN
