"""Loads: SSTs that enter the log with one record, either ready-made files or a large batch.

A load is a set of client files, or a batch too large for the memtable that this writer encodes as
SSTs before its sequence number is known.

Safety rests on the order of steps. The load is registered in the manifest, which protects its files
from then on. The files are durable. Then the record is submitted, and the WAL object of the record
is the commit. A crash before that leaves a pending load without a record, which the next writer
drops, and files that the collector removes. A crash after it leaves the whole load. The edit that
registers a load also makes a snapshot of a manifest that names its files, so that reads of them are
safe when the load is compacted and merged away.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_right
from collections.abc import Awaitable, Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import accumulate
from operator import itemgetter

import structlog

from shalekv.concurrency import fail, in_parallel
from shalekv.errors import (
    CorruptObject,
    IllegalState,
    InvalidRequest,
    ObjectNotFound,
    ShaleError,
    StoreError,
)
from shalekv.format.block_frame import Codec
from shalekv.format.columns import Columns, Section
from shalekv.format.contents import UNNUMBERED
from shalekv.format.footer import SstProperties
from shalekv.format.names import level_name
from shalekv.format.sst import SstAudit, SstMetadata, metadata_range, read_metadata
from shalekv.format.sst_writer import FinishedSst, SstWriter
from shalekv.protocol.entry import NO_EXPIRY
from shalekv.protocol.fencing import WriterId
from shalekv.protocol.lease import RANDOM_BYTES, leased_sst_id, new_lease_id
from shalekv.protocol.loads import (
    OWN_PREFIX,
    CommittedLoad,
    drop_pending,
    find_load,
    is_pending,
    register_load,
)
from shalekv.protocol.manifest import L0, Manifest, PendingLoad
from shalekv.protocol.snapshot import create_snapshot, has_snapshot
from shalekv.protocol.sst_table import SstInfo, SstTable
from shalekv.protocol.transaction import Change, Puts
from shalekv.read.version import LoadPin
from shalekv.settings import LevelSettings
from shalekv.store.cas import CasStore, Taken
from shalekv.store.manifests import WriterManifest
from shalekv.write.admission import Admission
from shalekv.write.commit import (
    COMMIT_OVERHEAD_BYTES,
    RECORD_BYTES,
    Commit,
    KeyedRequest,
    OnSettled,
    Receipt,
)
from shalekv.write.group_commit import GroupCommit
from shalekv.write.logical_time import LogicalTime

log = structlog.get_logger()

FILES_AT_ONCE = 16  # files checked in parallel
PIECE_BYTES = 4 << 20  # of blocks of a file that are checked at once
ROWS_AT_ONCE = 512  # rows given to an SST writer at once
WRITE_ID_BYTES = 16
SST_RANDOM_BYTES = 8
_KEY = itemgetter(0)  # of a Change
ID_BYTES = 16
FILE_BYTES = 1_000  # accounted memory of a file until its load is committed, beside its keys


async def check_files(
    store: CasStore, infos: Sequence[SstInfo], *, database_id: bytes, reads_blocks: bool = False
) -> int:
    """Check the files of a load against its list. Returns the time of the oldest file.

    That is when it was written by the store's clock, in milliseconds. Reads footer and index of
    each file; the checksum in the footer covers the rest. But a forged footer may tell other keys
    than the blocks have: with `reads_blocks`, they are read and compared. Raises `InvalidRequest`
    for a file that is missing, is not as listed, or holds other entries than puts and tombstones
    without a sequence number; and `StoreUnavailable`.
    """
    unchecked = [*enumerate(infos)]
    modified_ms: list[int] = []

    async def work() -> None:
        while unchecked:
            at, info = unchecked.pop()
            modified_ms.append(
                await _check(store, at, info, database_id, reads_blocks=reads_blocks)
            )

    await in_parallel(work, min(len(unchecked), FILES_AT_ONCE))
    return min(modified_ms)


async def _check(
    store: CasStore, at: int, info: SstInfo, database_id: bytes, *, reads_blocks: bool
) -> int:
    name = level_name(info.id)
    try:
        found = await store.head(name)
        start, length = metadata_range(info, with_filter=False)
        data = await store.get_range(name, start, length)
        metadata = read_metadata(info, data, database_id=database_id, with_filter=False)
    except (ObjectNotFound, CorruptObject) as error:
        raise InvalidRequest(f"ssts[{at}]", str(error)) from error
    contents = metadata.footer.contents
    if not contents.lacks_seqs or contents.entry_count != (
        contents.put_count + contents.tombstone_count
    ):
        problem = "holds more than puts and tombstones with the sequence number 0"
        raise InvalidRequest(f"ssts[{at}]", f"{name} {problem}")
    # The footer does not contain the first expiry; only the writer of the file knows it.
    listed = replace(info, first_expiry_ms=NO_EXPIRY)
    if found.size_bytes != info.size_bytes or metadata.footer.info(info.level) != listed:
        raise InvalidRequest(f"ssts[{at}]", f"{name} is not what it is listed as")
    if reads_blocks:
        await _check_blocks(store, at, info, metadata)
    return found.modified_ms


async def _check_blocks(store: CasStore, at: int, info: SstInfo, metadata: SstMetadata) -> None:
    """Raise `InvalidRequest` unless the file has exactly what its footer tells."""
    audit = SstAudit(metadata.footer, metadata.index, None)
    problems: list[CorruptObject] = []
    for numbers, (offset, length) in metadata.index.pieces(PIECE_BYTES):
        data = await store.get_range(level_name(info.id), offset, length)
        problems += await store.runtime.workers.run(audit.check_blocks, numbers, data)
        if problems:
            raise InvalidRequest(f"ssts[{at}]", str(problems[0]))
    problem = audit.check_contents()
    if problem is not None:
        raise InvalidRequest(f"ssts[{at}]", str(problem))


@dataclass(frozen=True, slots=True)
class FileOwner:
    """Properties that the files of one load share: database, writer, start of the ids, time."""

    database_id: bytes
    own: WriterId
    stem_id: bytes  # has the form of a lease id; the ids of the files derive from it
    logical_time_ms: int


def encode_batch(
    changes: Puts | Sequence[Change],
    owner: FileOwner,
    settings: LevelSettings,
    random_bytes: Callable[[int], bytes],
) -> list[FinishedSst]:
    """Encode these changes as SSTs, in key order; an SST is closed when it has `sst_bytes`.

    Takes about 3 us for a change: call it off the event loop. REQUIRES: there is a change, and no
    key occurs twice.
    """
    ordered = sorted(changes, key=_KEY)
    ends = [*accumulate((len(each.key) + len(each.value) for each in ordered), initial=0)]
    finished: list[FinishedSst] = []
    begin = 0
    while begin < len(ordered):
        writer = _begin(owner, settings, random_bytes)
        while begin < len(ordered) and writer.size_bytes < settings.sst_bytes:
            left_bytes = settings.sst_bytes - writer.size_bytes
            stop = max(bisect_right(ends, ends[begin] + left_bytes) - 1, begin + 1)
            stop = min(stop, begin + ROWS_AT_ONCE)
            keys, kinds, values, expire_at_ms = zip(*ordered[begin:stop], strict=True)
            seqs = [UNNUMBERED] * len(keys)
            writer.add(Section.POINTS, Columns(keys, seqs, bytes(kinds), values, expire_at_ms))
            begin = stop
        finished.append(writer.finish())
    return finished


def _begin(
    owner: FileOwner, settings: LevelSettings, random_bytes: Callable[[int], bytes]
) -> SstWriter:
    sst_id = leased_sst_id(owner.stem_id, random_bytes(SST_RANDOM_BYTES))
    properties = SstProperties(
        name=level_name(sst_id),
        database_id=owner.database_id,
        writer_epoch=owner.own.epoch,
        writer_nonce=owner.own.nonce,
        write_id=random_bytes(WRITE_ID_BYTES),
        logical_time_ms=owner.logical_time_ms,
    )
    return SstWriter(
        properties,
        block_bytes=settings.block_bytes,
        codec=Codec[settings.codec.name],
        filter_bits_per_key=settings.filter_bits or None,
    )


@dataclass(frozen=True, slots=True)
class Loaded:
    """The result of a load that is committed; without a WAL id it was committed before the call."""

    seq: int
    wal_id: int | None

    @property
    def already_applied(self) -> bool:
        """Return whether another call, or another writer, has committed the load."""
        return self.wal_id is None


class LoadRegistry:
    """The loads that are registered in the manifest, and are not committed yet.

    A load that will never be submitted is removed from the manifest again.
    """

    def __init__(
        self,
        store: CasStore,
        manifest: WriterManifest,
        *,
        time: LogicalTime,
        snapshot_ttl_s: int,
        keep: Callable[[LoadPin], None],
    ) -> None:
        """`keep` is given each pin, and renews its snapshot while the pin exists."""
        self.manifest = manifest
        self._store = store
        self._time = time
        self._snapshot_ttl_s = snapshot_ttl_s
        self._keep = keep
        self._pins: dict[str, LoadPin] = {}  # of loads that are registered and have not landed
        self._abandoned: set[str] = set()  # registered, and will never be submitted
        self._abandoned_some = asyncio.Event()
        self._editing = asyncio.Lock()

    async def register(self, load: PendingLoad, *, oldest_ms: int) -> None:
        """Make the load pending, and a snapshot of a manifest that names its files."""
        pin = LoadPin(self._store.runtime.random.randbytes(ID_BYTES))
        expire_time_s = self._time.store_now_ms // 1_000 + self._snapshot_ttl_s

        def edit(manifest: Manifest) -> Manifest:
            edited = register_load(manifest, load, oldest_ms=oldest_ms)
            return create_snapshot(edited, pin.snapshot_id, expire_time_s=expire_time_s)

        def landed(manifest: Manifest) -> bool:
            is_pending = load in manifest.pending_loads
            return is_pending and has_snapshot(manifest, pin.snapshot_id)

        async with self._editing:
            with self.abandoned_unless_done(load.load_id):
                await self.manifest.edit(edit, landed)
        self._keep(pin)
        self._pins[load.load_id] = pin

    def land(self, load_id: str) -> LoadPin | None:
        """Record that a load is durable. Returns its pin, if it was registered here."""
        return self._pins.pop(load_id, None)

    @contextmanager
    def abandoned_unless_done(self, load_id: str) -> Iterator[None]:
        """Mark the load for removal by `drop_abandoned` if the body fails or is cancelled."""
        try:
            yield
        except BaseException:
            self._pins.pop(load_id, None)
            self._abandoned.add(load_id)
            self._abandoned_some.set()
            raise
        self._abandoned.discard(load_id)

    async def drop_abandoned(self) -> ShaleError:
        """Remove loads from the manifest that will never be submitted, until cancelled.

        Errors of the store are logged; the next round, or the next writer, removes them. Returns
        the error that ends the writer.
        """
        while True:
            await self._abandoned_some.wait()
            self._abandoned_some.clear()
            try:
                async with self._editing:
                    if self._abandoned:
                        await self._drop(frozenset(self._abandoned))
            except StoreError as error:
                log.warning("abandoned loads stay pending", error=str(error))
            except ShaleError as error:
                return error

    async def _drop(self, load_ids: Collection[str]) -> None:
        await self.manifest.edit(
            lambda manifest: drop_pending(manifest, load_ids),
            lambda manifest: not any(is_pending(manifest, each) for each in load_ids),
        )
        self._abandoned -= {*load_ids}


class Loads:
    """The loads of one writer."""

    def __init__(
        self,
        store: CasStore,
        registry: LoadRegistry,
        log: GroupCommit,
        admission: Admission,
        settings: LevelSettings,
        *,
        time: LogicalTime,
        wait_for_budget: Callable[[], Awaitable[None]],
    ) -> None:
        """`wait_for_budget` returns when few enough loads are uncompacted, or raises
        `MemtableFull`.

        REQUIRES: `land` is called for each load that was replayed, too.
        """
        self._store = store
        self._registry = registry
        self._log = log
        self._admission = admission
        self._settings = settings
        self._time = time
        self._wait_for_budget = wait_for_budget
        self._committed: dict[str, CommittedLoad] = {}  # those that are not compacted
        self._in_flight: dict[str, asyncio.Event] = {}  # set when the load is settled
        self._encoding = asyncio.Lock()  # one batch at a time, since it is in memory twice

    def land(self, load: CommittedLoad) -> LoadPin | None:
        """Record that a load is durable. Returns the pin, which readers of its files must hold."""
        if not load.load_id.startswith(OWN_PREFIX):  # no client asks for those
            self._committed[load.load_id] = load
        return self._registry.land(load.load_id)

    async def write_batch(
        self,
        changes: Puts | Sequence[Change],
        settle: OnSettled,
        *,
        size_bytes: int,
        keyed: KeyedRequest | None = None,
    ) -> Commit:
        """Write a batch to SSTs, and submit the record that commits it.

        REQUIRES: no key occurs twice, and `size_bytes` (with `keyed`, its record's too) were
        admitted; this method or the log releases them. If it raises, nothing was or will be
        applied. Raises `StoreError`, and the error that stopped the log.
        """
        record_bytes = 0 if keyed is None else RECORD_BYTES
        try:
            async with self._encoding:
                await self._wait_for_budget()
                load, files = await self._encode(changes)
                await self._registry.register(load, oldest_ms=await self._store.now_ms())
                with self._registry.abandoned_unless_done(load.load_id):
                    while files:
                        await self._upload(files.pop())
        except BaseException:
            self._admission.release(size_bytes + record_bytes)
            raise
        with self._registry.abandoned_unless_done(load.load_id):
            return self._log.submit(
                Commit.of_load(load, self._log.next_seq, settle, size_bytes=size_bytes, keyed=keyed)
            )

    async def ingest(
        self, load_id: str, infos: Sequence[SstInfo], *, reads_blocks: bool = False
    ) -> Loaded:
        """Commit ready-made files, unless the load was committed before.

        `reads_blocks` is that of `check_files`.

        REQUIRES: they are listed without level and sequence numbers, and `files_problem` finds
        none. Raises `InvalidRequest` for a file that is not as listed, `LeaseLost`, `LoadUnknown`,
        `StoreError`, `Overloaded`, and the error that stopped the log.
        """
        while (seq := self._find(load_id)) is None:
            same = self._in_flight.get(load_id)
            if same is None:
                return await self._ingest_once(load_id, infos, reads_blocks=reads_blocks)
            await same.wait()
        return Loaded(seq, None)

    async def drop_abandoned(self) -> None:
        """Remove loads from the manifest that will never be submitted, until cancelled."""
        self._log.stop(await self._registry.drop_abandoned())

    def _find(self, load_id: str) -> int | None:
        """The sequence number of the load if it was committed, else None (see `find_load`)."""
        manifest = self._registry.manifest.current
        compacted = manifest.wal_id_last_compacted
        if compacted is not None:  # the manifest lists the compacted ones
            self._committed = {
                key: load for key, load in self._committed.items() if load.wal_id > compacted
            }
        return find_load([*self._committed.values(), *manifest.recent_loads], load_id)

    async def _ingest_once(
        self, load_id: str, infos: Sequence[SstInfo], *, reads_blocks: bool
    ) -> Loaded:
        settled = self._in_flight[load_id] = asyncio.Event()
        future: asyncio.Future[Receipt] = asyncio.get_running_loop().create_future()

        def finish() -> None:
            del self._in_flight[load_id]
            settled.set()

        try:
            settle = self._settle(future, finish)
            await self._submit_files(load_id, infos, settle, reads_blocks=reads_blocks)
        except BaseException:
            finish()
            raise
        self._log.pending_replies.begin(future)
        try:
            receipt = await future
        finally:
            del future  # its error would keep this frame alive
        return Loaded(receipt.seq, receipt.wal_id)

    def _settle(self, future: asyncio.Future[Receipt], finish: Callable[[], None]) -> OnSettled:
        def settle(outcome: Receipt | ShaleError) -> None:
            finish()
            if not self._log.pending_replies.end(future):  # the caller has gone; the load remains
                return
            if isinstance(outcome, Receipt):
                future.set_result(outcome)
            else:
                fail(future, outcome)

        return settle

    async def _submit_files(
        self, load_id: str, infos: Sequence[SstInfo], settle: OnSettled, *, reads_blocks: bool
    ) -> None:
        self._log.check_available()
        keys_bytes = sum(len(info.first_key) + len(info.last_key) for info in infos)
        size_bytes = COMMIT_OVERHEAD_BYTES + keys_bytes + FILE_BYTES * len(infos)
        await self._wait_for_budget()
        await self._admission.wait(size_bytes)
        try:
            database_id = self._registry.manifest.current.database_id
            oldest_ms = await check_files(
                self._store, infos, database_id=database_id, reads_blocks=reads_blocks
            )
            load = PendingLoad(load_id, SstTable.from_infos(infos))
            await self._registry.register(load, oldest_ms=oldest_ms)
        except BaseException:
            self._admission.release(size_bytes)
            raise
        with self._registry.abandoned_unless_done(load_id):
            self._log.submit(
                Commit.of_load(load, self._log.next_seq, settle, size_bytes=size_bytes)
            )

    async def _encode(
        self, changes: Puts | Sequence[Change]
    ) -> tuple[PendingLoad, list[FinishedSst]]:
        random = self._store.runtime.random
        now_ms = await self._store.now_ms()
        owner = FileOwner(
            database_id=self._registry.manifest.current.database_id,
            own=self._registry.manifest.own,
            stem_id=new_lease_id(now_ms, random.randbytes(RANDOM_BYTES)),
            logical_time_ms=self._time.now_ms(),
        )
        run = self._store.runtime.workers.run
        files = await run(encode_batch, changes, owner, self._settings, random.randbytes)
        # The minimum over all files: none of their values expires before.
        first_expiry_ms = min(
            (c.expire_at_ms for c in changes if c.expire_at_ms), default=NO_EXPIRY
        )
        infos = [replace(file.footer.info(L0), first_expiry_ms=first_expiry_ms) for file in files]
        load_id = f"{OWN_PREFIX}batch:{random.randbytes(ID_BYTES).hex()}"
        return PendingLoad(load_id, SstTable.from_infos(infos)), files

    async def _upload(self, file: FinishedSst) -> None:
        name = file.footer.properties.name
        if isinstance(await self._store.claim(name, file.data), Taken):
            message = f"{name} exists with other bytes, although its id was drawn at random"
            raise IllegalState(message)
