"""Commits and groups for tests, and what a scan of a view reads."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from shalekv.errors import ShaleError
from shalekv.protocol.entry import NO_EXPIRY, Entry, Kind
from shalekv.protocol.transaction import Change
from shalekv.read.memtable import Memtable
from shalekv.read.read_set import ReadSet
from shalekv.read.scan import scan_slices
from shalekv.read.sorted_runs import MemoryRun
from shalekv.read.version import ReadView
from shalekv.read.watermark import Watermark
from shalekv.write.commit import Commit, Group, Receipt
from shalekv.write.group_commit import GroupCommit
from shalekv.write.pending_writes import NewestState, PendingWrites
from tests.kit.inline_runtime import InlineClock, finish, gathered

NOW_MS = 1_000


def put(key: bytes, value: bytes = b"v", expire_at_ms: int = NO_EXPIRY) -> Change:
    return Change(key, Kind.PUT, value, expire_at_ms)


def tombstone(key: bytes) -> Change:
    return Change(key, Kind.TOMBSTONE)


def unsettled(_: Receipt | ShaleError) -> None:
    """Ignore the outcome of a commit: no caller waits for it."""


def commit_of(seq: int, *changes: Change) -> Commit:
    return Commit(changes, seq, unsettled)


def group_of(wal_id: int, *commits: Commit) -> Group:
    return Group(wal_id, commits)


def run_of(seq: int, *changes: Change) -> MemoryRun:
    return group_of(0, commit_of(seq, *changes)).run


def range_delete(seq: int, *ranges: tuple[bytes, bytes]) -> MemoryRun:
    """The run of a commit that deletes these ranges."""
    tombstones = [Entry(start, seq, Kind.RANGE_TOMBSTONE, end) for start, end in ranges]
    return MemoryRun.from_newest({}, max_seq=seq, range_tombstones=tombstones)


def landed(*runs: MemoryRun, into: Memtable | None = None) -> Memtable:
    """A memtable in which these runs have landed in their order, without a gap."""
    memtable = Memtable() if into is None else into
    for run in runs:
        memtable.land(run)
        memtable.extend_prefix(run)
    return memtable


def drop(memtable: Memtable, seq: int) -> int:
    """Drop what the levels hold up to `seq`; return how many segments were dropped."""
    return finish(memtable.drop_through(seq, InlineClock()))


def merge(memtable: Memtable) -> None:
    finish(memtable.merge_runs(InlineClock()))


def read(
    view: ReadView,
    *,
    start: bytes = b"",
    end: bytes = b"",
    reverse: bool = False,
    now_ms: int = NOW_MS,
) -> list[tuple[bytes, bytes]]:
    """The keys and values that a scan of `view` yields."""
    slices = slices_of(view, start=start, end=end, reverse=reverse, now_ms=now_ms)
    return pairs(entry for entries in slices for entry in entries)


def slices_of(
    view: ReadView,
    *,
    start: bytes = b"",
    end: bytes = b"",
    reverse: bool = False,
    now_ms: int = NOW_MS,
) -> list[list[Entry]]:
    """The slices of a scan of what is in memory."""
    slices = scan_slices(view, start=start, end=end, reverse=reverse, now_ms=now_ms)
    return finish(gathered(slices))


async def nothing_compacted() -> int | None:
    """No slot of the WAL is in the levels."""
    return None


def is_put(entry: Entry | None) -> bool:
    return entry is not None and entry.kind is Kind.PUT


def pairs(entries: Iterable[Entry]) -> list[tuple[bytes, bytes]]:
    return [(entry.key, entry.value) for entry in entries]


def keys_of(entries: Sequence[Entry]) -> list[bytes]:
    return [entry.key for entry in entries]


class MemoryDatabase:
    """A database without levels: its groups are in a memtable."""

    log: GroupCommit  # built with this database

    def __init__(self, memtable: Memtable, *, seq: int, wal_id: int | None) -> None:
        self.memtable = memtable
        self.watermark = Watermark(seq=seq, wal_id=wal_id)

    def newest_state(self, pending_writes: PendingWrites, read_set: ReadSet) -> NewestState:
        """The state after all pending writes."""
        view = self.memtable.view(self.watermark.seq, self.watermark.wal_id)
        durable = view.with_newer(self.log.runs_ahead)
        return NewestState(pending_writes, durable, NOW_MS, read_set)

    def land(self, group: Group) -> None:
        """Take a durable group into memory."""
        self.memtable.land(group.run)

    def publish(self, group: Group) -> None:
        """Show a group to scans."""
        self.memtable.extend_prefix(group.run)
