"""Waiting for what a server has seen."""

from __future__ import annotations

from tests.kit.serving.dict_server import DictServer


async def received(server: DictServer, count: int) -> None:
    """Wait until so many operations have come in sessions."""
    async with server.state.received:
        await server.state.received.wait_for(lambda: sum(map(len, server.state.messages)) >= count)
