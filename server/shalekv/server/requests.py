"""Validation of requests: from protobuf messages to the values that the engine works with.

Every check raises `InvalidRequest` with the path of the field before any work is done. Requests
that are transactions are converted in `server.transactions`. Page tokens, which say where a scan
continues, are at the end.

Layout of a page token, numbers least significant byte first:

    0   seal 16
    16  id u64 of a view that this server keeps; left out at a snapshot
    ..  the last key of the page

The seal is a BLAKE2b of the rest and of all that the token is bound to, keyed with the secret of
the access policy. As long as no policy is stored, there is no key: then anybody can make a token,
and what keeps a scan in its range is that the range is checked, as that of any other scan.
"""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from hmac import compare_digest
from operator import attrgetter
from typing import NamedTuple, TypeAlias, TypeVar

from shalekv.clock import Clock
from shalekv.errors import DeadlinePassed, InvalidRequest, PageExpired
from shalekv.format.coding import crc32c
from shalekv.format.records import CLIENT_KEY_BYTES_MAX
from shalekv.protocol.entry import KEY_BYTES_MAX, NO_EXPIRY, KeyRange, Kind, prefix_end
from shalekv.protocol.transaction import Change, Puts
from shalekv.server.service import Call
from shalekv.settings import LimitSettings
from shalekv.v1 import kv_pb2

AnswerT = TypeVar("AnswerT")
WriteRequest: TypeAlias = (
    kv_pb2.PutRequest
    | kv_pb2.DeleteRequest
    | kv_pb2.DeleteRangeRequest
    | kv_pb2.WriteRequest
    | kv_pb2.TxnRequest
)
LevelValue: TypeAlias = "kv_pb2.ReadLevel.ValueType"
DurabilityValue: TypeAlias = "kv_pb2.Durability.ValueType"
# Copied from their enums: an access by name costs half as much as looking up a key.
COMMITTED = kv_pb2.READ_LEVEL_COMMITTED
LINEARIZABLE = kv_pb2.READ_LEVEL_LINEARIZABLE
UNCOMMITTED = kv_pb2.READ_LEVEL_UNCOMMITTED
DURABLE = kv_pb2.DURABILITY_DURABLE
MEMORY = kv_pb2.DURABILITY_MEMORY
QUORUM = kv_pb2.DURABILITY_QUORUM
ARCHIVED = kv_pb2.DURABILITY_ARCHIVED
SNAPSHOT_ID_BYTES = 16
_LEVELS = frozenset(kv_pb2.ReadLevel.values())
_DURABILITIES = frozenset(kv_pb2.Durability.values())

_SEAL_BYTES = 16
_PERSON = b"shalekv page"
_BOUND = struct.Struct("<16s??4I")
_VIEW_ID = struct.Struct("<Q")
_BYTES_0_7 = 46  # of a token of version 0.7, at least, without the key
_PUT = Kind.PUT
_PLAIN = frozenset(("put", "delete"))  # changes that need no transaction
CHANGES_AT_ONCE = 1_000  # converted before other tasks may run: about a millisecond
_new = tuple.__new__  # what `Change()` calls in the end, at half the cost
_TTL_MS = attrgetter("ttl_ms")


class PutFields(NamedTuple):
    """Paths of the fields of a put, for errors."""

    key: str = "key"
    value: str = "value"
    ttl_ms: str = "ttl_ms"


PUT_FIELDS = PutFields()
PUT_CHANGE_FIELDS = PutFields("put.key", "put.value", "put.ttl_ms")


def check_key(key: bytes, field: str) -> bytes:
    """Return the key, which must have 1 byte to 64 KiB."""
    if not key:
        raise InvalidRequest(field, "a key must not be empty")
    if len(key) > KEY_BYTES_MAX:
        raise InvalidRequest(field, f"{len(key)} bytes, and a key has {KEY_BYTES_MAX} at most")
    return key


def check_keys(request: kv_pb2.BatchGetRequest, limits: LimitSettings) -> list[bytes]:
    """Return the keys of a batch get."""
    keys = [*request.keys]
    check_count(len(keys), "keys", limits)
    if not all(keys) or max(map(len, keys)) > KEY_BYTES_MAX:
        for index, key in enumerate(keys):
            check_key(key, f"keys[{index}]")
    return keys


def put_change(
    message: kv_pb2.PutRequest | kv_pb2.PutChange,
    limits: LimitSettings,
    now_ms: Callable[[], int],
    fields: PutFields = PUT_FIELDS,
) -> Change:
    """Convert a put without a precondition; its ttl begins at the logical time `now_ms`."""
    key, value, ttl_ms = message.key, message.value, message.ttl_ms
    is_sound = 0 < len(key) <= KEY_BYTES_MAX and len(value) <= limits.value_bytes_max
    if ttl_ms or not is_sound:
        check_put(message, fields, limits)
    return _new(Change, (key, _PUT, value, now_ms() + ttl_ms if ttl_ms else NO_EXPIRY))


