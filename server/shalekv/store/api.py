"""The interface of object stores, and the checks of arguments that all of them share.

All safety rests on one primitive, `create`: create this object if it does not exist. Its three
outcomes are three types, because "no answer" is neither success nor failure: after `Unknown` the
caller must read the object and compare its bytes, as `CasStore.claim` in `shalekv.store.cas` does.

An object is *collected* when a collector deletes it because nothing needs it any more.

Names are relative to the root of the database, such as ``wal/00000000000000000007.sst``. Objects
never change once they exist. Stores do not verify what they read: objects have checksums of their
own, which `shalekv.format` verifies when it decodes them. All methods may be cancelled; a cancelled
`create` may still take effect.
"""

from __future__ import annotations

import abc
import enum
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from weakref import ref

from shalekv.errors import InvalidRequest
from shalekv.protocol.manifest import CasMode
from shalekv.telemetry.activity import CURRENT, SentCounts

NO_METADATA: Mapping[str, str] = MappingProxyType({})

# Suffix of files that a local store is still writing. No store creates an object with this suffix.
TEMP_SUFFIX = ".tmp"

# Object stores allow 1,024 bytes including the root of the database. File systems allow 255 bytes
# per part, and the name of a temporary file is some bytes longer than that of its object.
MAX_NAME_BYTES = 512
MAX_PART_BYTES = 200

_NO_PARTS = frozenset(("", ".", ".."))  # what no part of a name may be

REFUSAL_RETRY_MS = 1_000.0

# Whether the object of this name was collected, or may be, so that nothing needs it any more.
IsCollected = Callable[[str], bool]


def nothing_is_collected(_name: str) -> bool:
    """Return False: the `IsCollected` of callers that do not know which names were collected."""
    return False


class RequestKind(enum.StrEnum):
    """Class of requests by which object stores charge."""

    WRITE = "write"  # put, copy, part of an upload, its beginning and its end
    LIST = "list"  # one page
    READ = "read"  # get, ranged get, head
    DELETE = "delete"  # of one object or of a batch
    RECORD_WRITE = "record_write"  # insert, update or delete in a transactional store
    RECORD_READ = "record_read"


class RequestCounts:
    """Requests that this process has sent to a store, by kind; the numbers only grow.

    Stores count what goes over the wire: each page of a list, each part of an upload, and each
    attempt of a request that is repeated. Calls by folder are counted in `shalekv.store.counting`.

    It also holds the state of `shalekv.store.retry.RefusalPolicy`, which decides whether a refused
    request is repeated, since all users of a store share both.
    """

    def __init__(self) -> None:
        """Start with zero requests of each kind."""
        self._counts = dict.fromkeys(RequestKind, 0)
        # Of activities that nobody was charged with; those that are gone disappear.
        self._untaken: set[ref[SentCounts]] = set()
        self._total: RequestCounts | None = None
        self.was_accepted = False  # the store has answered a request of this process with success
        self.refusal_retry_ms = REFUSAL_RETRY_MS  # retry refusals for so long, if `was_accepted`

    def add(self, kind: RequestKind, count: int = 1) -> None:
        """Count `count` more requests of this kind, also in the activity of the running task."""
        activity = CURRENT.get()
        sent = None if activity is None else activity.sent
        self._add(kind, count, sent)
        if sent is not None:
            sent[kind] = sent.get(kind, 0) + count

    def _add(self, kind: RequestKind, count: int, sent: SentCounts | None) -> None:
        self._counts[kind] += count
        if sent is not None and not sent:  # its first request
            self._untaken.add(ref(sent, self._untaken.discard))
        if self._total is not None:
            self._total._add(kind, count, sent)  # noqa: SLF001 - of the same class

    def take(self, sent: SentCounts) -> bool:
        """Take the requests of an activity to charge them; returns whether nobody has before.

        They are its `sent`, those of this process. What it sends later has no activity.
        """
        untaken = ref(sent)
        if untaken not in self._untaken:
            return False
        self._untaken.remove(untaken)
        return True

    def untaken(self) -> Iterator[SentCounts]:
        """Yield the requests of activities that have not been taken and still exist."""
        for each in [*self._untaken]:
            sent = each()
            if sent is not None:
                yield sent

    def add_up_in(self, total: RequestCounts) -> None:
        """Count everything from now on in `total`, too."""
        self._total = total

    @property
    def by_kind(self) -> Mapping[RequestKind, int]:
        """A live view of the counts, with every kind, also those that were never sent."""
        return MappingProxyType(self._counts)

    @property
    def total(self) -> int:
        """Requests of all kinds."""
        return sum(self._counts.values())


