"""Writers whose sweeps are started by the test, and the expiries in their log."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from shalekv.format import names
from shalekv.format.sst import open_sst
from shalekv.protocol.entry import Entry, Kind
from shalekv.runtime import Runtime
from shalekv.server.compactor import Compactor
from shalekv.settings import CompactorConfig, CompactorSettings, LevelSettings
from shalekv.store.api import ObjectStore
from tests.kit.engine.databases import Database
from tests.kit.serving.roles import NEVER_POLLED

DAY_MS = 86_400_000
BY_HAND: dict[str, Any] = NEVER_POLLED | {"expiry_sweep_interval_ms": DAY_MS}
TTL_MS = 10_000


class Logged(NamedTuple):
    """A version as the log has it, and the logical time of its object."""

    entry: Entry
    logical_time_ms: int


async def logged(database: Database) -> list[Logged]:
    """All versions in the order of their numbers, range deletes included."""
    found: list[Logged] = []
    for wal_id in await database.wal():
        name = names.wal_name(wal_id)
        sst = open_sst(name, database.data(name), database_id=None)
        at_ms = sst.properties.logical_time_ms
        # Inside a commit the ranges go first.
        found += (Logged(each, at_ms) for each in (*sst.range_tombstones(), *sst.entries()))
    return sorted(found, key=lambda each: each.entry.seq)


async def expiries(database: Database) -> list[tuple[bytes, int]]:
    """Return the values whose expiry the log has, and the time of it, in order."""
    found = [each.entry for each in await logged(database)]
    return [(e.key, e.expire_at_ms) for e in found if e.kind is Kind.TOMBSTONE and e.expire_at_ms]


def check_log(versions: Sequence[Logged]) -> None:
    """Check that each tombstone of a sweep directly follows the expired value that it removes."""
    newest: dict[bytes, Entry] = {}
    for entry, logical_time_ms in versions:
        if entry.kind is Kind.RANGE_TOMBSTONE:
            for key in _keys_in(newest, entry):
                newest[key] = entry
            continue
        if entry.kind is Kind.TOMBSTONE and entry.expire_at_ms:
            before = newest.get(entry.key)
            assert before is not None, entry
            assert (before.kind, before.expire_at_ms) == (Kind.PUT, entry.expire_at_ms), entry
            assert entry.expire_at_ms <= logical_time_ms
        newest[entry.key] = entry


def _keys_in(newest: dict[bytes, Entry], deleted: Entry) -> Iterator[bytes]:
    start, end = deleted.key, deleted.value
    return (key for key in [*newest] if start <= key and (not end or key < end))


async def compact(database: Database, **settings: Any) -> None:
    """Merge all that is in the WAL into the levels."""
    await compact_store(database.store, database.runtime(), **settings)


async def compact_store(store: ObjectStore, runtime: Runtime, **settings: Any) -> None:
    """Merge all that is in the WAL of a store into the levels; settings are the compactor's."""
    chosen = {"wal_trigger_age_ms": 0, "l0_trigger_count": 2} | settings
    compact_settings = CompactorConfig(
        levels=LevelSettings(sst_bytes=65_536, block_bytes=1_024),
        compactor=CompactorSettings.model_validate(chosen),
    )
    compactor = await Compactor.open(
        store, settings=compact_settings, runtime=runtime, hurry=asyncio.Event()
    )
    await compactor.run(is_once=True)