def delete_change(request: kv_pb2.DeleteRequest) -> Change:
    """Convert a delete without a precondition that is not counted."""
    return Change(check_key(request.key, "key"), Kind.TOMBSTONE)


def _are_plain(messages: Sequence[kv_pb2.Change]) -> bool:
    """Return whether all are puts and deletes, so that they need not be a transaction."""
    return all(message.WhichOneof("change") in _PLAIN for message in messages)


def write_changes(
    request: kv_pb2.WriteRequest, limits: LimitSettings, now_ms: Callable[[], int]
) -> Puts | list[Change] | None:
    """Convert a batch of puts and deletes, each key once: the last change of a key wins.

    Returns None if the batch has other changes as well, and so has to be a transaction.
    """
    check_count(len(request.changes), "changes", limits)
    puts = _usual_puts(request.changes, limits)
    if puts is not None:
        return _last_puts(puts, limits)
    if not _are_plain(request.changes):
        return None
    return _last_changes(_changes(request.changes, 0, limits, now_ms), limits)


async def write_changes_in_turns(
    request: kv_pb2.WriteRequest, limits: LimitSettings, now_ms: Callable[[], int], clock: Clock
) -> Puts | list[Change] | None:
    """Convert a large batch as `write_changes`; other tasks run after each `CHANGES_AT_ONCE`."""
    check_count(len(request.changes), "changes", limits)
    puts, changes, count = Puts([], []), list[Change](), 0
    while messages := request.changes[count : count + CHANGES_AT_ONCE]:
        more = _usual_puts(messages, limits)
        if more is not None and not changes:
            puts = Puts([*puts.keys, *more.keys], [*puts.values, *more.values])
        else:  # from now on, or since an earlier turn, there are changes of other kinds
            if more is None and not _are_plain(messages):
                return None
            changes = changes or [*puts]
            changes += more or _changes(messages, count, limits, now_ms)
        count += len(messages)
        await clock.sleep_ms(0)
    by_key = _last_changes(changes, limits) if changes else _last_puts(puts, limits)
    await clock.sleep_ms(0)
    return by_key


def _usual_puts(messages: Sequence[kv_pb2.Change], limits: LimitSettings) -> Puts | None:
    """Convert changes that are sound puts without a ttl, column by column: that costs a third.

    Returns None if there are other changes, or errors, among them.
    """
    puts = [message.put for message in messages]  # of another change: a put that is empty
    keys, values = [put.key for put in puts], [put.value for put in puts]
    is_usual = (
        all(keys)
        and max(map(len, keys)) <= KEY_BYTES_MAX
        and max(map(len, values)) <= limits.value_bytes_max
        and not any(map(_TTL_MS, puts))
    )
    return Puts(keys, values) if is_usual else None


def _changes(
    messages: Sequence[kv_pb2.Change], first: int, limits: LimitSettings, now_ms: Callable[[], int]
) -> list[Change]:
    """Convert puts and deletes, of which the first is number `first` of its request."""
    return [_change(each, at, limits, now_ms) for at, each in enumerate(messages, first)]


def _change(
    message: kv_pb2.Change, at: int, limits: LimitSettings, now_ms: Callable[[], int]
) -> Change:
    try:  # field paths are built for errors only: a batch may have thousands of changes
        if message.HasField("put"):
            return put_change(message.put, limits, now_ms, PUT_CHANGE_FIELDS)
        return Change(check_key(message.delete.key, "delete.key"), Kind.TOMBSTONE)
    except InvalidRequest as error:
        raise within(f"changes[{at}]", error) from None


def _last_puts(puts: Puts, limits: LimitSettings) -> Puts:
    """Return the last put of each key."""
    check_bytes(puts.payload_bytes, "changes", limits)
    if len({*puts.keys}) == len(puts):
        return puts
    by_key = dict(zip(puts.keys, puts.values, strict=True))
    return Puts([*by_key], [*by_key.values()])


def _last_changes(changes: list[Change], limits: LimitSettings) -> list[Change]:
    """Return the last change of each key."""
    size_bytes = sum([len(key) + len(value) for key, _, value, _ in changes])
    check_bytes(size_bytes, "changes", limits)
    by_key = {change[0]: change for change in changes}
    return changes if len(by_key) == len(changes) else list(by_key.values())


def durability(value: DurabilityValue, durable: DurabilityValue = DURABLE) -> DurabilityValue:
    """Resolve the durability that a write asks for, as the reply reports it.

    `durable` is that of the log, DURABLE or QUORUM, which DURABLE and the default become.
    """
    if value not in _DURABILITIES:
        raise InvalidRequest("durability", f"{value} is not a known value")
    if value == QUORUM != durable:
        problem = "this database has no safekeepers: use DURABLE"
        raise InvalidRequest("durability", problem)
    return value if value in (MEMORY, ARCHIVED) else durable


