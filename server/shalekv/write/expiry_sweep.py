"""The expiry sweep: turns the expiry of a value into a tombstone in the log, for watches.

Reads do not see a value any more from its expiry on, swept or not. The sweep runs later and at low
priority. It writes the tombstone as a transaction that checks again: only if the newest version of
the key is still that value. So each value that expires gets exactly one such change, unless it was
overwritten or deleted before.

Values that were written or replayed since this writer has opened are tracked in memory, up to a
bound (`ExpiringValues`). Others are found in the SSTs, which are scanned from time to time
(`ExpiryScan`).
"""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from itertools import chain
from operator import itemgetter
from typing import NamedTuple, Protocol

import structlog

from shalekv.clock import Clock
from shalekv.errors import ObjectNotFound, ShaleError
from shalekv.format.columns import Columns, Section
from shalekv.protocol.entry import NEVER_MS, NO_EXPIRY, Entry, Kind
from shalekv.protocol.loads import CommittedLoad
from shalekv.protocol.manifest import Version
from shalekv.protocol.sst_table import SstInfo
from shalekv.protocol.transaction import Expire, Needs, Transaction
from shalekv.read.memtable import Memtable
from shalekv.read.sorted_runs import ENTRY_OVERHEAD_BYTES
from shalekv.read.sst_reader import OpenSst
from shalekv.read.version import PinnedVersion
from shalekv.read.version_set import VersionSet
from shalekv.settings import GIB, MIB, WriterSettings
from shalekv.write.commit import COMMIT_OVERHEAD_BYTES, Group, OnSettled, Receipt
from shalekv.write.group_commit import GroupCommit
from shalekv.write.logical_time import LogicalTime
from shalekv.write.prefetch import Prefetch

log = structlog.get_logger()

READ_BYTES = 1 << 20  # bytes of one request
EXPIRY_TRACKED_SHARE = 11  # of the memtable: most values that expire before they are compacted fit
EXPIRY_TRACKED_BYTES_MAX = GIB
EXPIRY_SCAN_INTERVAL_S = 600  # well below `expired_value_kept_s`, or compactions drop the values
EXPIRY_SCAN_BYTES = 8 * MIB  # a second: a small part of what a store and a core deliver
_MS_PER_S = 1_000
_EXPIRY = itemgetter(Entry._fields.index("expire_at_ms"))
KEYS_AT_ONCE = 1_000  # keys of one transaction
BYTES_AT_ONCE = 256 << 10  # accounted bytes of these keys
BUSY_PARTS = 4  # while more than a quarter of the queue is full, client writes come first
BUCKET_MS = 1_000  # width of a bucket of expiry times; its values are due together
VALUE_BYTES = 400  # of a value, without its key: 270 measured, and the share of a small bucket
_KEPT_PARTS = 32  # when the memory is full, one part in so many is dropped, in about 2 ms
_STALE_PARTS, _STALE_COUNT = 2, 64  # limits of empty buckets in the heap: beyond, it is rebuilt


class Expiring(NamedTuple):
    """A version of a key that expires."""

    key: bytes
    seq: int
    expire_at_ms: int


