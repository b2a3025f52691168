"""What reads need of an engine, the writer's or a replica's."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Protocol

from shalekv.errors import ObjectNotFound, ShaleError
from shalekv.protocol.entry import Entry
from shalekv.read.memtable import Memtable
from shalekv.read.snapshot_views import SnapshotViews
from shalekv.read.version import PinnedVersion, ReadView
from shalekv.read.watermark import Watermark


class Time(Protocol):
    """Logical time, by which values expire."""

    def now_ms(self) -> int:
        """Milliseconds since the Unix epoch; never less than before."""
        ...


class ReadEngine(Protocol):
    """The state of a database in this process, as far as it is known here."""

    shed_views: Callable[[], Awaitable[None]]  # to be set by who keeps views

    @property
    def database_id(self) -> bytes:
        """16 bytes."""
        ...

    @property
    def time(self) -> Time:
        """Logical time."""
        ...

    @property
    def prefix(self) -> Watermark:
        """How far the log is shown."""
        ...

    @property
    def memtable(self) -> Memtable:
        """What is not compacted."""
        ...

    @property
    def held(self) -> PinnedVersion:
        """The levels that a read uses that begins now."""
        ...

    @property
    def held_bytes_max(self) -> int:
        """So much may be compacted, and kept in memory by scans that began before."""
        ...

    @property
    def newest_seq(self) -> int:
        """The greatest sequence number of the newest state. Raises as `newest`."""
        ...

    @property
    def staleness_ms(self) -> int:
        """Everything that was acknowledged so long ago is in the committed state."""
        ...

    @property
    def is_told(self) -> bool:
        """Whether what is committed comes by itself: `catch_up` makes it come no sooner."""
        ...

    @property
    def snapshots(self) -> SnapshotViews:
        """What snapshots show."""
        ...

    def check_serving(self) -> None:
        """Raise what has ended this engine."""
        ...

    def committed(self, key: bytes) -> Entry | None:
        """The newest durable version of `key` in memory; None: what the levels hold counts."""
        ...

    def newest(self, key: bytes) -> Entry | None:
        """The same, durable or not. Raises `NotTheWriter` at a replica."""
        ...

    async def committed_view(self) -> ReadView:
        """The durable prefix, once it covers all that was acknowledged here before this call."""
        ...

    async def newest_view(self) -> ReadView:
        """Everything that is there, durable or not. Raises `NotTheWriter` at a replica."""
        ...

    async def confirm(self) -> None:
        """Return when it is sure, asked after this call, that nobody else writes.

        Raises `Fenced`, `StoreUnavailable`, and `NotTheWriter` at a replica.
        """
        ...

    async def archive(self) -> None:
        """Return when all that is committed here is in the object store."""
        ...

    async def catch_up(self) -> None:
        """Look for news now, and return when that was done, whatever came of it."""
        ...

    async def explain(self, missing: ObjectNotFound, held: PinnedVersion) -> ShaleError:
        """Why an object of a tree that is read is not there.

        `SnapshotNotFound`: the tree was not protected any more, and reads that begin from now on
        use another one.
        """
        ...
