"""Quotas: what each principal uses of this process, and whether its quota leaves enough for more.

A process counts by itself: it tells no other what its callers use. What counts:

    calls_per_s       unary calls, scans, operations of sessions, watches and openings of sessions,
                      when they begin
    bytes_per_s       the bytes of requests when they begin, those of replies when they end; those
                      of scans and watches as they are sent, which waits while the bucket is in debt
    calls_in_flight   unary calls, scans and operations of sessions that are not answered
    bytes_in_flight   the bytes of their requests
    watches, scans, sessions    those that are open; a count is a scan

A rate is a token bucket that holds what flows in within a second; that of bytes holds the largest
message at least. What is larger than the bucket needs a full one, and leaves it in debt. Refused
calls take nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import ceil
from weakref import WeakValueDictionary

from google.protobuf.message import Message

from shalekv.errors import QuotaExceeded
from shalekv.protocol.access import Quota
from shalekv.v1 import kv_pb2 as kv

# Advice if too much is in flight, or open: nobody knows when some of it ends.
IN_FLIGHT_RETRY_MS = 100
OPEN_RETRY_MS = 1_000
STREAM_KINDS = ("watches", "scans", "sessions")
SWEEP_COUNT_MIN = 1_000  # principals; below it none is forgotten

_BURST_MS = 1_000.0  # the time in which an empty bucket fills
_EXACT_MS = 0.001  # sums of times are that exact
_NONE = Quota()
STREAMS: Mapping[type[Message], str] = {
    kv.WatchCreate: "watches",
    kv.ScanRequest: "scans",
    kv.CountRequest: "scans",
    kv.SessionRequest: "sessions",  # its opening; that of a stream of watches holds nothing
}


class QuotaBucket:
    """A bucket into which tokens flow at a constant rate.

    Its level is kept as the time at which it would be full, so nothing has to be added to it.
    """

    __slots__ = ("_burst_ms", "_full_ms", "_token_ms")

    def __init__(self, rate_per_s: int, *, burst_min: int = 1) -> None:
        """Begin full. It holds the tokens of a second, and `burst_min` at least."""
        self._full_ms = 0.0
        self._token_ms = self._burst_ms = 0.0
        self.change(rate_per_s, burst_min, 0.0)

    def change(self, rate_per_s: int, burst_min: int, now_ms: float) -> None:
        """Set another rate; what is missing stays the same part of what the bucket holds."""
        missing = self.missing_ms(now_ms) / self._burst_ms if self._burst_ms else 0.0
        self._token_ms = _BURST_MS / rate_per_s
        self._burst_ms = max(_BURST_MS, burst_min * self._token_ms)
        self._full_ms = now_ms + missing * self._burst_ms

    def missing_ms(self, now_ms: float) -> float:
        """Return the time until the bucket is full."""
        return max(self._full_ms - now_ms, 0.0)

    def take_if_there(self, tokens: int, now_ms: float) -> float:
        """Take tokens, and return 0; or return the time until there are enough, and take none."""
        missing_ms, needed_ms = self._full_ms - now_ms, tokens * self._token_ms
        if missing_ms <= 0.0:
            self._full_ms = now_ms + needed_ms
            return 0.0
        burst_ms = self._burst_ms
        needed_ms = min(needed_ms, burst_ms)
        wait_ms = missing_ms - burst_ms + needed_ms
        if wait_ms > _EXACT_MS:
            return wait_ms
        self._full_ms += tokens * self._token_ms
        return 0.0

    def take(self, tokens: int, now_ms: float) -> float:
        """Take tokens, even more than there are; return the time until none is owed."""
        full_ms = self._full_ms
        self._full_ms = max(full_ms, now_ms) + tokens * self._token_ms
        return max(self._full_ms - now_ms - self._burst_ms, 0.0)

    def give_back(self, tokens: int) -> None:
        """Give back tokens that were taken just now."""
        self._full_ms -= tokens * self._token_ms


class PrincipalUse:
    """Use that one principal makes of this process.

    While it `is_limited`, what begins is told to `begin` or `open`; what was not, is not told when
    it ends either.
    """

    __slots__ = (
        "__weakref__",
        "_buckets",
        "_bytes_in_flight",
        "_calls_in_flight",
        "_message_bytes_max",
        "_now_ms",
        "_open",
        "is_limited",
        "quota",
    )

    def __init__(self, now_ms: Callable[[], float], message_bytes_max: int) -> None:
        """Begin without a quota."""
        self.quota = _NONE
        self.is_limited = False
        self._now_ms = now_ms
        self._message_bytes_max = message_bytes_max
        self._calls_in_flight = self._bytes_in_flight = 0
        self._open = dict.fromkeys(STREAM_KINDS, 0)
        self._buckets: tuple[QuotaBucket | None, QuotaBucket | None] = (None, None)

    @property
    def counts_bytes(self) -> bool:
        """Return whether `send` has an effect."""
        return self._buckets[1] is not None

    @property
    def is_idle(self) -> bool:
        """Return whether it would be the same if it were made anew."""
        now_ms = self._now_ms()
        buckets_ms = sum(each.missing_ms(now_ms) for each in self._buckets if each is not None)
        return not (self._calls_in_flight or any(self._open.values()) or buckets_ms)

    def limit(self, quota: Quota) -> None:
        """Set another quota; what is in flight, open or missing stays so."""
        if quota == self.quota:
            self.quota = quota  # another caller's
            return
        self.quota = quota
        self.is_limited = quota != _NONE
        calls, sizes = self._buckets
        self._buckets = (
            self._changed(calls, quota.calls_per_s, 1),
            self._changed(sizes, quota.bytes_per_s, self._message_bytes_max),
        )

    def _changed(self, bucket: QuotaBucket | None, rate: int, burst_min: int) -> QuotaBucket | None:
        if not rate:
            return None
        if bucket is None:
            return QuotaBucket(rate, burst_min=burst_min)
        bucket.change(rate, burst_min, self._now_ms())
        return bucket

    def begin(self, size_bytes: int) -> None:
        """Count a call, or an operation of a session, whose request has that size.

        Raises `QuotaExceeded`. A request larger than `bytes_in_flight` may be the only one.
        """
        quota = self.quota
        if quota.calls_in_flight and self._calls_in_flight >= quota.calls_in_flight:
            raise _exceeded("calls_in_flight", quota.calls_in_flight, IN_FLIGHT_RETRY_MS)
        in_flight, limit = self._bytes_in_flight, quota.bytes_in_flight
        if limit and in_flight and in_flight + size_bytes > limit:
            raise _exceeded("bytes_in_flight", limit, IN_FLIGHT_RETRY_MS)
        self.admit(size_bytes)
        self._calls_in_flight += 1
        self._bytes_in_flight = in_flight + size_bytes

    def admit(self, size_bytes: int) -> None:
        """Take what begins, and is not in flight, from the rates. Raises as `begin`."""
        calls, sizes = self._buckets
        if calls is None and sizes is None:
            return
        now_ms = self._now_ms()
        if calls is not None and (wait_ms := calls.take_if_there(1, now_ms)):
            raise _exceeded("calls_per_s", self.quota.calls_per_s, ceil(wait_ms))
        if sizes is not None and (wait_ms := sizes.take_if_there(size_bytes, now_ms)):
            if calls is not None:
                calls.give_back(1)
            raise _exceeded("bytes_per_s", self.quota.bytes_per_s, ceil(wait_ms))

    def end(self, size_bytes: int) -> None:
        """Count the end of what `begin` has counted with this size."""
        self._calls_in_flight -= 1
        self._bytes_in_flight -= size_bytes

    def send(self, size_bytes: int) -> float:
        """Count bytes that are sent; returns the time to wait before more of a stream are."""
        sizes = self._buckets[1]
        return sizes.take(size_bytes, self._now_ms()) if sizes is not None else 0.0

    def open(self, kind: str) -> None:
        """Count a stream of one of `STREAM_KINDS`, also without a quota. Raises `QuotaExceeded`."""
        limit: int = getattr(self.quota, kind)
        if limit and self._open[kind] >= limit:
            raise _exceeded(kind, limit, OPEN_RETRY_MS)
        self._open[kind] += 1

    def close(self, kind: str) -> None:
        """Count the end of a stream."""
        self._open[kind] -= 1


class Charge:
    """Part of a quota that an operation holds until it ends."""

    __slots__ = ("_in_flight_bytes", "_kind", "_use")

    def __init__(self, use: PrincipalUse, in_flight_bytes: int | None, kind: str = "") -> None:
        """It has begun with a size, unless that is None; it is a stream, if it has a kind."""
        self._use = use
        self._in_flight_bytes = in_flight_bytes
        self._kind = kind

    def reply(self, size_bytes: int) -> float:
        """Count a message of a stream; returns the time to wait before the next one, in ms."""
        return self._use.send(size_bytes)

    def end(self, outcome: object) -> None:
        """Give it back; count the bytes of the reply, if the outcome is one."""
        use = self._use
        if self._in_flight_bytes is not None:
            use.end(self._in_flight_bytes)
        if self._kind:
            use.close(self._kind)
        if use.counts_bytes:
            if isinstance(outcome, bytes):
                use.send(len(outcome))
            elif isinstance(outcome, Message):
                use.send(outcome.ByteSize())


def charge(use: PrincipalUse, request: Message, size_bytes: int) -> Charge | None:
    """Count an operation of that size; None: it holds nothing. Raises `QuotaExceeded`."""
    kind = STREAMS.get(type(request), "")
    if not kind:
        if isinstance(request, kv.WatchRequest):
            return Charge(use, None)
        if not use.is_limited:
            return None
        use.begin(size_bytes)
        return Charge(use, size_bytes)
    use.open(kind)
    try:
        if kind == "scans":
            use.begin(size_bytes)
            return Charge(use, size_bytes, kind)
        use.admit(size_bytes)
        return Charge(use, None, kind)
    except QuotaExceeded:
        use.close(kind)
        raise


class Quotas:
    """The use of all principals of this process. Those that use nothing are forgotten."""

    def __init__(self, now_ms: Callable[[], float], message_bytes_max: int) -> None:
        """`now_ms` is a monotonic clock."""
        self._now_ms = now_ms
        self._message_bytes_max = message_bytes_max
        # One that callers still refer to stays the same when it is forgotten.
        self._by_name: WeakValueDictionary[str, PrincipalUse] = WeakValueDictionary()
        self._kept: dict[str, PrincipalUse] = {}
        self._sweep_count = SWEEP_COUNT_MIN

    def use_of(self, name: str, quota: Quota) -> PrincipalUse:
        """Return the use of a principal, limited by this quota from now on.

        If its callers have different ones, because they have proved different subjects, that of the
        last call counts.

        All anonymous callers are one principal, whose name is empty.
        """
        use = self._by_name.get(name)
        if use is None:
            use = self._by_name[name] = PrincipalUse(self._now_ms, self._message_bytes_max)
        if use.quota is not quota:
            use.limit(quota)
        if name not in self._kept:
            self._kept[name] = use
            if len(self._kept) > self._sweep_count:
                self._sweep()
        return use

    def _sweep(self) -> None:
        """Forget idle principals; rarely enough that a new one costs little."""
        self._kept = {name: use for name, use in self._kept.items() if not use.is_idle}
        self._sweep_count = max(SWEEP_COUNT_MIN, 2 * len(self._kept))


def _exceeded(name: str, limit: int, retry_after_ms: int) -> QuotaExceeded:
    return QuotaExceeded(
        f"the quota {name} of the caller is {limit}: nothing was applied",
        retry_after_ms=retry_after_ms,
        quota=name,
    )
