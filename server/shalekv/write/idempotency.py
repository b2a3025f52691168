"""Idempotency keys: which requests were applied already, and which are in flight (I15).

A request is registered when it is queued, so that two copies in flight apply once. Its record
becomes durable in the same WAL object as its changes, so that it holds at the next writer, too.
Records are kept in memory until they are compacted.

A key belongs to its principal: `key_of_principal` keeps those of different principals apart.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from hashlib import blake2b

from shalekv.clock import Clock
from shalekv.errors import KeyExpired, KeyReused, ShaleError
from shalekv.format.records import (
    CLIENT_KEY_BYTES_MAX,
    IdempotencyRecord,
    client_key,
    decode_idempotency_record,
)
from shalekv.protocol.entry import Entry, Kind
from shalekv.read.sorted_runs import ENTRY_OVERHEAD_BYTES
from shalekv.write.commit import Commit, KeyedRequest, OnSettled, Receipt

DROPPED_AT_ONCE = 2_000  # records dropped before other tasks get to run
UUID_BYTES = 16
_TIME_BYTES = 6  # of a UUID of version 7: milliseconds since the Unix epoch, greatest byte first
_VERSION, _VARIANT = 7, 0b10
# UUIDs that seem older are not judged by age. So of keys of 16 random bytes that are no UUID, only
# 2 in a million are mistaken for one that has expired.
_UUID_AGE_MS_MAX = 366 * 86_400_000
_PERSON = b"shalekv once"


def key_of_principal(chosen: bytes, principal: str, *, has_policy: bool) -> bytes:
    """Return the key under which a request is known whose client has chosen `chosen`.

    That of an anonymous client, whose `principal` is empty, is what it has chosen. That of a
    principal is a hash of 64 bytes, the longest key that there is; so that nobody else can choose
    the same one, keys of 64 bytes are hashed for anonymous clients as well, once there is a policy.
    The hash depends on nothing else, so the next writer, or one with another policy, finds the
    record.
    """
    if not principal and not (has_policy and len(chosen) == CLIENT_KEY_BYTES_MAX):
        return chosen
    name = principal.encode(errors="surrogatepass")
    data = len(name).to_bytes(4, "little") + name + chosen
    return blake2b(data, digest_size=CLIENT_KEY_BYTES_MAX, person=_PERSON).digest()


@dataclass(slots=True)
class RequestInFlight:
    """A request that is not settled yet, and the callbacks of all calls that wait for it."""

    keyed: KeyedRequest
    commit: Commit | None = None
    waiting: list[OnSettled] = field(default_factory=list)

    def settle(self, outcome: Receipt | ShaleError) -> None:
        """Report the outcome to all calls that wait. Copies of the request are not charged."""
        remember, settle, *copies = self.waiting
        remember(outcome)
        settle(outcome)
        if copies and isinstance(outcome, Receipt):
            outcome = outcome._replace(bill=None)
        for settle in copies:
            settle(outcome)


@dataclass(frozen=True, slots=True)
class AppliedRequest:
    """A request that was applied, and its record."""

    seq: int
    record: IdempotencyRecord


class Idempotency:
    """The idempotency keys of one database."""

    def __init__(self, *, window_ms: int, now_ms: Callable[[], int]) -> None:
        """A key is remembered for `window_ms` of logical time, which `now_ms` returns."""
        self._window_ms = window_ms
        self._now_ms = now_ms
        self._records: dict[bytes, Entry] = {}  # by their keys, oldest first
        self._in_flight: dict[bytes, RequestInFlight] = {}
        self.size_bytes = 0

    def __len__(self) -> int:
        """The number of remembered keys, expired ones included."""
        return len(self._records)

    def expiry_ms(self) -> int:
        """Return when a key that is used now expires, milliseconds of logical time."""
        return self._now_ms() + self._window_ms

    def find(
        self,
        key: bytes,
        request_hash: bytes,
        record: Entry | None = None,
        *,
        chosen: bytes | None = None,
    ) -> AppliedRequest | RequestInFlight | None:
        """Look up the request with this key; None: it is new.

        `record` is the record in the levels, used if memory has none. `chosen` is the key of the
        client, if it is another one. Raises `KeyReused` and `KeyExpired`.
        """
        pending = self._in_flight.get(key)
        if pending is not None:
            self._check_same(pending.keyed.request_hash, request_hash)
            return pending
        entry = self._records.get(key) or record
        if entry is None or entry.kind is not Kind.PUT or self._is_forgotten(entry, self._now_ms()):
            self._check_age(key if chosen is None else chosen)
            return None
        found = decode_idempotency_record("an idempotency record", entry.value)
        self._check_same(found.request_hash, request_hash)
        if entry.expire_at_ms <= self._now_ms():
            raise self._expired()
        return AppliedRequest(entry.seq, found)

    def begin(self, keyed: KeyedRequest, settle: OnSettled) -> RequestInFlight:
        """Register a request that is about to be submitted.

        The caller passes `settle` of the result to the commit: it remembers the record of a success
        and then calls `settle`. REQUIRES: `find` has returned None, and no other task ran since.
        """

        def remember(outcome: Receipt | ShaleError) -> None:
            del self._in_flight[keyed.key]
            if isinstance(outcome, Receipt) and outcome.record is not None:
                begun_ms = keyed.expire_at_ms - self._window_ms
                self._remember(keyed.key, outcome.record, begun_ms)

        pending = RequestInFlight(keyed, waiting=[remember, settle])
        self._in_flight[keyed.key] = pending
        return pending

    def abandon(self, keyed: KeyedRequest) -> None:
        """Unregister a request that could not be submitted."""
        del self._in_flight[keyed.key]

    async def drop_through(self, seq: int, clock: Clock) -> None:
        """Drop records up to sequence number `seq`, which the levels hold."""
        oldest_first = list(self._records.items())  # and so by their numbers
        for count, (key, entry) in enumerate(oldest_first, 1):
            if entry.seq > seq:
                break
            if self._records.get(key) is entry:
                self._forget(key)
            if count % DROPPED_AT_ONCE == 0:
                await clock.sleep_ms(0)

    def land(self, records: Iterable[Entry]) -> None:
        """Remember records that are durable, in the order of their commits."""
        now_ms = self._now_ms()
        for entry in records:
            key = client_key(entry.key)
            if entry.kind is Kind.PUT:
                self._remember(key, entry, now_ms)
            else:
                self._forget(key)

    def _remember(self, key: bytes, entry: Entry, now_ms: int) -> None:
        """Add the newest record; it is `now_ms` or later."""
        records = self._records
        self._forget(key)  # so that the new one is the last
        records[key] = entry
        self.size_bytes += _accounted_bytes(entry)
        # Records that expired a whole window ago are dropped; until then a retry gets `KeyExpired`.
        # A record that was replayed late may be the last one, and be dropped at once.
        while records:
            oldest = next(iter(records))
            if not self._is_forgotten(records[oldest], now_ms):
                break
            self._forget(oldest)

    def _is_forgotten(self, entry: Entry, now_ms: int) -> bool:
        """Return whether the key may be used again, as if there had never been a record."""
        return entry.expire_at_ms + self._window_ms <= now_ms

    def _forget(self, key: bytes) -> None:
        entry = self._records.pop(key, None)
        if entry is not None:
            self.size_bytes -= _accounted_bytes(entry)

    def _check_same(self, known: bytes, request_hash: bytes) -> None:
        if known != request_hash:
            raise KeyReused(
                "this idempotency key was used for a request with other content: nothing was "
                "applied. Choose a new key for a new request"
            )

    def _check_age(self, key: bytes) -> None:
        """Raise `KeyExpired` for a UUID of version 7, which contains its time, that is too old."""
        if len(key) != UUID_BYTES or key[6] >> 4 != _VERSION or key[8] >> 6 != _VARIANT:
            return
        made_ms = int.from_bytes(key[:_TIME_BYTES], "big")
        age_ms = self._now_ms() - made_ms
        if self._window_ms <= age_ms <= _UUID_AGE_MS_MAX:
            raise self._expired()

    def _expired(self) -> KeyExpired:
        return KeyExpired(
            f"this idempotency key is older than the {self._window_ms // 1000} s of "
            "idempotency_window_s (or the clock of the client that made it is behind): whether its "
            "request was applied is not known any more, and this one was not. Read to find out"
        )


def _accounted_bytes(entry: Entry) -> int:
    return ENTRY_OVERHEAD_BYTES + len(entry.key) + len(entry.value)
