"""Connections of a process to others of its deployment: to safekeepers, and to etcd."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import cache

from shalekv.errors import InvalidSetting
from shalekv.rpc.safekeeper_links import GRPCIO_OPTIONS, GrpcLinks, native_channel
from shalekv.settings import TlsSettings, Wire
from shalekv_wire.calls import Channel
from shalekv_wire.tls import TlsContexts, TlsFiles, UnusableFiles


def peer_contexts(settings: TlsSettings) -> TlsContexts:
    """Return the contexts of connections that this process opens. Raises `InvalidSetting`."""
    files = TlsFiles(
        certificate=settings.tls_cert,
        key=settings.tls_key,
        authority=settings.tls_server_ca or settings.tls_client_ca,
    )
    try:
        return TlsContexts(files, is_server=False)
    except UnusableFiles as error:
        raise InvalidSetting(f"TLS of connections to safekeepers and etcd: {error}") from None


@asynccontextmanager
async def open_links(tls: TlsSettings, wire: Wire = Wire.NATIVE) -> AsyncIterator[GrpcLinks]:
    """Connections to safekeepers, opened on first use, and closed at the end.

    Raises `InvalidSetting`.
    """
    connect = native_channel if wire is Wire.NATIVE else _grpcio_channel

    @cache
    def contexts() -> TlsContexts | None:
        return peer_contexts(tls) if tls.connects_with_tls else None

    if tls.tls_server_ca or tls.tls_client_ca:
        contexts()  # files that are missing are reported at once
    # Otherwise the authorities of the system are loaded, which takes long, and few need it.
    links = GrpcLinks(lambda address: connect(address, contexts()))
    try:
        yield links
    finally:
        await links.close()


def _grpcio_channel(address: str, tls: TlsContexts | None) -> Channel:
    from shalekv_client.routing.grpcio_channel import (  # noqa: PLC0415 (loads grpcio)
        GrpcioChannel,
    )

    return GrpcioChannel(address, GRPCIO_OPTIONS, tls=tls)
