"""The interface of an engine that reads need; writers and replicas implement it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Protocol

from shalekv.errors import ObjectNotFound, ShaleError
from shalekv.protocol.entry import Entry
from shalekv.read.memtable import Memtable
from shalekv.read.snapshot_views import SnapshotViews
from shalekv.read.version import PinnedVersion, ReadView
from shalekv.read.watermark import Watermark

# Drops views of reads until the given function returns False: it says whether they keep too many
# entries in memory that were compacted.
ShedViews = Callable[[Callable[[], bool]], Awaitable[None]]


async def shed_nothing(_is_too_much: Callable[[], bool]) -> None:
    """Do nothing: the default of a process that keeps no views."""


class ReadEngine(Protocol):
    """The state of a database in this process, as far as it is known here."""

    @property
    def database_id(self) -> bytes:
        """The id of the database, 16 bytes."""
        ...

    @property
    def epoch(self) -> int:
        """The writer epoch that replies report."""
        ...

    @property
    def watermark(self) -> Watermark:
        """The watermark of the log: how far it is applied and visible."""
        ...

    @property
    def memtable(self) -> Memtable:
        """Entries that are not compacted yet."""
        ...

    @property
    def pinned(self) -> PinnedVersion:
        """The current version of the levels, for reads that begin now."""
        ...

    @property
    def held_bytes_max(self) -> int:
        """Limit of the bytes that older views keep in memory, and the memtable has dropped."""
        ...

    @property
    def newest_seq(self) -> int:
        """The greatest sequence number of the newest state. Raises `NotTheWriter` at a replica."""
        ...

    @property
    def staleness_ms(self) -> int:
        """Milliseconds: the committed state has all that was acknowledged longer ago than this."""
        ...

    @property
    def is_pushed(self) -> bool:
        """Return whether commits come to this process without polls: `catch_up` brings none
        sooner.
        """
        ...

    @property
    def snapshots(self) -> SnapshotViews:
        """The states of snapshots."""
        ...

    def now_ms(self) -> int:
        """Return the logical time by which a read of the present state judges expiry.

        It is in milliseconds since the Unix epoch, and never less than before. The state may
        change, so ask for the time together with the state, before any other task runs.
        """
        ...

    def check_serving(self) -> None:
        """Raise the error that has ended this engine, if it has ended."""
        ...

    def committed(self, key: bytes) -> Entry | None:
        """Return the newest durable entry of `key` in memory; None: the levels decide."""
        ...

    def newest(self, key: bytes) -> Entry | None:
        """Return the newest entry of `key` in memory, durable or not; None: the levels decide.

        Raises `NotTheWriter` at a replica.
        """
        ...

    async def committed_view(self) -> ReadView:
        """Return a view of the durable prefix, once that has all that was acknowledged here."""
        ...

    async def newest_view(self) -> ReadView:
        """Return a view of the whole state, durable or not. Raises `NotTheWriter` at a replica."""
        ...

    async def confirm(self) -> None:
        """Return when it is certain, by a request sent after this call, that nobody else writes.

        Raises `Fenced`, `StoreUnavailable`, and `NotTheWriter` at a replica.
        """
        ...

    async def archive(self) -> None:
        """Return when everything committed here is in the object store."""
        ...

    async def catch_up(self) -> None:
        """Poll for new commits now, and return after that, whatever the result."""
        ...

    async def explain(self, missing: ObjectNotFound, pinned: PinnedVersion) -> ShaleError:
        """Return the reason why an object of a version that is read is missing.

        `SnapshotNotFound`: the version was not protected any more; reads that begin from now on use
        another one.
        """
        ...
