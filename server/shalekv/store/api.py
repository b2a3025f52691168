"""What the system asks of an object store.

The one primitive that safety rests on is `create`: create this object if it does not exist. Its
three outcomes are three types, because "no answer" is neither success nor failure: whoever gets
`Unknown` must read the object and compare (see `shalekv.store.cas`).

Names are relative to the root of the database, such as ``wal/00000000000000000007.sst``.
Objects never change once they exist. All methods may be cancelled; a cancelled `create` may
still take effect.
"""

from __future__ import annotations

import abc
import enum
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from shalekv.errors import InvalidRequest
from shalekv.protocol.manifest import CasMode

NO_METADATA: Mapping[str, str] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Created:
    """This call created the object, and it is durable."""


@dataclass(frozen=True, slots=True)
class Exists:
    """An object with this name was there before; it is durable. It may be our own: compare."""


@dataclass(frozen=True, slots=True)
class Unknown:
    """No answer. The object may exist, may appear later, or may never."""

    cause: str


CreateOutcome = Created | Exists | Unknown


@dataclass(frozen=True, slots=True)
class ObjectInfo:
    """What a store says about an object without its bytes."""

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
class Recovered:
    """What `ObjectStore.recover` came to."""

    completed: int = 0  # creates that a crash had left half done, and that stand now
    unfinished: int = 0  # ... that nobody can complete: whoever wants the name takes it over
    forgotten: int = 0  # records of objects that were collected
    aborted: int = 0  # uploads in parts that were begun long ago


# Tells of a name whether its object was collected, or may be: nobody will ever miss it.
IsCollected = Callable[[str], bool]


def nothing_is_collected(_name: str) -> bool:
    """The `IsCollected` of those who do not know."""
    return False


class ObjectStore(abc.ABC):
    """An object store, rooted at one database.

    Every method may raise `StoreUnavailable` (try again; of a `create`: nothing was created),
    `StoreRefused` (somebody has to mend a permission, a name, a clock first; likewise) and,
    where a name is given, every reading method raises `ObjectNotFound`. A name that could
    leave the database, or that some store could not create, is an `InvalidRequest`. Lists and
    reads are strongly consistent: they see every object whose `create` had ended when they were
    sent. What they show is durable.
    """

    url: str  # without credentials: it stands in logs and errors
    sent: RequestCounts  # what was sent so far, and is paid for
    cas_mode: CasMode = CasMode.NATIVE  # how `create` decides; a database keeps to one mode

    @abc.abstractmethod
    async def create(
        self, name: str, data: bytes, metadata: Mapping[str, str] = NO_METADATA
    ) -> CreateOutcome:
        """Create `name` with `data` if no object has that name.

        Raises `StoreBroken` when nothing more may be written by this process; the object may
        then exist or not, as after `Unknown`.
        """

    @abc.abstractmethod
    async def get(self, name: str) -> StoredObject:
        """The whole object."""

    @abc.abstractmethod
    async def get_range(self, name: str, offset: int, length: int) -> bytes:
        """At most `length` bytes from `offset` on; a negative `offset` counts from the end.

        A range that reaches past the end is cut short there, one that begins behind it is empty;
        a negative `offset` that reaches before the beginning means the beginning.
        """

    @abc.abstractmethod
    async def head(self, name: str) -> ObjectInfo:
        """What the store says about the object."""

    @abc.abstractmethod
    def list(self, prefix: str, *, start_after: str = "") -> AsyncIterator[ObjectInfo]:
        """The objects whose names begin with `prefix` and come after `start_after`, by name.

        `prefix` ends in ``/``: a folder. Names order by their bytes. The list is read from the
        store when iteration begins, page by page; a page shows what was there at one moment of it.
        """

    @abc.abstractmethod
    async def delete(self, names: Iterable[str]) -> None:
        """Delete these objects; a name that no object has is not an error."""

    @abc.abstractmethod
    async def now_ms(self) -> int:
        """The store's own clock, milliseconds since the Unix epoch."""

    @abc.abstractmethod
    async def recover(self, is_collected: IsCollected = nothing_is_collected) -> Recovered:
        """Complete what crashed creates have left; forget what belonged to collected objects.

        Where `create` is one request, there is nothing to do, and no request is sent, but for
        collectors: these also end uploads that nobody will complete. Safe at any time, in any
        number of processes at once.
        """

    @abc.abstractmethod
    async def close(self) -> None:
        """Release connections and threads. The store must not be used afterwards."""


