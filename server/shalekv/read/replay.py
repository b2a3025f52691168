"""Replay: applies WAL objects to a memtable, in the order of their slots (I1, I4)."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from operator import attrgetter
from typing import TypeAlias

from shalekv.errors import IllegalState, ShaleError
from shalekv.format import names
from shalekv.format.records import decode_idempotency_record, decode_load
from shalekv.format.sst import Sst, open_sst
from shalekv.protocol.entry import Entry, Kind
from shalekv.protocol.loads import CommittedLoad
from shalekv.read.memtable import Memtable
from shalekv.read.sorted_runs import MemoryRun
from shalekv.store.cas import CasStore

KeepAlive: TypeAlias = Callable[[], Awaitable[None]]


@dataclass(slots=True)
class Replayed:
    """The state that a replay extends: begin with that of a manifest."""

    memtable: Memtable
    last_seq: int  # the greatest sequence number
    logical_time_ms: int  # the latest
    objects: int = 0
    records: list[Entry] = field(default_factory=list)  # of idempotency keys, oldest first
    loads: list[CommittedLoad] = field(default_factory=list)  # oldest first
    time_reset_wal_id: int | None = None  # of the manifest: see `Footer.proven_time_ms`
    # Called for each load when the memtable holds everything older, and nothing newer.
    land_load: Callable[[CommittedLoad], None] = lambda _: None


async def _do_nothing() -> None:
    """Do nothing after an object."""


async def replay(
    store: CasStore,
    slots: range,
    *,
    database_id: bytes,
    replayed: Replayed,
    parallel_reads: int,
    keep_alive: KeepAlive = _do_nothing,
) -> None:
    """Apply the WAL objects in `slots`, in order, to `replayed`.

    REQUIRES and raises as `apply_in_order` and `apply_object`.
    """
    await apply_in_order(
        store,
        slots,
        database_id=database_id,
        memtable=replayed.memtable,
        apply=partial(apply_object, replayed=replayed),
        parallel_reads=parallel_reads,
        keep_alive=keep_alive,
    )


async def apply_in_order(
    store: CasStore,
    slots: range,
    *,
    database_id: bytes,
    memtable: Memtable,
    apply: Callable[[Sst], None],
    parallel_reads: int,
    is_full: Callable[[], bool] = lambda: False,
    keep_alive: KeepAlive = _do_nothing,
) -> None:
    """Call `apply` with the WAL objects in `slots`, in order, while the next ones are fetched.

    Stops early when `is_full` returns True: there is no space for another object. Runs of
    `memtable` are merged meanwhile, and `keep_alive` is awaited after each object, to renew what
    would expire. REQUIRES: all
    slots are filled, and a manifest that is read afterwards will show that none was collected.
    Raises what `apply` and `keep_alive` raise, `CorruptObject`, `ObjectNotFound` and
    `StoreUnavailable`.
    """
    failure: ShaleError | None = None
    async with asyncio.TaskGroup() as tasks:
        unread = iter(slots)
        reading = deque(
            tasks.create_task(read_slot(store, wal_id, database_id))
            for wal_id in islice(unread, parallel_reads)
        )
        while reading and failure is None and not is_full():
            found = await reading.popleft()
            for wal_id in islice(unread, 1):
                reading.append(tasks.create_task(read_slot(store, wal_id, database_id)))
            try:
                if isinstance(found, ShaleError):
                    raise found
                apply(found)
                await keep_alive()
            except ShaleError as error:
                failure = error
            await memtable.merge_runs(store.runtime.clock)
            await store.runtime.clock.sleep_ms(0)
        for task in reading:
            task.cancel()
    if failure is not None:  # raised here, since the group would wrap it
        raise failure


async def read_slot(store: CasStore, wal_id: int, database_id: bytes) -> Sst | ShaleError:
    """Return the object of a slot, or an error, to be raised when the object comes next."""
    name = names.wal_name(wal_id)
    try:
        stored = await store.get(name)
        return open_sst(name, stored.data, database_id=database_id)
    except ShaleError as error:
        return error


def _records(found: Sst) -> list[Entry]:
    """Return the idempotency records, oldest first: of a key that was reused, the newer counts.

    They are decoded to make sure that a later repetition can be answered. Raises `CorruptObject`.
    """
    records = sorted(found.system_entries(), key=attrgetter("seq"))
    for entry in records:
        if entry.kind is Kind.PUT:
            decode_idempotency_record(found.properties.name, entry.value)
    return records


def loads_of(found: Sst) -> Iterator[CommittedLoad]:
    """Yield the loads that the object commits, oldest first. Raises `CorruptObject`."""
    name = found.properties.name
    wal_id = names.parse_wal_name(name)
    for entry in sorted(found.control_entries(), key=attrgetter("seq")):
        load = decode_load(name, entry)
        if wal_id is not None:  # true for every object that is replayed
            yield CommittedLoad(load.load_id, load.ssts, entry.seq, wal_id)


def apply_object(found: Sst, replayed: Replayed) -> None:
    """Apply the next WAL object.

    Raises `CorruptObject`, and `IllegalState` if the order of slots is not that of sequence
    numbers.
    """
    contents = found.footer.contents
    name = found.properties.name
    if contents.entry_count and contents.min_seq <= replayed.last_seq:
        message = (
            f"{name} begins with sequence number {contents.min_seq}, but {replayed.last_seq} "
            "is in a slot before it: slot order must be sequence order"
        )
        raise IllegalState(message)
    # The entries of a key come newest first: the first one counts.
    newest: dict[bytes, Entry] = {}
    for entry in found.entries():
        newest.setdefault(entry.key, entry)
    tombstones = list(found.range_tombstones())
    run = MemoryRun.from_newest(newest, max_seq=contents.max_seq, range_tombstones=tombstones)
    replayed.memtable.land(run, first_seq=contents.min_seq)
    replayed.memtable.extend_prefix(run)
    for load in loads_of(found):
        replayed.loads.append(load)
        replayed.land_load(load)
    replayed.records += _records(found)
    replayed.last_seq = max(replayed.last_seq, contents.max_seq)
    reported_ms = found.footer.proven_time_ms(replayed.time_reset_wal_id)
    replayed.logical_time_ms = max(replayed.logical_time_ms, reported_ms)
    replayed.objects += 1