class ExpiringValues:
    """The values in memory that expire, each the newest version of its key.

    Every expiring value that is newer than commit `through_seq` is here, unless a newer version has
    replaced it. A value here that is not newer than commit `uncertain_seq` may have been deleted by
    a range delete, or replaced by a load. When memory is full, the values that expire last are
    dropped, and `through_seq` rises above them.
    """

    def __init__(self, *, bytes_max: int, through_seq: int) -> None:
        """Begin empty. Values of commits up to `through_seq` have to be found elsewhere."""
        self._bytes_max = bytes_max
        self._by_key: dict[bytes, Expiring] = {}
        self._buckets: dict[int, dict[bytes, None]] = {}  # of the values that were not taken
        self._heap: list[int] = []  # the numbers of buckets, some of which are empty by now
        self.size_bytes = 0
        self.through_seq = through_seq
        self.uncertain_seq = 0

    def __len__(self) -> int:
        return len(self._by_key)

    def __contains__(self, key: bytes) -> bool:
        return key in self._by_key

    def add(self, entries: Iterable[Entry]) -> None:
        """Add durable versions; of two versions of a key the newer one is kept.

        A version that does not expire only removes an older value of its key, and leaves no trace.
        REQUIRES: an expiring version is not added after a newer one of its key, unless the newer
        one is here.
        """
        known = self._by_key
        for entry in entries:
            if entry.expire_at_ms or entry.key in known:
                self._replace(entry)

    def mark_untracked(self, seq: int) -> None:
        """Record that commits up to `seq`, such as a load, may have written values unknown here."""
        self.through_seq = max(self.through_seq, seq)
        self.mark_uncertain(seq)

    def mark_uncertain(self, seq: int) -> None:
        """Record that commits up to `seq` may have deleted keys that are still here."""
        self.uncertain_seq = max(self.uncertain_seq, seq)

    def take_due(self, now_ms: int, count_max: int) -> list[Expiring]:
        """Take up to `count_max` expired values: they stay here, but are not due any more."""
        taken: list[Expiring] = []
        while self._heap and len(taken) < count_max:
            number = self._heap[0]
            if (number + 1) * BUCKET_MS - 1 > now_ms:
                break
            bucket = self._buckets.get(number, {})
            while bucket and len(taken) < count_max:
                key, _ = bucket.popitem()
                taken.append(self._by_key[key])
            if not bucket:
                heapq.heappop(self._heap)
                self._buckets.pop(number, None)
        return taken

    def holds(self, taken: Expiring) -> bool:
        """Return whether the value is still here, not replaced since it was taken."""
        return self._by_key.get(taken.key) is taken

    def drop(self, taken: Iterable[Expiring]) -> None:
        """Remove taken values, unless they were replaced meanwhile."""
        for each in taken:
            if self.holds(each):
                self._forget(each.key)

    def put_back(self, taken: Iterable[Expiring]) -> None:
        """Make taken values due again, unless they were replaced meanwhile."""
        for each in taken:
            if self.holds(each):
                self._enter_bucket(each)

    def _replace(self, entry: Entry) -> None:
        known = self._by_key.get(entry.key)
        if known is not None:
            if known.seq > entry.seq:
                return
            self._forget(entry.key)
            self._leave_bucket(known)
        if entry.kind is Kind.PUT and entry.expire_at_ms:
            added = Expiring(entry.key, entry.seq, entry.expire_at_ms)
            self._by_key[added.key] = added
            self.size_bytes += VALUE_BYTES + len(added.key)
            self._enter_bucket(added)
            if self.size_bytes > self._bytes_max:
                self._evict()

    def _forget(self, key: bytes) -> Expiring:
        self.size_bytes -= VALUE_BYTES + len(key)
        return self._by_key.pop(key)

    def _enter_bucket(self, added: Expiring) -> None:
        number = added.expire_at_ms // BUCKET_MS
        bucket = self._buckets.get(number)
        if bucket is None:
            bucket = self._buckets[number] = {}
            heapq.heappush(self._heap, number)
        bucket[added.key] = None

    def _leave_bucket(self, known: Expiring) -> None:
        number = known.expire_at_ms // BUCKET_MS
        bucket = self._buckets.get(number)
        if bucket is None or known.key not in bucket:
            return  # it was taken
        del bucket[known.key]
        if not bucket:
            del self._buckets[number]
            if len(self._heap) > _STALE_PARTS * len(self._buckets) + _STALE_COUNT:
                self._heap = sorted(self._buckets)  # which is a heap

    def _evict(self) -> None:
        """Drop the values that expire last."""
        kept_bytes = self._bytes_max - self._bytes_max // _KEPT_PARTS
        self._heap = sorted(self._buckets)  # which is a heap
        while self._heap:
            number = self._heap[-1]
            bucket = self._buckets[number]
            while bucket and self.size_bytes > kept_bytes:
                key, _ = bucket.popitem()
                self.through_seq = max(self.through_seq, self._forget(key).seq)
            if bucket:
                break
            del self._buckets[self._heap.pop()]