class PlainStore(ObjectStore):
    """A store that can also overwrite and copy: what two-phase compare-and-swap is built on."""

    @abc.abstractmethod
    async def put(self, name: str, data: bytes, metadata: Mapping[str, str] = NO_METADATA) -> None:
        """Make `data` the object `name`, whatever was there. After an error it is so, or not."""

    @abc.abstractmethod
    async def copy(self, source: str, destination: str) -> None:
        """Make `destination` what `source` is, metadata included, whatever was there.

        All or nothing, and durable. Raises `ObjectNotFound` when there is no `source`.
        """


# --- arguments
# Checks of the arguments that every store takes, so that all stores refuse the same ones.


# Ends the names of files that a local store is still writing. No store creates an object with it.
TEMP_SUFFIX = ".tmp"

# Object stores stop at 1,024 bytes with the root of the database before the name; file systems
# at 255 bytes per part, of which a temporary file takes some more than the object.
MAX_NAME_BYTES = 512
MAX_PART_BYTES = 200


def check_name(name: str) -> None:
    """Raise `InvalidRequest` unless `name` stays below the root of the database.

    What a list shows passes, foreign names included, for the collector deletes those.
    """
    parts = name.split("/")
    if any(part in {"", ".", ".."} for part in parts) or "\0" in name:
        raise InvalidRequest(
            "name",
            f"{name!r} is not the name of an object: names look like wal/0001.sst, and have no "
            "empty, '.' or '..' parts",
        )


def check_new_name(name: str) -> None:
    """Raise `InvalidRequest` unless every store can create an object of this name."""
    check_name(name)
    parts = name.split("/")
    longest_bytes = max(len(part.encode("utf-8", "surrogateescape")) for part in parts)
    if not name.isascii() or not name.isprintable() or "\\" in name:
        raise InvalidRequest("name", f"{name!r} has characters other than printable ASCII")
    if longest_bytes > MAX_PART_BYTES or len(name) > MAX_NAME_BYTES:
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
    """First byte and length of what `get_range` takes from an object of `size_bytes`.

    A negative `offset` counts from the end; one that reaches before the beginning means it.
    """
    if length < 0:
        raise InvalidRequest("length", f"{length} is negative")
    first = max(0, size_bytes + offset) if offset < 0 else min(offset, size_bytes)
    return first, min(length, size_bytes - first)


# --- requests
# The requests that a process has sent to a store, by the classes in which stores charge for them.
#
# Whoever talks to a store counts here what goes over the wire: the pages of a list, the parts of
# an upload, and every attempt of a request that is repeated.


REFUSALS_MS = 1_000.0


class RequestKind(enum.StrEnum):
    """What a request is charged as."""

    WRITE = "write"  # put, copy, part of an upload, its beginning and its end
    LIST = "list"  # one page
    READ = "read"  # get, ranged get, head
    DELETE = "delete"  # of one object or of a batch
    RECORD_WRITE = "record_write"  # insert, update or delete in a transactional store
    RECORD_READ = "record_read"


class RequestCounts:
    """A number for each kind, which only grows."""

    def __init__(self) -> None:
        """Nothing was sent yet."""
        self._counts = dict.fromkeys(RequestKind, 0)
        self._total: RequestCounts | None = None
        self.was_accepted = False  # the store has answered a request of this process with success
        self.refusals_ms = REFUSALS_MS  # so long a refused request is sent again, if it was

    def add(self, kind: RequestKind, count: int = 1) -> None:
        """Count `count` requests more."""
        self._counts[kind] += count
        if self._total is not None:
            self._total.add(kind, count)

    def add_up_in(self, total: RequestCounts) -> None:
        """Whatever is counted from now on is counted in `total`, too."""
        self._total = total

    @property
    def by_kind(self) -> Mapping[RequestKind, int]:
        """All kinds, those that were never sent included. It follows what is counted later."""
        return MappingProxyType(self._counts)

    @property
    def total(self) -> int:
        """Requests of all kinds."""
        return sum(self._counts.values())
