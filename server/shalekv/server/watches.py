"""Composition of `KV.Watch` for the engine of a writer or a reader; validation of its requests."""

from __future__ import annotations

from shalekv.errors import InvalidRequest
from shalekv.protocol.entry import KeyRange
from shalekv.replica.engine import ReplicaEngine
from shalekv.server import requests
from shalekv.server.service import MakeHeader
from shalekv.settings import WatchSettings
from shalekv.store.cas import CasStore
from shalekv.v1 import kv_pb2
from shalekv.watch.consumers import ConsumerLeases
from shalekv.watch.history import History
from shalekv.watch.stream import Watches
from shalekv.write.engine import WriterEngine

_REFUSED = ("min_seq", "max_staleness_ms", "snapshot_id", "read_level")


def watches_of(
    engine: WriterEngine | ReplicaEngine,
    store: CasStore,
    settings: WatchSettings,
    header: MakeHeader,
) -> Watches:
    """Create the implementation of `KV.Watch` on `engine`."""
    return Watches(
        engine.feed,
        History(
            store,
            engine.manifest,
            engine.levels.ssts,
            database_id=engine.database_id,
            unarchived=engine.unarchived_object,
        ),
        settings,
        store.runtime.clock,
        current_version=lambda: engine.pinned,
        header=header,
        now_ms=engine.now_ms,
        watched_range=watched_range,
        leases=ConsumerLeases(store, engine.manifest, settings.consumer_lease_ttl_s),
    )


def watched_range(create: kv_pb2.WatchCreate) -> KeyRange:
    """Return the range to watch. Raises `InvalidRequest` if any field of the request is wrong."""
    requests.check_header(create.header)
    for name in _REFUSED:
        if getattr(create.header, name):
            problem = "a watch shows commits as they become durable, and no state: leave it out"
            raise InvalidRequest(f"create.header.{name}", problem)
    try:
        keys = requests.key_range(create.range)
    except InvalidRequest as error:
        raise requests.within("create", error) from None
    if keys.is_empty:
        raise InvalidRequest("create.range", "there is no key in it")
    return keys
