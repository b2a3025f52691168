"""Stubs without a client around them, for tests of what goes over the wire."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc
from google.rpc import error_details_pb2, status_pb2

from shalekv.v1 import admin_pb2_grpc, kv_pb2_grpc

STATUS_DETAILS = "grpc-status-details-bin"


@asynccontextmanager
async def kv_stub(address: str, authority: bytes = b"") -> AsyncIterator[kv_pb2_grpc.KVStub]:
    """A stub; with the certificate of an authority, it speaks TLS."""
    options = [("grpc.use_local_subchannel_pool", 1)]
    made = grpc.aio.insecure_channel(address, options=options)
    if authority:
        trusted = grpc.ssl_channel_credentials(authority)
        made = grpc.aio.secure_channel(address, trusted, options=options)
    async with made as channel:
        yield kv_pb2_grpc.KVStub(channel)


@asynccontextmanager
async def admin_stub(address: str) -> AsyncIterator[admin_pb2_grpc.AdminStub]:
    options = [("grpc.use_local_subchannel_pool", 1)]
    async with grpc.aio.insecure_channel(address, options=options) as channel:
        yield admin_pb2_grpc.AdminStub(channel)


def reason_of(error: grpc.aio.AioRpcError) -> str:
    """The reason of an error, as clients decide by; empty if it has none."""
    status = status_pb2.Status()
    info = error_details_pb2.ErrorInfo()
    for name, value in error.trailing_metadata() or ():
        if name == STATUS_DETAILS and isinstance(value, bytes):
            status.ParseFromString(value)
    for detail in status.details:
        if detail.Unpack(info):
            return info.reason
    return ""
