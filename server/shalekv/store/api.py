"""What the system asks of an object store.

The one primitive that safety rests on is `create`: create this object if it does not exist. Its
three outcomes are three types, because "no answer" is neither success nor failure: whoever gets
`Unknown` must read the object and compare (see `shalekv.store.claim`).

Names are relative to the root of the database, such as ``wal/00000000000000000007.sst``.
Objects never change once they exist. All methods may be cancelled; a cancelled `create` may
still take effect.
"""

from __future__ import annotations

import abc
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from shalekv.protocol.manifest import CasMode
from shalekv.store.requests import RequestCounts

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