def read_level(header: kv_pb2.RequestHeader) -> LevelValue:
    """Check the header of a read, and return its read level or the default, COMMITTED."""
    check_header(header)
    return header.read_level or COMMITTED


def condition_level(header: kv_pb2.RequestHeader) -> LevelValue:
    """Return the read level of a condition: LINEARIZABLE by default, COMMITTED at least.

    With LINEARIZABLE the writer confirms that it still owns the database before it reports the
    result of a transaction that has written nothing.
    """
    if header.read_level == UNCOMMITTED:
        problem = "a condition is not judged by less than COMMITTED"
        raise InvalidRequest("header.read_level", problem)
    return header.read_level or LINEARIZABLE


def check_header(header: kv_pb2.RequestHeader) -> None:
    """Refuse unknown values and lengths out of bounds, rather than ignore them."""
    if header.read_level not in _LEVELS:
        problem = f"{header.read_level} is not a known value"
        raise InvalidRequest("header.read_level", problem)
    length = len(header.snapshot_id)
    if length not in (0, SNAPSHOT_ID_BYTES):
        problem = f"{length} bytes, and the id of a snapshot has {SNAPSHOT_ID_BYTES}"
        raise InvalidRequest("header.snapshot_id", problem)
    length = len(header.idempotency_key)
    if length > CLIENT_KEY_BYTES_MAX:
        problem = f"{length} bytes, and an idempotency key has {CLIENT_KEY_BYTES_MAX} at most"
        raise InvalidRequest("header.idempotency_key", problem)


def check_write(request: WriteRequest, call: Call, clock: Clock) -> None:
    """Check the header of a write, if it has one, and that its deadline has not passed."""
    if request.HasField("header"):
        header = request.header
        check_header(header)
        if header.snapshot_id:
            raise InvalidRequest("header.snapshot_id", "a snapshot is read, and never written")
    if call.deadline_ms is not None:
        check_deadline(call, clock)


async def answer_in_time(
    answer: Awaitable[AnswerT], call: Call, clock: Clock, explain: Callable[[], str]
) -> AnswerT:
    """Await `answer` until the deadline of the call. REQUIRES: it applies nothing.

    Raises `DeadlinePassed` when time is up; `explain` says what took so long.
    """
    if call.deadline_ms is None:
        return await answer
    left_ms = call.answer_within_ms(clock.monotonic_ms())
    with suppress(TimeoutError):  # not chained to our error: it refers to this task
        async with asyncio.timeout(None if left_ms is None else left_ms / 1_000):
            return await answer
    raise DeadlinePassed(f"no answer by the deadline of the call: {explain()}")


def check_deadline(call: Call, clock: Clock) -> None:
    """Raise `DeadlinePassed` if the deadline of the call has passed already."""
    if call.deadline_ms is not None and call.deadline_ms <= clock.monotonic_ms():
        raise DeadlinePassed("the deadline had passed when the call arrived: nothing was done")


def key_range(message: kv_pb2.KeyRange, field: str = "range") -> KeyRange:
    """Convert a range or prefix to an interval."""
    for name in ("start", "end", "prefix"):
        length = len(getattr(message, name))
        if length > KEY_BYTES_MAX:
            problem = f"{length} bytes, and a key has {KEY_BYTES_MAX} at most"
            raise InvalidRequest(f"{field}.{name}", problem)
    if message.prefix:
        if message.start or message.end:
            raise InvalidRequest(f"{field}.prefix", "a prefix excludes start and end")
        return KeyRange(message.prefix, prefix_end(message.prefix))
    if message.end and message.start > message.end:
        raise InvalidRequest(f"{field}.start", "the start of the range is after its end")
    return KeyRange(message.start, message.end)


def deleted_range(message: kv_pb2.KeyRange, field: str = "range", *, advice: str = "") -> KeyRange:
    """Convert the range of a range delete, which must not be unbounded by mistake."""
    keys = key_range(message, field)
    if not keys.start and not keys.end:
        raise InvalidRequest(field, f"names neither start, end nor prefix{advice}")
    return keys


def check_put(
    message: kv_pb2.PutRequest | kv_pb2.PutChange, fields: PutFields, limits: LimitSettings
) -> None:
    """Check key, value and ttl of a put."""
    check_key(message.key, fields.key)
    length = len(message.value)
    if length > limits.value_bytes_max:
        problem = f"{length} bytes, and value_bytes_max is {limits.value_bytes_max}"
        raise InvalidRequest(fields.value, problem)
    check_ttl(message.ttl_ms, fields.ttl_ms, limits)


