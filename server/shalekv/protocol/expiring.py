"""Which values expire when: what a writer knows of the keys that it has written. Pure.

Each key stands once, with its newest version. There is room for so many; those that expire last
make place for others. What is not here is found in the levels, later (`through_seq`).
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from typing import NamedTuple

from shalekv.protocol.entry import Entry, Kind

BUCKET_MS = 1_000  # values that expire within so much are looked at together
VALUE_BYTES = 400  # of one beside its key: measured 270, and what a bucket of few takes
_KEPT_PARTS = 32  # when there is no room, such a part of them goes: about 2 ms
_STALE_PARTS, _STALE_COUNT = 2, 64  # of the order of buckets: then it is made anew


class Expiring(NamedTuple):
    """A version of a key that expires."""

    key: bytes
    seq: int
    expire_at_ms: int


class ExpiringValues:
    """The values that expire, of which the newest version of each key counts.

    Every version that expires and is newer than commit `through_seq` is here, unless a newer one
    has replaced it. Of what is not newer than commit `doubtful_seq`, the key may have been deleted
    since, by a range delete or a load.
    """

    def __init__(self, *, bytes_max: int, through_seq: int) -> None:
        """Empty. What is up to `through_seq` is not looked for here."""
        self._bytes_max = bytes_max
        self._at: dict[bytes, Expiring] = {}
        self._buckets: dict[int, dict[bytes, None]] = {}  # of all that were not taken
        self._order: list[int] = []  # a heap of the buckets, some of which are gone
        self.size_bytes = 0
        self.through_seq = through_seq
        self.doubtful_seq = 0

    def __len__(self) -> int:
        return len(self._at)

    def __contains__(self, key: bytes) -> bool:
        return key in self._at

    def note(self, entries: Iterable[Entry]) -> None:
        """These versions are durable; of two versions of a key the newer one counts.

        REQUIRES: of a value that expires, no newer version was noted while none was here.
        """
        known = self._at
        for entry in entries:
            if entry.expire_at_ms or entry.key in known:
                self._replace(entry)

    def miss(self, seq: int) -> None:
        """Commits up to `seq` may have written what this was not told, such as a load."""
        self.through_seq = max(self.through_seq, seq)
        self.doubt(seq)

    def doubt(self, seq: int) -> None:
        """Commits up to `seq` may have deleted keys that this was not told of."""
        self.doubtful_seq = max(self.doubtful_seq, seq)

    def take_due(self, now_ms: int, count_max: int) -> list[Expiring]:
        """Some of those that have expired; they stay here, but are not due any more."""
        taken: list[Expiring] = []
        while self._order and len(taken) < count_max:
            number = self._order[0]
            if (number + 1) * BUCKET_MS - 1 > now_ms:
                break
            bucket = self._buckets.get(number, {})
            while bucket and len(taken) < count_max:
                key, _ = bucket.popitem()
                taken.append(self._at[key])
            if not bucket:
                heapq.heappop(self._order)
                self._buckets.pop(number, None)
        return taken

    def holds(self, taken: Expiring) -> bool:
        """Whether nothing has replaced it since it was taken."""
        return self._at.get(taken.key) is taken

    def drop(self, taken: Iterable[Expiring]) -> None:
        """What was taken is done with."""
        for each in taken:
            if self.holds(each):
                self._forget(each.key)

    def put_back(self, taken: Iterable[Expiring]) -> None:
        """What was taken is due again, unless it was replaced meanwhile."""
        for each in taken:
            if self.holds(each):
                self._enter_bucket(each)

    def _replace(self, entry: Entry) -> None:
        known = self._at.get(entry.key)
        if known is not None:
            if known.seq > entry.seq:
                return
            self._forget(entry.key)
            self._leave_bucket(known)
        if entry.kind is Kind.PUT and entry.expire_at_ms:
            added = Expiring(entry.key, entry.seq, entry.expire_at_ms)
            self._at[added.key] = added
            self.size_bytes += VALUE_BYTES + len(added.key)
            self._enter_bucket(added)
            if self.size_bytes > self._bytes_max:
                self._make_room()

    def _forget(self, key: bytes) -> Expiring:
        self.size_bytes -= VALUE_BYTES + len(key)
        return self._at.pop(key)

    def _enter_bucket(self, added: Expiring) -> None:
        number = added.expire_at_ms // BUCKET_MS
        bucket = self._buckets.get(number)
        if bucket is None:
            bucket = self._buckets[number] = {}
            heapq.heappush(self._order, number)
        bucket[added.key] = None

    def _leave_bucket(self, known: Expiring) -> None:
        number = known.expire_at_ms // BUCKET_MS
        bucket = self._buckets.get(number)
        if bucket is None or known.key not in bucket:
            return  # it was taken
        del bucket[known.key]
        if not bucket:
            del self._buckets[number]
            if len(self._order) > _STALE_PARTS * len(self._buckets) + _STALE_COUNT:
                self._order = sorted(self._buckets)  # which is a heap

    def _make_room(self) -> None:
        """Let go of those that expire last."""
        kept_bytes = self._bytes_max - self._bytes_max // _KEPT_PARTS
        self._order = sorted(self._buckets)  # which is a heap
        while self._order:
            number = self._order[-1]
            bucket = self._buckets[number]
            while bucket and self.size_bytes > kept_bytes:
                key, _ = bucket.popitem()
                self.through_seq = max(self.through_seq, self._forget(key).seq)
            if bucket:
                break
            del self._buckets[self._order.pop()]
