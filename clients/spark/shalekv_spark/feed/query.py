"""One query on the changes of a database, as its driver runs it: from offset to offset."""

from __future__ import annotations

from collections.abc import Sequence

from pyspark.sql.streaming.datasource import ReadLimit

from shalekv.errors import DatabaseMismatch, InvalidSetting
from shalekv.store.cas import CasStore
from shalekv_spark.feed.keeping import Keeping
from shalekv_spark.feed.log import FeedLog
from shalekv_spark.feed.offset import FeedOffset
from shalekv_spark.feed.options import NO_LIMIT, FeedOptions
from shalekv_spark.feed.slots import Part, admitted, parts_of

LOOKED_INTO = 256  # slots at once, to find out how much they are


class FeedQuery:
    """REQUIRES: one call at a time, beside `keep`.

    Every method may raise `DatabaseNotFound`, `DatabaseMismatch`, `IllegalState`,
    `FeedWalCollected`, `CorruptObject` and `StoreError`.
    """

    def __init__(self, store: CasStore, options: FeedOptions) -> None:
        """Nothing is read yet."""
        self.options = options
        self._clock = store.runtime.clock
        self._log = FeedLog(store)
        self.keeping = Keeping(store, self._log.stored, options.consumer, options.consumer_ttl_s)
        self._epoch: int | None = None  # of the writer when the log was last checked
        self._target: int | None = None  # of a query that ends with what is there
        self._known_end = 0
        self._looked_ms = float("-inf")  # when nothing new was found

    async def initial(self) -> FeedOffset:
        """Where a new query begins. Raises `InvalidSetting` when the log does not reach there.

        Spark asks for this again when a first batch is repeated. So nothing is held yet: what has
        to be kept is known by the batch.
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
            wal_id = await self.keeping.position()
        if wal_id is None:
            log = self._log
            wal_id = await (log.earliest() if options.from_earliest else log.newest())
        return FeedOffset(manifest.database_id, wal_id)

    async def aim(self) -> None:
        """From now on, read what is in the log now and nothing more."""
        self._target = self._known_end = await self._log.newest()

    async def latest(self, start: FeedOffset, limit: ReadLimit) -> FeedOffset:
        """Where the batch ends that begins at `start`; `start` itself: there is nothing new."""
        first = start.wal_id
        await self._begin(first, start)
        if self._target is None and first >= self._known_end and self._has_just_looked():
            return start
        files_max, bytes_max = self.options.limits(limit)
        filled = await self._log.filled(first, files_max)
        first, end = filled.start, filled.stop
        if self._log.stored.current.writer_epoch != self._epoch:
            # Another writer; perhaps of an older state, which was put here while the query runs.
            self._epoch = await self._log.check(start)
        if self._target is not None:
            end = max(first, min(end, self._target))
        self._known_end = max(self._known_end, end)
        if end == first:
            self._looked_ms = self._clock.monotonic_ms()
            return start
        if bytes_max < NO_LIMIT:
            end = await self._fitting(range(first, end), bytes_max)
        return FeedOffset(start.database_id, end, first, await self._log.write_id(end - 1))

    @property
    def known_end(self) -> int:
        """The end of the log, as far as it was seen."""
        return self._known_end

    async def parts(self, start: FeedOffset, end: FeedOffset) -> Sequence[Part]:
        """What tasks read for the batch that ends at `end`.

        `start` counts for nothing but whose it is: of a first batch that is repeated, Spark asks
        for the initial offset anew, and the log may have changed since.
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
            await self.keeping.pin(end.wal_id)
        return parts

    async def _begin(self, wal_id: int, offset: FeedOffset) -> None:
        """Before the first batch of this process: is it the same log, and is it kept?"""
        if self._epoch is None:
            epoch = await self._log.check(offset)
            await self.keeping.begin(wal_id)
            self._epoch = epoch

    def _has_just_looked(self) -> bool:
        return self._clock.monotonic_ms() - self._looked_ms < self.options.poll_ms

    async def _fitting(self, slots: range, bytes_max: int) -> int:
        """The end of the first of these slots that are not more than so many bytes."""
        looked: list[int] = []
        room_bytes = bytes_max
        for begin in range(slots.start, slots.stop, LOOKED_INTO):
            some = await self._log.described(range(begin, min(begin + LOOKED_INTO, slots.stop)))
            fitting = [*admitted(some, room_bytes, at_least=0 if looked else 1)]
            looked += [slot.wal_id for slot in fitting]
            room_bytes -= sum(slot.read_bytes for slot in fitting)
            if len(fitting) < len(some):
                break
        return looked[-1] + 1
