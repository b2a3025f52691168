"""The watches of an engine, the writer's or a replica's."""

from __future__ import annotations

from collections.abc import Callable

from shalekv.replica.engine import ReaderEngine
from shalekv.settings import WatchSettings
from shalekv.store.cas import CasStore
from shalekv.v1 import kv_pb2
from shalekv.watch.consumers import ConsumerLeases
from shalekv.watch.history import History
from shalekv.watch.stream import Watches
from shalekv.write.engine import WriterEngine


def watches_of(
    engine: WriterEngine | ReaderEngine,
    store: CasStore,
    settings: WatchSettings,
    header: Callable[[int, int | None], kv_pb2.ReplyHeader],
) -> Watches:
    """What answers `KV.Watch`; `header` makes that of a reply."""
    return Watches(
        engine.feed,
        History(
            store,
            engine.manifest,
            engine.levels.ssts,
            database_id=engine.database_id,
            held=engine.held_object,
        ),
        settings,
        store.runtime.clock,
        hold=lambda: engine.held,
        header=header,
        now_ms=engine.time.now_ms,
        leases=ConsumerLeases(store, engine.manifest, settings.consumer_lease_ttl_s),
    )
