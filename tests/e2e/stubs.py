"""Stubs without a client around them, for tests of what goes over the wire."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc

from shalekv.v1 import kv_pb2_grpc


@asynccontextmanager
async def kv_stub(address: str) -> AsyncIterator[kv_pb2_grpc.KVStub]:
    """A stub with a connection of its own."""
    options = [("grpc.use_local_subchannel_pool", 1)]
    async with grpc.aio.insecure_channel(address, options=options) as channel:
        yield kv_pb2_grpc.KVStub(channel)
