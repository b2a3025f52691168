"""Index of the values that will expire, of the keys that a writer has written. Pure.

Each key is in it once, with its newest version. Its memory is bounded: the values that expire last
are dropped for others. Values that it does not have are found later, in the levels (`through_seq`).
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from typing import NamedTuple

from shalekv.protocol.entry import Entry, Kind

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
    """The newest versions of keys whose values expire.

    It has every version that expires and is newer than commit `through_seq`, unless a newer version
    has replaced it. A key whose version is not newer than commit `doubtful_seq` may have been
    deleted since, by a range delete or a load.
    """

    def __init__(self, *, bytes_max: int, through_seq: int) -> None:
        """Begin empty. Values of commits up to `through_seq` have to be found elsewhere."""
        self._bytes_max = bytes_max
        self._by_key: dict[bytes, Expiring] = {}
        self._buckets: dict[int, dict[bytes, None]] = {}  # of the values that were not taken
        self._heap: list[int] = []  # the numbers of buckets, some of which are empty by now
        self.size_bytes = 0
        self.through_seq = through_seq
        self.doubtful_seq = 0

    def __len__(self) -> int:
        return len(self._by_key)

    def __contains__(self, key: bytes) -> bool:
        return key in self._by_key

    def note(self, entries: Iterable[Entry]) -> None:
        """Add durable versions; of two versions of a key the newer one is kept.

        REQUIRES: no newer version of the key of an expiring value was noted while the key was
        unknown here.
        """
        known = self._by_key
        for entry in entries:
            if entry.expire_at_ms or entry.key in known:
                self._replace(entry)

    def miss(self, seq: int) -> None:
        """Record that commits up to `seq` may have written values unknown here, such as a load."""
        self.through_seq = max(self.through_seq, seq)
        self.doubt(seq)

    def doubt(self, seq: int) -> None:
        """Record that commits up to `seq` may have deleted keys that are still here."""
        self.doubtful_seq = max(self.doubtful_seq, seq)

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
        """Whether the value is still here, not replaced since it was taken."""
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
