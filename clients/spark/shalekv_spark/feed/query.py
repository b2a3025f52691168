"""One streaming query on the changes of a database, as its driver runs it, from offset to offset.

`FeedQuery` computes the offsets and parts of batches, `FeedLog` reads the log for it, and
`LogRetention` keeps the log.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

import structlog
from pyspark.sql.streaming.datasource import ReadLimit

from shalekv.concurrency import in_parallel
from shalekv.errors import (
    DatabaseMismatch,
    IllegalState,
    InvalidSetting,
    ManifestConflict,
    ObjectNotFound,
    ShaleError,
    SnapshotNotFound,
    StoreError,
    StoreRefused,
    Truncated,
    WalUnprotected,
)
from shalekv.format import names
from shalekv.format.footer import Footer, read_footer
from shalekv.protocol.manifest import Manifest
from shalekv.read.replay import loads_of, read_slot
from shalekv.store.cas import CasStore
from shalekv.store.manifests import StoredManifest
from shalekv.watch.consumers import ConsumerLeases
from shalekv.write.snapshots import Snapshots
from shalekv_spark.feed.options import NO_LIMIT, FeedOptions
from shalekv_spark.feed.slots import (
    FeedOffset,
    FeedSlot,
    FeedWalCollected,
    Part,
    admitted,
    parts_of,
)

log = structlog.get_logger()

PERIOD_S = 30  # between two updates of a lease: each edits the manifest
PIN_TTL_S = 600  # the lifetime of a snapshot after its driver was killed
_MS_PER_S = 1_000

FOOTER_BYTES = 4_096  # nearly all footers are smaller
PARALLEL_READS = 16  # requests of the driver at once
SLOTS_AT_ONCE = 256  # slots that are described at once, to find out their size


class LogRetention:
    """Keeps the log for one query: by the lease of its consumer, and a snapshot for large loads.

    The lease is advanced only behind what Spark has committed. It may stay behind that, and then
    keeps more than is needed. A lease keeps WAL objects, but not the files of a load that one of
    them commits: while a batch reads such files, a snapshot keeps them.
    """

    def __init__(
        self, store: CasStore, stored: StoredManifest, consumer: str, consumer_ttl_s: int
    ) -> None:
        """Create a retention that keeps nothing yet.

        Without a `consumer` there is no lease; `consumer_ttl_s` is its lifetime.
        """
        self._clock = store.runtime.clock
        self._consumer = consumer
        self._leases = ConsumerLeases(store, stored, consumer_ttl_s)
        self._snapshots = Snapshots(store, stored)
        self._period_ms = _MS_PER_S * min(PERIOD_S, consumer_ttl_s / 3, PIN_TTL_S / 3)
        self._wal_id = 0  # everything before was processed
        self._held_wal_id: int | None = None  # of the lease; None: there is none
        self._pin: str | None = None  # the id of the snapshot
        self._pin_end = 0  # the snapshot is for slots before this one

    async def position(self) -> int | None:
        """Return the WAL id at which the consumer continues; None: it has no lease."""
        lease = await self._leases.find(self._consumer) if self._consumer else None
        return None if lease is None else lease.wal_id_min

    async def begin(self, wal_id: int) -> None:
        """Keep the WAL from this object on, or as much of that as is still protected.

        Raises as `ConsumerLeases.hold`, except `WalUnprotected`.
        """
        self._wal_id = max(self._wal_id, wal_id)
        await self._hold()

    async def processed(self, end: int) -> None:
        """Note that everything before slot `end` was processed, and is not needed any more."""
        self._wal_id = max(self._wal_id, end)
        if self._pin is not None and end >= self._pin_end:
            await self._unpin()

    async def pin(self, end: int) -> None:
        """Keep the files of loads before slot `end` until that is processed.

        When this is called again for the same slots, the first snapshot stays: a later one may have
        fewer of the files. Without permission to write, the files are read as long as they exist.
        Raises as `Snapshots.create`.
        """
        if self._pin is not None and end <= self._pin_end:
            return
        try:
            snapshot = await self._snapshots.create(ttl_ms=PIN_TTL_S * _MS_PER_S)
        except (StoreRefused, DatabaseMismatch) as error:
            log.warning(
                "the files of a load are not protected while they are read", error=str(error)
            )
            return
        await self._unpin()
        self._pin, self._pin_end = snapshot.id.hex(), end

    async def run(self) -> None:
        """Renew and advance the lease, and renew the snapshot, until cancelled.

        Failures are logged and tried again.
        """
        renewed_ms = self._clock.monotonic_ms()
        while True:
            await self._clock.sleep_ms(self._period_ms)
            try:
                await self._hold()
                now_ms = self._clock.monotonic_ms()
                if self._pin is not None and now_ms - renewed_ms >= PIN_TTL_S * _MS_PER_S / 3:
                    await self._snapshots.renew(self._pin, ttl_ms=PIN_TTL_S * _MS_PER_S)
                    renewed_ms = now_ms
            except (ShaleError, OSError) as error:
                log.warning("the log of a stream could not be kept", error=str(error))

    async def end(self) -> None:
        """Advance the lease for the last time, and remove the snapshot, if that is possible."""
        with suppress(ShaleError, OSError):
            if self._held_wal_id is not None and self._wal_id > self._held_wal_id:
                await self._hold()
            await self._unpin()

    async def _hold(self) -> None:
        if not self._consumer:
            return
        wal_id = self._wal_id
        try:
            await self._leases.hold(self._consumer, wal_id)
        except WalUnprotected as error:
            # Earlier objects can be read as long as they exist; a read notices when one is gone.
            await self._leases.hold(self._consumer, error.first_wal_id)
        self._held_wal_id = wal_id

    async def _unpin(self) -> None:
        """Remove the snapshot, or let it expire: a query must not fail because of that."""
        if self._pin is not None:
            pin, self._pin = self._pin, None
            try:
                await self._snapshots.delete(pin)
            except SnapshotNotFound:
                return
            except (StoreError, ManifestConflict) as error:
                log.warning("a snapshot is left to expire", snapshot=pin, error=str(error))


class FeedLog:
    """The WAL of one database, as the driver of a stream sees it.

    Only the contiguous prefix of the log counts: an object behind a gap may never become part of
    the history. A slot that is missing although it was compacted was collected; that is an error,
    whatever is behind it. The manifest is always read after the list. So if the list does not have
    an object, and the manifest has not compacted it, the object did not exist yet.

    Every method may raise `CorruptObject` and `StoreError`.
    """

    def __init__(self, store: CasStore) -> None:
        """Create a log of which nothing is read."""
        self._store = store
        self.stored = StoredManifest(store)
        self._sizes: dict[int, int] = {}  # from the last list
        self._known: dict[int, FeedSlot] = {}  # slots that were described

    async def manifest(self) -> Manifest:
        """Read the newest manifest.

        Raises `DatabaseNotFound`, and `IllegalState` when it is older than the one known.
        """
        return await self.stored.refresh()

    async def check(self, offset: FeedOffset) -> int:
        """Check that the log is the one in which `offset` was found; return the writer's epoch.

        Raises `DatabaseMismatch` for another database, and `IllegalState` for an older state of the
        same one, as far as the object before the offset shows it. That object is kept as long as
        nothing behind it is compacted.
        """
        first = max(offset.wal_id - 1, 0)
        sizes = await self._list(first, 1)
        manifest = await self.manifest()
        if manifest.database_id != offset.database_id:
            raise DatabaseMismatch(
                f"the checkpoint is of database {offset.database_id.hex()}, and "
                f"{self._store.url} holds {manifest.database_id.hex()}: another one was put in its "
                "place. Begin a query with a new checkpoint"
            )
        if first in sizes:
            wanted = offset.last_write_id
            if wanted and await self._write_id(first, sizes[first]) not in (b"", wanted):
                raise self._older_state(offset, "the object before that is another one")
        elif offset.wal_id and first >= manifest.first_uncompacted_wal_id:
            raise self._older_state(offset, "its log ends before that")
        return manifest.writer_epoch

    async def filled(self, first: int, count_max: int) -> range:
        """Return the slots from `first` on that are filled, up to a gap; at most `count_max`.

        If `first` is one of the ids that the log leaves out, they begin behind those. Raises
        `FeedWalCollected`.
        """
        end = await self._end(first, count_max)
        for left_out in self.stored.current.wal_ids_left_out:
            if first in left_out:
                return range(left_out.stop, await self._end(left_out.stop, count_max))
        return range(first, end)

    async def _end(self, first: int, count_max: int) -> int:
        """Return the first slot from `first` on that is not filled."""
        sizes, end = await self._run(first, count_max)
        manifest = await self.manifest()
        goes_on_elsewhere = any(end in left_out for left_out in manifest.wal_ids_left_out)
        if not goes_on_elsewhere and self._may_be_gone(first, end, count_max):
            # It was filled and compacted after the list, or it is gone: list again to find out.
            sizes, end = await self._run(first, count_max)
            if self._may_be_gone(first, end, count_max):
                raise await self.collected(end)
        self._sizes = sizes
        self._known = {each: slot for each, slot in self._known.items() if each >= first}
        return end

    def _may_be_gone(self, first: int, end: int, count_max: int) -> bool:
        return end < self.stored.current.first_uncompacted_wal_id and end - first < count_max

    async def newest(self) -> int:
        """Return the end of the log."""
        manifest = await self.manifest()
        return (await self.filled(manifest.first_uncompacted_wal_id, 2**63)).stop

    async def earliest(self) -> int:
        """Return the first slot from which on all objects exist, protected or not."""
        first = (await self.manifest()).first_uncompacted_wal_id
        sizes = await self._list(0, first)
        while first and first - 1 in sizes:
            first -= 1
        return first

    async def write_id(self, wal_id: int) -> bytes:
        """Return the write id of an object; empty: it is gone."""
        return await self._write_id(wal_id, (await self._sized(range(wal_id, wal_id + 1)))[wal_id])

    async def described(self, slots: range) -> Sequence[FeedSlot]:
        """Describe these slots: their sizes, and the loads that they commit.

        REQUIRES: they were filled. Raises `FeedWalCollected` when one is gone.
        """
        sizes = await self._sized(slots)
        manifest = self.stored.current
        found: dict[int, FeedSlot] = {}
        unread: list[int] = []
        for wal_id in slots:
            if wal_id in self._known:
                found[wal_id] = self._known[wal_id]
            elif wal_id < manifest.first_uncompacted_wal_id or manifest.pending_loads:
                unread.append(wal_id)
            else:  # a load is pending until it is compacted
                found[wal_id] = FeedSlot(wal_id, sizes[wal_id])

        async def work() -> None:
            while unread:
                wal_id = unread.pop()
                found[wal_id] = await self._describe(wal_id, sizes[wal_id])

        await in_parallel(work, min(len(unread), PARALLEL_READS))
        self._known |= found
        return [found[wal_id] for wal_id in slots]

    async def collected(self, wal_id: int) -> FeedWalCollected:
        """Return the error that says that this object is gone."""
        return FeedWalCollected(
            f"{self._store.url}: {names.wal_name(wal_id)}, which the stream has to read next, was "
            f"collected: the oldest WAL object that a query can begin with is "
            f"{await self.earliest()}."
        )

    async def _sized(self, slots: range) -> dict[int, int]:
        """Return the sizes of objects, these included, from a list older than the manifest."""
        if not all(wal_id in self._sizes for wal_id in slots):
            end = await self._end(slots.start, len(slots))
            if end < slots.stop:
                raise await self.collected(end)
        return self._sizes

    async def _run(self, first: int, count_max: int) -> tuple[dict[int, int], int]:
        """List from slot `first` on; return the sizes, and the first slot that is missing."""
        sizes = await self._list(first, count_max)
        end = first
        while end in sizes:
            end += 1
        return sizes, end

    async def _list(self, first: int, count_max: int) -> dict[int, int]:
        """List the sizes of the objects in the `count_max` slots from `first` on."""
        start_after = names.wal_name(first - 1) if first else ""
        sizes: dict[int, int] = {}
        listed = self._store.list(names.WAL_FOLDER, start_after=start_after)
        async for info in listed:
            wal_id = names.parse_wal_name(info.name)
            if wal_id is None:
                continue
            if wal_id - first >= count_max:
                break
            sizes[wal_id] = info.size_bytes
        return sizes

    async def _describe(self, wal_id: int, size_bytes: int) -> FeedSlot:
        try:
            footer = await self._footer(wal_id, size_bytes)
        except ObjectNotFound:
            raise await self.collected(wal_id) from None
        contents = footer.contents
        if not contents.other_count or contents.bounded_count:
            return FeedSlot(wal_id, size_bytes)
        found = await read_slot(self._store, wal_id, self.stored.current.database_id)
        if isinstance(found, ObjectNotFound):
            raise await self.collected(wal_id)
        if isinstance(found, ShaleError):
            raise found
        loads = [*loads_of(found)]
        if len(loads) != 1:  # with several, the task that reads the object reads their files
            return FeedSlot(wal_id, size_bytes)
        return FeedSlot(wal_id, size_bytes, found.properties.writer_epoch, loads[0])

    async def _write_id(self, wal_id: int, size_bytes: int) -> bytes:
        try:
            return (await self._footer(wal_id, size_bytes)).properties.write_id
        except ObjectNotFound:
            return b""

    async def _footer(self, wal_id: int, size_bytes: int) -> Footer:
        name = names.wal_name(wal_id)
        database_id = self.stored.current.database_id
        tail = await self._store.get_range(name, -FOOTER_BYTES, FOOTER_BYTES)
        try:
            return read_footer(name, tail, size_bytes, database_id=database_id)
        except Truncated:  # its first and last key are long
            whole = (await self._store.get(name)).data
            return read_footer(name, whole, len(whole), database_id=database_id)

    def _older_state(self, offset: FeedOffset, problem: str) -> IllegalState:
        return IllegalState(
            f"the checkpoint has read {self._store.url} up to WAL object {offset.wal_id}, and "
            f"{problem}: an older state was put in place of the database. Begin a query with a new "
            "checkpoint"
        )


class FeedQuery:
    """The driver's side of one query: offsets, and the parts of batches.

    REQUIRES: one call at a time, besides `LogRetention.run`.

    Every method may raise `DatabaseNotFound`, `DatabaseMismatch`, `IllegalState`,
    `FeedWalCollected`, `CorruptObject` and `StoreError`.
    """

    def __init__(self, store: CasStore, options: FeedOptions) -> None:
        """Create a query that has read nothing."""
        self.options = options
        self._clock = store.runtime.clock
        self._log = FeedLog(store)
        self.retention = LogRetention(
            store, self._log.stored, options.consumer, options.consumer_ttl_s
        )
        self._epoch: int | None = None  # of the writer when the log was last checked
        self._target: int | None = None  # the end of a query that reads what is there now
        self._known_end = 0
        self._polled_ms = float("-inf")  # when the last poll found nothing new

    async def initial(self) -> FeedOffset:
        """Return where a new query begins.

        Spark asks for this again when a first batch is repeated. So nothing is kept yet: only the
        batch says what has to be kept. Raises `InvalidSetting` when `startingOffset` is behind the
        end of the log.
        """
        options = self.options
        manifest = await self._log.manifest()
        wal_id = options.start
        if wal_id is not None:
            end = await self._log.newest()
            if wal_id > end:
                raise InvalidSetting(
                    f"option startingOffset: {wal_id} is behind the end of the log, which is {end}"
                )
        else:
            wal_id = await self.retention.position()
        if wal_id is None:
            log = self._log
            wal_id = await (log.earliest() if options.from_earliest else log.newest())
        return FeedOffset(manifest.database_id, wal_id)

    async def fix_target(self) -> None:
        """Read what is in the log now, and nothing later."""
        self._target = self._known_end = await self._log.newest()

    async def latest(self, start: FeedOffset, limit: ReadLimit) -> FeedOffset:
        """Return the end of the batch that begins at `start`; `start`: there is nothing new."""
        first = start.wal_id
        await self._begin(first, start)
        if self._target is None and first >= self._known_end and self._polled_recently():
            return start
        files_max, bytes_max = self.options.limits(limit)
        filled = await self._log.filled(first, files_max)
        first, end = filled.start, filled.stop
        if self._log.stored.current.writer_epoch != self._epoch:
            # Another writer, perhaps of an older state that was restored while the query runs.
            self._epoch = await self._log.check(start)
        if self._target is not None:
            end = max(first, min(end, self._target))
        self._known_end = max(self._known_end, end)
        if end == first:
            self._polled_ms = self._clock.monotonic_ms()
            return start
        if bytes_max < NO_LIMIT:
            end = await self._fitting(range(first, end), bytes_max)
        return FeedOffset(start.database_id, end, first, await self._log.write_id(end - 1))

    @property
    def known_end(self) -> int:
        """The end of the log, as far as it is known."""
        return self._known_end

    async def parts(self, start: FeedOffset, end: FeedOffset) -> Sequence[Part]:
        """Return the parts that tasks read for the batch that ends at `end`.

        Only the database of `start` is used: when a first batch is repeated, Spark asks for the
        initial offset again, and the log may have changed since.
        """
        if start.database_id != end.database_id:
            raise DatabaseMismatch(
                f"the batch up to WAL object {end.wal_id} is of database {end.database_id.hex()}, "
                f"and {self.options.place.url} holds {start.database_id.hex()}: begin a query "
                "with a new checkpoint"
            )
        if start == end or not end.batch:
            return []
        await self._begin(end.batch.start, end)
        slots = await self._log.described(end.batch)
        options = self.options
        parts = parts_of(slots, end.database_id, options.keys, options.partition_bytes)
        if any(slot.load is not None for slot in slots):
            await self.retention.pin(end.wal_id)
        return parts

    async def _begin(self, wal_id: int, offset: FeedOffset) -> None:
        """Before the first batch of this process, check the log, and begin to keep it."""
        if self._epoch is None:
            epoch = await self._log.check(offset)
            await self.retention.begin(wal_id)
            self._epoch = epoch

    def _polled_recently(self) -> bool:
        return self._clock.monotonic_ms() - self._polled_ms < self.options.poll_ms

    async def _fitting(self, slots: range, bytes_max: int) -> int:
        """Return the end of the first slots, at least one, with at most `bytes_max` together."""
        taken: list[int] = []
        budget_bytes = bytes_max
        for begin in range(slots.start, slots.stop, SLOTS_AT_ONCE):
            some = await self._log.described(range(begin, min(begin + SLOTS_AT_ONCE, slots.stop)))
            fitting = [*admitted(some, budget_bytes, at_least=0 if taken else 1)]
            taken += [slot.wal_id for slot in fitting]
            budget_bytes -= sum(slot.read_bytes for slot in fitting)
            if len(fitting) < len(some):
                break
        return taken[-1] + 1
