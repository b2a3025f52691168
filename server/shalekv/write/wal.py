"""What a log stands on: WAL objects in the store, or records that a majority of safekeepers has."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from shalekv.core.trouble import Trouble
from shalekv.format.sst import Sst
from shalekv.protocol.opening import Occupant, WriterId
from shalekv.store.reachability import UNREACHABLE_AFTER_MS
from shalekv.write.commit import WalContents


@dataclass(frozen=True, slots=True)
class MemberReport:
    """How far one safekeeper is, as the writer knows it."""

    member_id: bytes
    address: str
    is_connected: bool
    flushed_lsn: int  # 0: not known
    archived_wal_id: int | None  # all objects up to it were seen in the store by this member
    is_full: bool
    is_next: bool  # it is a member of the next set, while a change is under way
    problem: str = ""  # why it does not follow


@dataclass(frozen=True, slots=True)
class QuorumReport:
    """The state of a quorum WAL, as the writer knows it."""

    generation: int
    members: tuple[MemberReport, ...]
    last_lsn: int
    committed_lsn: int
    last_wal_id: int | None  # that a record goes into
    archived_wal_id: int | None  # all objects up to it are in the store
    unarchived_bytes: int  # of records whose objects are not in the store
    archiver_id: bytes  # empty: nobody is appointed
    problem: str = ""  # why no writes are accepted


class LogSlots(Protocol):
    """Where `GroupCommit` puts its groups."""

    on_unavailable: Callable[[], None]  # to be set by who waits for groups, see `check_available`

    @property
    def own(self) -> WriterId:
        """Who puts them there."""
        ...

    @property
    def is_quorum(self) -> bool:
        """Whether a majority of safekeepers has them, before they are objects of the store.

        Then groups become durable strictly in their order, none without those before it, and
        several may share an object.
        """
        ...

    @property
    def parallel_max(self) -> int | None:
        """So many groups may be in flight; None: as `max_parallel_writes` says."""
        ...

    def begin(self, next_wal_id: int) -> None:
        """The first group is about to be taken: `next_wal_id` is the object behind the prefix."""
        ...

    def check_available(self) -> None:
        """Raise `QuorumUnavailable` or `LogFull` while nothing can become durable.

        When that begins, `on_unavailable` is called once: nobody should wait any longer for what
        is in flight, although it goes on, and may land.
        """
        ...

    def take(self, size_bytes: int, *, is_load: bool) -> int:
        """The WAL object of the next group, which is created next.

        The same as before, or the next one. A load is alone in its object.
        """
        ...

    async def create(self, wal_id: int, contents: WalContents, *, position: int) -> Occupant | None:
        """Make a group durable. None: it is. Otherwise who has the slot: never with a quorum.

        `position` is how many groups were taken before it: with a quorum records stand in the
        order in which groups were taken, whenever they come here. Repeats until the outcome is
        known.
        Raises `Fenced` when another writer has taken over (then the outcome is not known), and
        as `WalSlots.create`.
        """
        ...

    async def archive(self, wal_id: int | None = None) -> None:
        """Return when the object, and all before it, are objects of the store.

        None: all that has landed before this call. An object that is still open is ended for
        that. Raises what ends the log, and `QuorumUnavailable` when it cannot be archived now.
        """
        ...

    async def held(self, wal_id: int) -> Sst | None:
        """What has landed of an object that may not be in the store yet, as one SST.

        None: it is in the store (or was there). The object may grow until a later one is taken.
        """
        ...

    def report(self) -> QuorumReport | None:
        """The state of the quorum; None: there is none."""
        ...

    def trouble(self, after_ms: float = UNREACHABLE_AFTER_MS) -> Trouble | None:
        """The reason why groups do not become durable, if that has been so for `after_ms`."""
        ...

    async def run(self) -> None:
        """What goes on beside the writer, until cancelled or closed.

        Raises what ends the log, also when nothing is written (`Fenced`).
        """
        ...

    async def close(self) -> None:
        """Let go of connections. REQUIRES: nothing is in flight, `run` has ended."""
        ...
