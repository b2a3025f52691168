"""Opens the elector that the settings name. Its client is imported only if it is needed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from shalekv.errors import InvalidSetting
from shalekv.protocol.lease import RENEWALS
from shalekv.runtime import Runtime
from shalekv.server.election.bucket import BucketElector
from shalekv.server.election.elector import (
    BucketPlace,
    Elector,
    EtcdPlace,
    HolderChanged,
    KubernetesPlace,
    TlsContext,
    parse_place,
)
from shalekv.settings import ElectionSettings
from shalekv.store.cas import CasStore

if TYPE_CHECKING:
    from shalekv.server.election.etcd import EtcdClient

TIMEOUT_MS_MIN = 250  # of a request to etcd or Kubernetes, which have to sync a disk


@asynccontextmanager
async def open_elector(
    settings: ElectionSettings,
    store: CasStore,
    runtime: Runtime,
    *,
    open_tls: Callable[[], TlsContext],
    holder: str,
    on_holder_change: HolderChanged,
    environment: Mapping[str, str],
) -> AsyncIterator[Elector]:
    """Open the elector of `settings` for the database in `store`. Raises `InvalidSetting`.

    `open_tls` is called for an etcd with TLS. `holder` is the HOST:PORT under which clients reach
    this process. `on_holder_change` is called with that of the present holder. `environment` has
    the address of Kubernetes, in a pod.
    """
    ttl_ms = settings.lease_ttl_ms
    match parse_place(settings.elect):
        case BucketPlace():
            yield BucketElector(
                store, holder=holder, ttl_ms=ttl_ms, on_holder_change=on_holder_change
            )
        case EtcdPlace() as place:
            async with _open_etcd(place, ttl_ms, open_tls) as client:
                from shalekv.server.election import etcd  # noqa: PLC0415 - brings an HTTP client

                yield etcd.EtcdElector(
                    client, runtime, holder=holder, ttl_ms=ttl_ms, on_holder_change=on_holder_change
                )
        case KubernetesPlace() as place:
            from shalekv.server.election import kubernetes  # noqa: PLC0415 - brings an HTTP client

            path, timeout_ms = settings.kubernetes_credentials_path, _timeout_ms(ttl_ms)
            async with kubernetes.open_leases(
                place, environment, path, timeout_ms=timeout_ms
            ) as leases:
                yield kubernetes.KubernetesElector(
                    leases, runtime, holder=holder, ttl_ms=ttl_ms, on_holder_change=on_holder_change
                )


def _timeout_ms(ttl_ms: int) -> float:
    """Return the timeout of a request: two requests fit between two renewals."""
    return max(TIMEOUT_MS_MIN, ttl_ms / RENEWALS / 2)


@asynccontextmanager
async def _open_etcd(
    place: EtcdPlace, ttl_ms: int, open_tls: Callable[[], TlsContext]
) -> AsyncIterator[EtcdClient]:
    try:
        from shalekv.server.election.etcd import EtcdClient  # noqa: PLC0415 (brings an HTTP client)
    except ImportError as error:
        raise InvalidSetting(
            "--elect etcd:// needs etcd3gw, which is not installed: pip install 'shalekv[etcd]'"
        ) from error
    tls = open_tls() if place.has_tls else None
    client = EtcdClient(place.addresses, place.key, timeout_ms=_timeout_ms(ttl_ms), tls=tls)
    try:
        yield client
    finally:
        await asyncio.to_thread(client.close)