@dataclass(frozen=True, slots=True)
class _SstContents:
    """The result of the last read of an SST."""

    through_seq: int  # newer values were tracked in memory then, and were skipped
    due_ms: int  # when the next of its values expires


class ExpiryScan:
    """Scans SSTs for expired values that the writer does not track in memory.

    An SST is read only if it may contain such values by now: the manifest contains the first expiry
    of each SST, and the result of the last read is remembered. A value that is found is only a
    candidate, since a newer version may be elsewhere.
    """

    def __init__(
        self,
        levels: VersionSet,
        values: ExpiringValues,
        clock: Clock,
        *,
        bytes_per_s: int,
        now_ms: Callable[[], int],
    ) -> None:
        """`values` are those tracked in memory; `now_ms` is logical time."""
        self._levels = levels
        self._values = values
        self._clock = clock
        self._bytes_per_s = bytes_per_s
        self._now_ms = now_ms
        self._seen: dict[bytes, _SstContents] = {}

    async def expired(self) -> AsyncGenerator[Sequence[bytes], None]:
        """Iterate over the keys of expired versions, in batches, until all SSTs are scanned.

        The blocks that contain them are cached, so that looking up the newest versions finds them
        there. Raises `CorruptObject` and `StoreUnavailable`.
        """
        through_seq, now_ms = self._values.through_seq, self._now_ms()
        done: set[bytes] = set()
        while True:
            pinned = (
                self._levels.current.without_loads
            )  # anew for each SST: an old version keeps garbage
            infos = [*ssts(pinned.version)]
            self._seen = {i.id: self._seen[i.id] for i in infos if i.id in self._seen}
            info = next(
                (i for i in infos if i.id not in done and self._is_due(i, through_seq, now_ms)),
                None,
            )
            if info is None:
                return
            done.add(info.id)
            due_ms = NEVER_MS
            try:
                async with aclosing(self._read(pinned, info)) as blocks:
                    async for columns in blocks:
                        keys, next_ms = _expired(columns, through_seq, now_ms)
                        due_ms = min(due_ms, next_ms)
                        if keys:
                            yield keys
            except ObjectNotFound as missing:  # this process was stopped for long; retry next time
                log.warning("an SST could not be scanned for expired values", error=str(missing))
                continue
            self._seen[info.id] = _SstContents(through_seq, due_ms)

    def _is_due(self, info: SstInfo, through_seq: int, now_ms: int) -> bool:
        if info.min_seq > through_seq:
            return False  # all its values are tracked in memory
        if not NO_EXPIRY < info.first_expiry_ms <= now_ms:
            return False
        seen = self._seen.get(info.id)
        if seen is None or (seen.through_seq < through_seq and info.max_seq > seen.through_seq):
            return True
        return seen.due_ms <= now_ms

    async def _read(self, pinned: PinnedVersion, info: SstInfo) -> AsyncGenerator[Columns, None]:
        opened = await pinned.ssts.metadata(info)  # with the filter, since found keys are looked up
        for numbers in _groups(opened):
            fetched = await pinned.ssts.fetch(opened, numbers, keep=True)
            for number in numbers:
                yield fetched.block(number).columns()
                await self._clock.sleep_ms(0)
            size_bytes = sum(opened.index[number].length for number in numbers)
            await self._clock.sleep_ms(_MS_PER_S * size_bytes / self._bytes_per_s)


def ssts(version: Version) -> Iterator[SstInfo]:
    """The SSTs of a version that hold keys of clients."""
    return chain(version.l0, *(run.ssts for run in version.runs))


def _groups(opened: OpenSst) -> Iterator[range]:
    """Split the blocks of points into runs of adjacent ones, to be fetched together."""
    blocks = opened.index.blocks_of(Section.POINTS)
    start, size_bytes = blocks.start, 0
    for number in blocks:
        length = opened.index[number].length
        if number > start and size_bytes + length > READ_BYTES:
            yield range(start, number)
            start, size_bytes = number, 0
        size_bytes += length
    if start < blocks.stop:
        yield range(start, blocks.stop)