def check_ttl(ttl_ms: int, field: str, limits: LimitSettings) -> None:
    """Check the time to live of a value."""
    if ttl_ms > limits.ttl_ms_max:
        raise InvalidRequest(field, f"{ttl_ms} ms, and ttl_ms_max is {limits.ttl_ms_max}")


def check_count(count: int, field: str, limits: LimitSettings) -> None:
    """Check that there are 1 to `batch_count_max` of something."""
    if not count:
        raise InvalidRequest(field, "at least one is needed")
    if count > limits.batch_count_max:
        problem = f"{count} of them, and batch_count_max is {limits.batch_count_max}"
        raise InvalidRequest(field, problem)


def check_bytes(size_bytes: int, field: str, limits: LimitSettings) -> None:
    """Check that keys and values have `batch_bytes_max` bytes at most."""
    if size_bytes > limits.batch_bytes_max:
        problem = f"{size_bytes} bytes, and batch_bytes_max is {limits.batch_bytes_max}"
        raise InvalidRequest(field, problem)


def within(path: str, error: InvalidRequest) -> InvalidRequest:
    """Return the same error with its field below `path`."""
    return InvalidRequest(f"{path}.{error.field}".rstrip("."), error.problem)


class PageToken(NamedTuple):
    """Position of a scan: the next page begins behind `last_key`.

    `view` is the id of a view that this server keeps; None: the scan is at a snapshot, which any
    server can read.
    """

    view: int | None
    last_key: bytes

    def rest(self, keys: KeyRange, *, reverse: bool) -> KeyRange:
        """Return the part of `keys` after this page."""
        if reverse:
            return KeyRange(keys.start, self.last_key)
        return KeyRange(self.last_key + b"\0", keys.end)


@dataclass(frozen=True, slots=True)
class PageSeal:
    """Binding of the page tokens of one scan to its database, caller, range and order."""

    database_id: bytes
    principal: str  # name of the caller; empty: anonymous
    secret: bytes = field(repr=False)  # of the access policy; empty: none is stored
    keys: KeyRange

    def encode(self, token: PageToken, request: kv_pb2.ScanRequest) -> bytes:
        """Encode a token for the caller of this scan."""
        rest = (b"" if token.view is None else _VIEW_ID.pack(token.view)) + token.last_key
        return self.seal(rest, request) + rest

    def decode(self, request: kv_pb2.ScanRequest) -> PageToken:
        """Decode the token of a request that continues this scan.

        Raises `InvalidRequest` if it was not given out for this scan and this caller, and
        `PageExpired` if that was before there was a policy, or by a version before this one.
        """
        token = request.page_token
        seal, rest = token[:_SEAL_BYTES], token[_SEAL_BYTES:]
        is_altered = not compare_digest(self.seal(rest, request), seal)
        if is_altered and (_is_of_version_0_7(token) or self._is_unkeyed(seal, rest, request)):
            raise PageExpired(
                "this page token was given out before the database had an access policy, or by an "
                "earlier version of the server. Begin the scan again"
            )
        id_bytes = 0 if request.header.snapshot_id else _VIEW_ID.size
        last_key, (start, end) = rest[id_bytes:], self.keys
        if is_altered or not last_key or last_key < start or (end and last_key >= end):
            raise InvalidRequest("page_token", "was not given out for this scan")
        return PageToken(_VIEW_ID.unpack_from(rest)[0] if id_bytes else None, last_key)

    def _is_unkeyed(self, seal: bytes, rest: bytes, request: kv_pb2.ScanRequest) -> bool:
        """Return whether the token was given out when there was no secret, nor, perhaps, names."""
        unkeyed = [replace(self, secret=b"", principal=name) for name in ("", self.principal)]
        return seal in [each.seal(rest, request) for each in unkeyed]

    def seal(self, rest: bytes, request: kv_pb2.ScanRequest) -> bytes:
        """Return the seal of a token whose bytes behind the seal are `rest`."""
        start, end = self.keys
        name = self.principal.encode(errors="surrogatepass")
        snapshot_id = request.header.snapshot_id
        lengths = len(name), len(snapshot_id), len(start), len(end)
        bound = _BOUND.pack(self.database_id, request.reverse, request.keys_only, *lengths)
        sealed = b"".join((bound, name, snapshot_id, start, end, rest))
        key = self.secret
        return blake2b(sealed, digest_size=_SEAL_BYTES, key=key, person=_PERSON).digest()


def _is_of_version_0_7(token: bytes) -> bool:
    """Return whether this is an intact token of version 0.7 or earlier: a CRC-32C, and the rest."""
    return len(token) > _BYTES_0_7 and crc32c(token[4:]) == int.from_bytes(token[:4], "little")
