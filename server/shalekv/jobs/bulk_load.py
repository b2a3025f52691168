"""Bulk loads: check rows, write them as SSTs under a lease, and commit the SSTs as one load.

A `LoadJob` is one attempt at a load. Its lease is made by an edit of the manifest, and the ids of
all SSTs derive from it, so no SST is collected before the load is committed, whichever process
wrote it. An SST that is written twice, too late, or for a load that fails is referenced by no
commit: it is an orphan, which the collector deletes when the lease is gone.

`commit_by_opening` commits a load where no writer serves: it opens the database as its writer.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_right
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, compress, islice
from operator import add, lt
from random import Random
from typing import Protocol, TypeVar

import structlog

from shalekv.concurrency import in_parallel
from shalekv.errors import (
    IllegalState,
    InvalidRequest,
    ManifestConflict,
    ObjectNotFound,
    ShaleError,
    StoreError,
)
from shalekv.format.block_frame import Codec
from shalekv.format.coding import MAX_U64
from shalekv.format.columns import Columns, Section
from shalekv.format.contents import UNNUMBERED
from shalekv.format.footer import SstProperties
from shalekv.format.names import level_name
from shalekv.format.sst_writer import SstWriter
from shalekv.jobs.compact.claim import CompactorLeases, HeldLease
from shalekv.protocol.entry import KEY_BYTES_MAX, NO_EXPIRY, Kind
from shalekv.protocol.lease import has_lease, leased_sst_id, without_lease
from shalekv.protocol.loads import CommittedLoad, check_load_id, files_problem, find_load
from shalekv.protocol.manifest import L0, Manifest, RecentLoad
from shalekv.protocol.sst_table import SstInfo
from shalekv.read.replay import loads_of, read_slot
from shalekv.settings import LevelSettings, LimitSettings, WriterSettings
from shalekv.store.cas import CasStore, Taken
from shalekv.store.manifests import StoredManifest, edit_deadline
from shalekv.write.engine import WriterEngine
from shalekv.write.ingest import Loaded
from shalekv.write.opening import open_log
from shalekv.write.quorum.links import Links
from shalekv.write.wal import list_wal

LEASE_TTL_S = 600  # by default, how long the SSTs of a dead job are kept
OBJECTS_AT_ONCE = 4  # WAL objects that are in memory at once, each as a whole
UPLOADS_AT_ONCE = 2  # finished SSTs in memory, in addition to the one that is being written
ROWS_AT_ONCE = 512  # few enough to be still in the processor's cache for the second pass
STOP_GRACE_MS = 10_000.0  # for the record of the load, when the writer ends for another reason
SHOWN_BYTES = 40  # of a key in an error message
_KINDS = bytes((Kind.PUT, Kind.TOMBSTONE))
_IS_TOMBSTONE = bytes(number == Kind.TOMBSTONE for number in range(256))
_NO_NONCE = bytes(16)
_LEASED_RANDOM_BYTES = 8
_WRITE_ID_BYTES = 16

T = TypeVar("T")
log = structlog.get_logger()


async def committed_seq(store: CasStore, stored: StoredManifest, load_id: str) -> int | None:
    """Find the sequence number of a load, or of a later batch of its stream; None: not committed.

    The batches of a stream are loads with ids ``<stream>-<number>``, committed in this order
    (`protocol.loads`). A load is registered in the manifest as pending before its record is written
    to the log, and stays pending until the record is compacted. So the log is read only if the
    load, or a later one of its stream, is pending. A pending load is not always committed: its
    writer may have died before it wrote the record. Raises as `StoredManifest.refresh` and
    `read_slot`.
    """
    while True:
        manifest = await stored.refresh()
        seq = find_load(manifest.recent_loads, load_id)
        if seq is not None or not _may_be_recorded(manifest, load_id):
            return seq
        missing: ObjectNotFound | None = None
        try:
            seq = find_load(await _recorded(store, manifest), load_id)
        except ObjectNotFound as error:
            missing = error
        if seq is not None:
            return seq
        # Not finding it counts only if nothing of this part of the log was compacted meanwhile.
        now = await stored.refresh()
        if now.wal_id_last_compacted == manifest.wal_id_last_compacted:
            if missing is not None:
                raise missing
            return None


def _may_be_recorded(manifest: Manifest, load_id: str) -> bool:
    pending = [RecentLoad(load.load_id, 0) for load in manifest.pending_loads]
    return find_load(pending, load_id) is not None


async def _recorded(store: CasStore, manifest: Manifest) -> Sequence[CommittedLoad]:
    """Read the loads whose records are in the log and not compacted, in any order."""
    first = manifest.first_uncompacted_wal_id
    folder = await list_wal(store, first)
    unread = [*range(first, folder.first_gap)]
    found: list[CommittedLoad] = []

    async def work() -> None:
        while unread:
            sst = await read_slot(store, unread.pop(), manifest.database_id)
            if isinstance(sst, ShaleError):
                raise sst
            if sst.footer.contents.may_commit_load:
                found.extend(loads_of(sst))

    await in_parallel(work, min(len(unread), OBJECTS_AT_ONCE))
    return found


class RowLimits(Protocol):
    """The largest sizes of keys and values, in bytes."""

    @property
    def key_bytes_max(self) -> int: ...

    @property
    def value_bytes_max(self) -> int: ...


def check_rows(rows: Columns, limits: RowLimits, first_row: int, last_key: bytes) -> None:
    """Check the next rows of a load. Raises `InvalidRequest`, which names the row and its key.

    `first_row` is the number of the first of them in the load; `last_key` is the key of the row
    before, empty if there is none. REQUIRES: there is a row. Takes about 150 ns for each row.
    """
    found = (
        _bad_order(rows, last_key)
        or _bad_key(rows, limits.key_bytes_max)
        or _bad_value(rows, limits.value_bytes_max)
        or _bad_kind(rows)
    )
    if found is not None:
        at, field, problem = found
        raise InvalidRequest(f"rows[{first_row + at}].{field}", problem)


def shown_key(key: bytes) -> str:
    """Format a key for an error message; a long key is truncated."""
    if len(key) <= SHOWN_BYTES:
        return repr(key)
    return f"{key[:SHOWN_BYTES]!r}... ({len(key):,} bytes)"


def _bad_order(rows: Columns, last_key: bytes) -> tuple[int, str, str] | None:
    keys = rows.keys
    if keys[0] > last_key and all(map(lt, keys, islice(keys, 1, None))):
        return None
    before = last_key
    for at, key in enumerate(keys):
        if key < before:
            problem = f"rows are not sorted: key {shown_key(key)} comes after {shown_key(before)}"
            return at, "key", problem
        if key == before and key:
            problem = f"key {shown_key(key)} occurs twice: a load has one row for each key"
            return at, "key", problem
        before = key
    return None


def _bad_key(rows: Columns, bytes_max: int) -> tuple[int, str, str] | None:
    lengths = [*map(len, rows.keys)]
    if not min(lengths):
        return lengths.index(0), "key", "a key must not be empty"
    longest = max(lengths)
    if longest <= bytes_max:
        return None
    at = lengths.index(longest)
    problem = f"key {shown_key(rows.keys[at])}: {longest:,} bytes, and a key has {bytes_max:,} at "
    return at, "key", f"{problem}most"


def _bad_value(rows: Columns, bytes_max: int) -> tuple[int, str, str] | None:
    lengths = [*map(len, rows.values)]
    longest = max(lengths)
    if longest <= bytes_max:
        return None
    at = lengths.index(longest)
    problem = f"value of key {shown_key(rows.keys[at])}: {longest:,} bytes, and a value has "
    return at, "value", f"{problem}{bytes_max:,} at most"


def _bad_kind(rows: Columns) -> tuple[int, str, str] | None:
    if rows.kinds.translate(None, _KINDS):
        at = next(at for at, kind in enumerate(rows.kinds) if kind not in _KINDS)
        problem = f"key {shown_key(rows.keys[at])}: a load holds puts and deletes, nothing else"
        return at, "kind", problem
    if any(rows.seqs):
        at = next(at for at, seq in enumerate(rows.seqs) if seq != UNNUMBERED)
        problem = f"key {shown_key(rows.keys[at])}: its commit will give it one: leave it 0"
        return at, "seq", problem
    earliest_ms, latest_ms = min(rows.expire_at_ms), max(rows.expire_at_ms)
    if earliest_ms < NO_EXPIRY or latest_ms > MAX_U64:
        wrong_ms = earliest_ms if earliest_ms < NO_EXPIRY else latest_ms
        at = [*rows.expire_at_ms].index(wrong_ms)
        problem = f"key {shown_key(rows.keys[at])}: {wrong_ms} is no time"
        return at, "expire_at_ms", problem
    if rows.kinds.count(Kind.PUT) == len(rows.kinds):
        return None
    tombstones = rows.kinds.translate(_IS_TOMBSTONE)
    if any(compress(rows.values, tombstones)) or any(compress(rows.expire_at_ms, tombstones)):
        at = next(
            at
            for at, is_delete in enumerate(tombstones)
            if is_delete and (rows.values[at] or rows.expire_at_ms[at])
        )
        problem = f"key {shown_key(rows.keys[at])}: a delete has no value, and does not expire"
        return at, "value", problem
    return None


@dataclass(frozen=True, slots=True)
class LoadTicket:
    """The parameters of the SSTs of a load, for all processes that write some of them."""

    database_id: bytes
    load_id: str
    lease_id: bytes
    logical_time_ms: int  # of the files, by the store's clock: a TTL counts from here
    levels: LevelSettings
    key_bytes_max: int
    value_bytes_max: int


class LoadJob:
    """One attempt at a load, from its lease to its commit. Use `LoadJob.begin`.

    If the load was committed before (`committed_seq`), there is nothing to do. Otherwise files are
    written with the `ticket` and committed, all inside `guard`; then the job is ended.
    """

    def __init__(
        self,
        store: CasStore,
        stored: StoredManifest,
        *,
        ticket: LoadTicket,
        leases: CompactorLeases,
        held: HeldLease | None,
        committed: int | None,
    ) -> None:
        """Use `begin`."""
        self.ticket = ticket
        self.committed_seq = committed  # the sequence number, if it was committed before
        self._store = store
        self._stored = stored
        self._leases = leases
        self._held = held

    @classmethod
    async def begin(
        cls,
        store: CasStore,
        load_id: str,
        *,
        levels: LevelSettings,
        limits: LimitSettings,
        ttl_s: int = LEASE_TTL_S,
    ) -> LoadJob:
        """Check whether the load was committed; if not, make a lease that lives `ttl_s` seconds.

        Raises `InvalidRequest` for an invalid id, `DatabaseNotFound`,
        `DatabaseMismatch`, `ManifestConflict`, `CorruptObject`, `StoreError`.
        """
        check_load_id(load_id)
        stored = StoredManifest(store)
        stored.check_cas_mode(await stored.refresh())
        committed = await committed_seq(store, stored, load_id)
        now_ms = await store.now_ms()
        leases = CompactorLeases(store, ttl_s=ttl_s, holder=f"load {load_id}")
        held = None
        if committed is None:  # last, so that no later failure leaves the lease behind
            async with edit_deadline(store):
                held = await leases.take(stored)
        current = stored.current
        ticket = LoadTicket(
            database_id=current.database_id,
            load_id=load_id,
            lease_id=held.lease.id if held else b"",
            logical_time_ms=max(current.logical_time_ms, now_ms),
            levels=levels,
            key_bytes_max=KEY_BYTES_MAX,
            value_bytes_max=limits.value_bytes_max,
        )
        return cls(store, stored, ticket=ticket, leases=leases, held=held, committed=committed)

    async def guard(self, work: Callable[[], Awaitable[T]]) -> T:
        """Await ``work()`` and return its result; renew the lease meanwhile.

        Each renewal begins before half of the lease's life is over. Raises what `work` raises, and
        `LeaseLost` when `work` was cancelled since what it wrote may be deleted by now.
        """
        if self._held is None:
            return await work()
        return await self._leases.guard(self._stored, self._held, work)

    async def end(self) -> None:
        """Give up the lease: from now on, files that no commit references may be collected.

        REQUIRES: the load is committed, or nothing tries to commit it any more. Errors of the store
        are logged; the lease expires by itself then.
        """
        held, self._held = self._held, None
        if held is None:
            return
        self._leases.drop(held)
        lease_id = held.lease.id

        def edit(manifest: Manifest) -> Manifest:
            return without_lease(manifest, lease_id)

        def is_gone(manifest: Manifest) -> bool:
            return not has_lease(manifest, lease_id)

        try:
            if has_lease(await self._stored.refresh(), lease_id):
                async with edit_deadline(self._store):
                    await self._stored.edit(edit, is_gone)
        except (StoreError, ManifestConflict) as error:
            log.warning("the lease of a load is left to expire", error=str(error))


class LoadFiles:
    """The SSTs for one sorted run of rows: a load, or one part of it.

    In memory are the file that is being written, `UPLOADS_AT_ONCE` files that are being uploaded,
    and the rows added last. After an error nothing can be added.
    """

    def __init__(self, store: CasStore, ticket: LoadTicket) -> None:
        """Send nothing to the store before the first file is full, or `finish` is called."""
        self._store = store
        self._ticket = ticket
        self._open: SstWriter | None = None
        self._last_key = b""  # of all rows so far
        self._uploads: list[asyncio.Task[SstInfo]] = []  # in the order of the keys
        self._infos: list[SstInfo] = []
        self.row_count = 0
        self.size_bytes = 0  # of the files that are finished

    async def add(self, rows: Columns) -> None:
        """Add the next rows: puts, with or without an expiry, and tombstones.

        Keys ascend across all calls; sequence numbers are 0. Raises `InvalidRequest` for rows that
        violate this or the limits of the ticket, and `StoreError` if an upload has failed.
        """
        if not rows.keys:
            return
        try:
            await self._add(rows)
        except BaseException:
            await self._cancel()
            raise

    async def finish(self) -> list[SstInfo]:
        """Upload the rest; return the entries of all files, in the order of their keys.

        Raises as `add`.
        """
        try:
            if self._open is not None:
                await self._close(self._open)
            await self._collect(0)
        except BaseException:
            await self._cancel()
            raise
        return self._infos

    async def _add(self, rows: Columns) -> None:
        run = self._store.runtime.workers.run
        await run(check_rows, rows, self._ticket, self.row_count, self._last_key)
        ends = [*accumulate(map(add, map(len, rows.keys), map(len, rows.values)), initial=0)]
        at = 0
        while at < len(rows.keys):
            if self._open is None:
                self._open = begin_file(self._ticket, self._store.runtime.random)
            at = await run(_fill, self._open, rows, ends, at, self._ticket.levels.sst_bytes)
            if self._open.size_bytes >= self._ticket.levels.sst_bytes:
                await self._close(self._open)
        self._last_key = rows.keys[-1]
        self.row_count += len(rows.keys)

    async def _close(self, writer: SstWriter) -> None:
        self._open = None
        await self._collect(UPLOADS_AT_ONCE - 1)
        self._uploads.append(asyncio.create_task(self._upload(writer)))

    async def _upload(self, writer: SstWriter) -> SstInfo:
        info = await create_file(self._store, writer)
        self.size_bytes += info.size_bytes
        return info

    async def _collect(self, left: int) -> None:
        """Wait until at most `left` uploads are running."""
        while len(self._uploads) > left:
            self._infos.append(await self._uploads[0])
            del self._uploads[0]

    async def _cancel(self) -> None:
        uploads, self._uploads = self._uploads, []
        for upload in uploads:
            upload.cancel()
        await asyncio.gather(*uploads, return_exceptions=True)


def begin_file(ticket: LoadTicket, random: Random) -> SstWriter:
    """Begin an empty file of the load, under an id that the lease protects."""
    sst_id = leased_sst_id(ticket.lease_id, random.randbytes(_LEASED_RANDOM_BYTES))
    properties = SstProperties(
        name=level_name(sst_id),
        database_id=ticket.database_id,
        writer_epoch=0,  # no writer has opened the database for it
        writer_nonce=_NO_NONCE,
        write_id=random.randbytes(_WRITE_ID_BYTES),
        logical_time_ms=ticket.logical_time_ms,
    )
    return SstWriter(
        properties,
        block_bytes=ticket.levels.block_bytes,
        codec=Codec[ticket.levels.codec.name],
        filter_bits_per_key=ticket.levels.filter_bits or None,
    )


async def create_file(store: CasStore, writer: SstWriter) -> SstInfo:
    """Upload a finished file; return its entry in the list of a load. Raises `StoreError`."""
    data, footer = await store.runtime.workers.run(writer.finish)
    name = footer.properties.name
    if isinstance(await store.claim(name, data), Taken):
        message = f"{name} exists with other bytes, although its id was drawn at random"
        raise IllegalState(message)
    return replace(footer.info(L0), first_expiry_ms=writer.first_expiry_ms)


def _fill(writer: SstWriter, rows: Columns, ends: list[int], at: int, sst_bytes: int) -> int:
    """Add rows from `at` on until the SST is full or no row is left; return the next row.

    `ends` are the bytes of keys and values before each row, and finally of all rows.
    """
    count = len(rows.keys)
    while at < count and writer.size_bytes < sst_bytes:
        free_bytes = sst_bytes - writer.size_bytes
        stop = max(bisect_right(ends, ends[at] + free_bytes) - 1, at + 1)
        stop = min(stop, at + ROWS_AT_ONCE)
        writer.add(Section.POINTS, rows.rows(at, stop))
        at = stop
    return at


async def commit_by_opening(
    store: CasStore,
    load_id: str,
    infos: Sequence[SstInfo],
    settings: WriterSettings | None = None,
    *,
    links: Links | None = None,
) -> Loaded:
    """Commit these files as a load: open the database as its writer, and close it again.

    This fences a writer that serves the database, which ends. So it is meant for a database without
    a writer, or for an explicit request. A load that was committed before is left as it is, and no
    writer is fenced; `Loaded.already_applied` says so. After a crash or an error, call this again
    with the same `load_id`.

    Raises `InvalidRequest` for files that are missing or not as they are listed, `LeaseLost`,
    `LoadUnknown`, and what `open_log` raises: without `links` `DatabaseMismatch` for a database
    that has its WAL in safekeepers.
    """
    check_files_listed(load_id, infos)
    stored = StoredManifest(store)
    seq = await committed_seq(store, stored, load_id)
    if seq is not None:
        return Loaded(seq, None)
    writer = settings or WriterSettings()
    if writer.flush_interval_ms is None:  # only one object is written, so no interval is needed
        writer = writer.model_copy(update={"flush_interval_ms": 0})
    opened = await open_log(store, writer, address="", links=links)
    engine = WriterEngine(opened, writer, store.runtime.clock)
    try:
        return await _ingest(engine, load_id, infos)
    finally:
        await engine.release()


async def _ingest(engine: WriterEngine, load_id: str, infos: Sequence[SstInfo]) -> Loaded:
    """Run the engine, commit the load, and end the engine."""
    failed: list[ShaleError] = []
    outcome: list[Loaded] = []
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(_run(engine))
        try:
            outcome.append(await engine.loads.ingest(load_id, infos))
        except ShaleError as error:  # raised below, because the group would wrap it
            failed.append(error)
        finally:
            engine.close()
    if failed:
        raise failed[0]
    return outcome[0]


async def _run(engine: WriterEngine) -> None:
    try:
        await engine.run(stop_grace_ms=STOP_GRACE_MS)
    except ShaleError as error:  # the load fails with the same error, or is committed already
        log.debug("the writer of a load has ended", error=str(error))


def check_files_listed(load_id: str, infos: Sequence[SstInfo]) -> None:
    """Raise `InvalidRequest` unless these entries can be the files of a load."""
    check_load_id(load_id)
    if not infos:
        raise InvalidRequest("ssts", "at least one is needed")
    problem = files_problem(infos)
    if problem is not None:
        raise InvalidRequest(f"ssts[{problem[0]}]", problem[1])