@dataclass(frozen=True, slots=True)
class Created:
    """This call created the object, and it is durable."""


@dataclass(frozen=True, slots=True)
class Exists:
    """An object of this name already existed; it is durable. It may be our own: compare."""


@dataclass(frozen=True, slots=True)
class Unknown:
    """No answer. The object may exist, may appear later, or may never."""

    cause: str


CreateOutcome = Created | Exists | Unknown


@dataclass(frozen=True, slots=True)
class ObjectInfo:
    """Name, size and time of an object, without its bytes."""

    name: str
    size_bytes: int
    modified_ms: int  # by the store's clock


@dataclass(frozen=True, slots=True)
class StoredObject:
    """An object. `metadata` is empty on stores that keep none: never rely on it."""

    info: ObjectInfo
    data: bytes
    metadata: Mapping[str, str] = field(default_factory=lambda: NO_METADATA)


@dataclass(frozen=True, slots=True)
class Repaired:
    """Counts of what `ObjectStore.repair` has done."""

    completed: int = 0  # interrupted creates that were completed
    unfinished: int = 0  # interrupted creates that cannot be completed; the names can be taken over
    forgotten: int = 0  # records of collected objects that were deleted
    aborted: int = 0  # old multipart uploads that were aborted


class ObjectStore(abc.ABC):
    """An object store, rooted at one database.

    A `create` without an answer returns `Unknown`. The errors of the methods are:

        StoreUnavailable   retry; after a `create`, nothing was created
        StoreRefused       an operator must first fix a permission, a name or a clock; after a
                           `create`, nothing was created
        StoreBroken        this process must not write any more; whether the object of a `create`
                           exists is unknown
        ObjectNotFound     from methods that read the object of a name
        InvalidRequest     a name that could leave the database, or that some store could not create

    After an error of `delete`, some of the objects may be deleted.

    Lists and reads are strongly consistent: they see every object whose `create` had ended
    before they were sent. Everything that they return is durable.
    """

    url: str  # without credentials: it appears in logs and errors
    sent: RequestCounts  # requests that were sent so far, which the provider charges for
    cas_mode: CasMode = CasMode.NATIVE  # how `create` decides; a database keeps to one mode

    @abc.abstractmethod
    async def create(
        self, name: str, data: bytes, metadata: Mapping[str, str] = NO_METADATA
    ) -> CreateOutcome:
        """Create `name` with `data` if no object has that name."""

    @abc.abstractmethod
    async def get(self, name: str) -> StoredObject:
        """Read the whole object."""

    @abc.abstractmethod
    async def get_range(self, name: str, offset: int, length: int) -> bytes:
        """Read at most `length` bytes from `offset`; a negative `offset` counts from the end.

        A range that reaches past the end is cut there. A range that begins behind the end is
        empty. A negative `offset` that reaches before the beginning means the beginning.
        """

    reads_now = False  # whether `get_range_now` may return bytes

    def get_range_now(self, name: str, offset: int, length: int) -> bytes | None:
        """Return what `get_range` returns, if that takes no waiting; None: use `get_range`.

        Never blocks and never fails. It counts as a request if it returns bytes. This one returns
        None: most stores are at the other end of a network.
        """
        del name, offset, length
        return None

    @abc.abstractmethod
    async def head(self, name: str) -> ObjectInfo:
        """Read the size and the time of an object, without its bytes."""

    @abc.abstractmethod
    def list(self, prefix: str, *, start_after: str = "") -> AsyncIterator[ObjectInfo]:
        """List the objects whose names begin with `prefix` and sort after `start_after`.

        `prefix` is a folder: it ends in ``/``. The order is that of the bytes of the names. Pages
        are requested while the caller iterates; each page shows the state at one moment of its
        request.
        """

    @abc.abstractmethod
    async def delete(self, names: Iterable[str]) -> None:
        """Delete these objects; a name without an object is not an error."""

    @abc.abstractmethod
    async def now_ms(self) -> int:
        """Read the store's own clock: milliseconds since the Unix epoch."""

    @abc.abstractmethod
    async def repair(self, is_collected: IsCollected = nothing_is_collected) -> Repaired:
        """Complete creates that crashed half-way; delete records of collected objects.

        Where `create` is one request there is nothing to complete, and no request is sent, except
        for collectors (callers that pass an `is_collected` of their own): for them this also
        aborts abandoned multipart uploads. Safe at any time, in any number of processes at once.
        """

    @abc.abstractmethod
    async def close(self) -> None:
        """Release connections and threads. The store must not be used afterwards."""


