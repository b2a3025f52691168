"""Opens the elector that the settings name. A client is imported when it is wanted."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from shalekv.core.leasing import RENEWALS
from shalekv.errors import InvalidSetting
from shalekv.roles.electors.api import Elector, Told
from shalekv.roles.electors.bucket import BucketElector
from shalekv.roles.electors.place import BucketPlace, EtcdPlace, parse_place
from shalekv.runtime import Runtime
from shalekv.settings import ElectionSettings
from shalekv.store.cas import CasStore

TIMEOUT_MS_MIN = 250  # of a request to etcd, which syncs its disk


@asynccontextmanager
async def open_elector(
    settings: ElectionSettings, store: CasStore, runtime: Runtime, *, holder: str, told: Told
) -> AsyncIterator[Elector]:
    """The elector of `settings` for the database in `store`; raises `InvalidSetting`.

    `holder` is the HOST:PORT under which clients reach this process; `told` hears of the holder.
    """
    ttl_ms = settings.lease_ttl_ms
    match parse_place(settings.elect):
        case BucketPlace():
            yield BucketElector(store, holder=holder, ttl_ms=ttl_ms, told=told)
        case EtcdPlace() as place:
            async with _open_etcd(place, runtime, holder=holder, ttl_ms=ttl_ms, told=told) as it:
                yield it


@asynccontextmanager
async def _open_etcd(
    place: EtcdPlace, runtime: Runtime, *, holder: str, ttl_ms: int, told: Told
) -> AsyncIterator[Elector]:
    try:
        from shalekv.roles.electors.etcd import EtcdElector  # noqa: PLC0415  (an extra, see below)
        from shalekv.roles.electors.etcd_client import EtcdClient  # noqa: PLC0415  (as above)
    except ImportError as error:
        raise InvalidSetting(
            "--elect etcd:// needs etcd3gw, which is not installed: "
            "pip install 'shalekv[server,etcd]'"
        ) from error
    timeout_ms = max(TIMEOUT_MS_MIN, ttl_ms / RENEWALS / 2)  # two servers are asked in time
    client = EtcdClient(place.addresses, place.key, timeout_ms=timeout_ms)
    try:
        yield EtcdElector(client, runtime, holder=holder, ttl_ms=ttl_ms, told=told)
    finally:
        await asyncio.to_thread(client.close)