def _expired(columns: Columns, through_seq: int, now_ms: int) -> tuple[list[bytes], int]:
    """The keys of expired values, and the time at which the next of the others expires."""
    keys, seqs, kinds, _, expire_at_ms = columns
    if not any(expire_at_ms):
        return [], NEVER_MS
    rows = [
        row
        for row, at_ms in enumerate(expire_at_ms)
        if at_ms != NO_EXPIRY and kinds[row] == Kind.PUT and seqs[row] <= through_seq
    ]
    due_ms = min((at for row in rows if (at := expire_at_ms[row]) > now_ms), default=NEVER_MS)
    return [keys[row] for row in rows if expire_at_ms[row] <= now_ms], due_ms


class SweptEngine(Protocol):
    """The parts of a writer's engine that a sweep needs."""

    prefetch: Prefetch
    levels: VersionSet
    log: GroupCommit
    time: LogicalTime

    @property
    def memtable(self) -> Memtable:
        """Durable entries that are not compacted."""
        ...

    @property
    def is_pressed(self) -> bool:
        """Return whether uncompacted writes or loads use more than half of what they may."""
        ...


class ExpirySweep:
    """The expiry sweep of one writer."""

    def __init__(
        self,
        engine: SweptEngine,
        settings: WriterSettings,
        clock: Clock,
        *,
        replayed: Iterable[CommittedLoad],
    ) -> None:
        """`engine` has just replayed its log, including the loads in `replayed`."""
        self._engine = engine
        self._log = engine.log
        self._clock = clock
        self._settings = settings
        version = engine.levels.current.version
        self.values = ExpiringValues(
            bytes_max=min(
                settings.memtable_bytes_max // EXPIRY_TRACKED_SHARE, EXPIRY_TRACKED_BYTES_MAX
            ),
            through_seq=version.last_seq,
        )
        self._scan = ExpiryScan(
            engine.levels,
            self.values,
            clock,
            bytes_per_s=EXPIRY_SCAN_BYTES,
            now_ms=engine.time.now_ms,
        )
        self.expired_count = 0
        if self.is_on:
            self._replay(replayed)

    @property
    def is_on(self) -> bool:
        """Return whether the sweep is enabled."""
        return self._settings.expiry_sweep_interval_ms > 0

    def _replay(self, loads: Iterable[CommittedLoad]) -> None:
        prefix = self._engine.log.watermark
        view = self._engine.memtable.view(prefix.seq, prefix.wal_id)
        for run in view.runs:  # the oldest first
            self.values.add(run.entries)
        if view.range_tombstones:
            self.values.mark_uncertain(view.seq)
        for load in loads:
            self.values.mark_untracked(load.seq)

    def land(self, group: Group) -> None:
        """Track the values of a group that is durable, and in the memtable."""
        if not self.is_on:
            return
        run, values, newest = group.run, self.values, self._engine.memtable.get
        if values or any(map(_EXPIRY, run.entries)):
            # A group that landed ahead may have replaced a value that was not tracked yet.
            values.add(
                entry
                for entry in run.entries
                if entry.key in values or (entry.expire_at_ms and newest(entry.key) is entry)
            )
        if run.range_tombstones:
            values.mark_uncertain(run.max_seq)
        if group.load is not None:  # its values are in the levels, and hide older ones
            values.mark_untracked(group.load.seq)

    async def run(self) -> None:
        """Sweep and scan at their intervals, until cancelled or until the log has ended."""
        scan_interval_ms = EXPIRY_SCAN_INTERVAL_S * _MS_PER_S
        async with asyncio.TaskGroup() as tasks:
            if self.is_on:
                sweep_interval_ms = self._settings.expiry_sweep_interval_ms
                tasks.create_task(self._repeat(self.sweep, sweep_interval_ms), name="sweep")
            if self.is_on and scan_interval_ms:
                tasks.create_task(self._repeat(self.scan, scan_interval_ms), name="scan")

    async def _repeat(self, act: Callable[[], Awaitable[None]], interval_ms: int) -> None:
        while self._log.stopped_by is None:
            await self._clock.sleep_ms(interval_ms)
            try:
                await act()
            except ShaleError as error:
                if self._log.stopped_by is None:
                    log.warning("expired values could not be swept", problem=str(error))

    async def sweep(self) -> None:
        """Write tombstones for tracked values that have expired; client writes have priority."""
        while not self._is_held_back:
            due = self.values.take_due(self._engine.time.now_ms(), KEYS_AT_ONCE)
            if not due:
                return
            is_done = False
            try:
                is_done = await self._expire_all(due)
            finally:
                if is_done:
                    self.values.drop(due)
                else:
                    self.values.put_back(due)
            if not is_done:
                return

    async def scan(self) -> None:
        """Scan the SSTs, and write tombstones for the values that have expired."""
        async with aclosing(self._scan.expired()) as scanning:
            async for keys in scanning:
                found = [Expiring(key, 0, 0) for key in keys]
                while self._is_held_back or not await self._expire_all(found):
                    await self._clock.sleep_ms(self._settings.expiry_sweep_interval_ms)

    @property
    def _is_held_back(self) -> bool:
        engine = self._engine
        is_busy = engine.log.admission.queued_bytes * BUSY_PARTS > self._settings.queued_bytes_max
        return is_busy or engine.is_pressed

    async def _expire_all(self, due: Sequence[Expiring]) -> bool:
        for batch in _batches(due):
            if not await self._expire(batch):
                return False
        return True

    async def _expire(self, due: Sequence[Expiring]) -> bool:
        """Submit one transaction, and wait until it is durable. False: it was not admitted.

        Raises the error that its commit ended with.
        """
        while True:
            asked = {each.key for each in due if not self._is_sure(each)}
            needs = Needs([*asked])
            read_set = self._engine.prefetch.known(needs) or await self._engine.prefetch.fetch(
                needs
            )
            # From here on no other task runs until the commit is queued.
            if all(each.key in asked or self._is_sure(each) for each in due):
                break
        operations = [
            Expire(each.key, None if each.key in asked else _version(each))
            for each in due
            if each.key in asked or self.values.holds(each)
        ]
        size_bytes = COMMIT_OVERHEAD_BYTES + sum(map(_accounted_bytes, due))
        # The contents of a load are not known before it is durable.
        if self._log.pending_writes.is_loading or not self._log.admission.try_admit(size_bytes):
            return False
        settled: asyncio.Future[Receipt | ShaleError] = asyncio.get_running_loop().create_future()
        self._log.transact(
            Transaction(operations), _settle(settled), size_bytes=size_bytes, read_set=read_set
        )
        del read_set  # the version token that it refers to keeps memory alive
        outcome = await settled
        if isinstance(outcome, ShaleError):
            try:
                raise outcome
            finally:  # the error refers to this frame, so these must not refer to the error
                del outcome, settled
        if outcome.decision is not None:
            self.expired_count += len(outcome.decision.changes)
        return True

    def _is_sure(self, each: Expiring) -> bool:
        """Return whether no newer version of the key can be in the levels.

        Any later write to the key would have replaced the tracked value.
        """
        return each.seq > self.values.uncertain_seq


def _version(each: Expiring) -> Entry:
    return Entry(each.key, each.seq, Kind.PUT, b"", each.expire_at_ms)


def _accounted_bytes(each: Expiring) -> int:
    return ENTRY_OVERHEAD_BYTES + len(each.key)


def _batches(due: Sequence[Expiring]) -> Iterator[Sequence[Expiring]]:
    batch: list[Expiring] = []
    size_bytes = 0
    for each in due:
        size_bytes += _accounted_bytes(each)
        if batch and (size_bytes > BYTES_AT_ONCE or len(batch) == KEYS_AT_ONCE):
            yield batch
            batch, size_bytes = [], _accounted_bytes(each)
        batch.append(each)
    if batch:
        yield batch


def _settle(settled: asyncio.Future[Receipt | ShaleError]) -> OnSettled:
    def settle(outcome: Receipt | ShaleError) -> None:
        if not settled.done():
            settled.set_result(outcome)

    return settle