class PlainStore(ObjectStore):
    """A store that can also overwrite and copy, without conditions.

    Two-phase compare-and-swap needs no more of the store of the objects: see
    `shalekv.store.two_phase.store`.
    """

    @abc.abstractmethod
    async def put(self, name: str, data: bytes, metadata: Mapping[str, str] = NO_METADATA) -> None:
        """Write `data` as the object `name`, replacing any object there.

        After an error, it may or may not have been written.
        """

    @abc.abstractmethod
    async def copy(self, source: str, destination: str) -> None:
        """Copy `source` with its metadata to `destination`, replacing any object there.

        Atomic and durable. Raises `ObjectNotFound` when there is no `source`.
        """


def check_name(name: str) -> None:
    """Raise `InvalidRequest` unless `name` stays below the root of the database.

    Names that a list shows pass, also those of other programs: the collector deletes these.
    """
    if not _NO_PARTS.isdisjoint(name.split("/")) or "\0" in name:
        raise InvalidRequest(
            "name",
            f"{name!r} is not the name of an object: names look like wal/0001.sst, and have no "
            "empty, '.' or '..' parts",
        )


def check_new_name(name: str) -> None:
    """Raise `InvalidRequest` unless every store can create an object of this name."""
    check_name(name)
    if not name.isascii() or not name.isprintable() or "\\" in name:
        raise InvalidRequest("name", f"{name!r} has characters other than printable ASCII")
    if max(map(len, name.split("/"))) > MAX_PART_BYTES or len(name) > MAX_NAME_BYTES:
        raise InvalidRequest(
            "name",
            f"{name!r} is too long: at most {MAX_NAME_BYTES} bytes, {MAX_PART_BYTES} per part",
        )
    if name.endswith(TEMP_SUFFIX):
        raise InvalidRequest("name", f"{name!r} ends in {TEMP_SUFFIX}, as unfinished files do")


def check_prefix(prefix: str) -> None:
    """Raise `InvalidRequest` unless `prefix` is a folder: a name and a slash."""
    if not prefix.endswith("/"):
        raise InvalidRequest("prefix", f"{prefix!r} is not a folder: it does not end in /")
    check_name(prefix[:-1])


def byte_range(size_bytes: int, offset: int, length: int) -> tuple[int, int]:
    """Return the first byte and the length that `get_range` reads of an object of `size_bytes`.

    Raises `InvalidRequest` when `length` is negative.
    """
    if length < 0:
        raise InvalidRequest("length", f"{length} is negative")
    first = max(0, size_bytes + offset) if offset < 0 else min(offset, size_bytes)
    return first, min(length, size_bytes - first)
