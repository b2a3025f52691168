"""The commits that a watch must report, from a scan of the whole WAL without index or feed."""

from __future__ import annotations

from collections import defaultdict
from typing import NamedTuple

from shalekv.format import names
from shalekv.format.sst import open_sst
from shalekv.protocol.entry import Entry, KeyRange, Kind
from shalekv.v1 import kv_pb2
from tests.kit.engine.databases import Database

WatchChange = kv_pb2.WatchChange


class Change(NamedTuple):
    """One change, as a watch reports it."""

    kind: int
    key: bytes
    value: bytes
    seq: int
    end: bytes


Commits = list[tuple[int, list[Change]]]
ValuesBefore = dict[tuple[int, bytes], bytes | None]  # by sequence number and key


def reported(commits: list[kv_pb2.WatchCommit], last_seq: int = 2**63) -> Commits:
    return [
        (commit.seq, [reported_change(each) for each in commit.changes])
        for commit in commits
        if commit.seq <= last_seq
    ]


def reported_change(change: WatchChange) -> Change:
    """Return a change of a reply, without the previous value."""
    entry = change.entry
    return Change(change.kind, entry.key, entry.value, entry.seq, change.end)


async def wal_entries(database: Database) -> list[Entry]:
    """Return all changes in the WAL by sequence number; range deletes come first in each commit."""
    found: list[Entry] = []
    database_id = (await database.manifest()).database_id
    for wal_id in await database.wal():
        name = names.wal_name(wal_id)
        sst = open_sst(name, database.data(name), database_id=database_id)
        found += [*sst.range_tombstones(), *sst.entries()]
    return sorted(found, key=lambda e: (e.seq, e.kind is not Kind.RANGE_TOMBSTONE, e.key))


async def expected_commits(
    database: Database, keys: KeyRange, start_seq: int = 1, last_seq: int = 2**63
) -> Commits:
    """Return the commits that touch a range, from `start_seq` to `last_seq`."""
    by_seq: dict[int, list[Change]] = defaultdict(list)
    for entry in await wal_entries(database):
        change = change_in(entry, keys)
        if change is not None and start_seq <= entry.seq <= last_seq:
            by_seq[entry.seq].append(change)
    return sorted(by_seq.items())


def change_in(entry: Entry, keys: KeyRange) -> Change | None:
    if entry.kind is Kind.RANGE_TOMBSTONE:
        start = max(entry.key, keys.start)
        end = min((each for each in (entry.value, keys.end) if each), default=b"")
        if end and start >= end:
            return None
        return Change(WatchChange.KIND_DELETE_RANGE, start, b"", entry.seq, end)
    if entry.key < keys.start or (keys.end and entry.key >= keys.end):
        return None
    kind = WatchChange.KIND_PUT
    if entry.kind is Kind.TOMBSTONE:
        kind = WatchChange.KIND_EXPIRED if entry.expire_at_ms else WatchChange.KIND_DELETE
    return Change(kind, entry.key, entry.value, entry.seq, b"")


async def values_before(database: Database) -> ValuesBefore:
    """Return the previous value for each change of a key, from the log alone."""
    state: dict[bytes, bytes] = {}
    found: ValuesBefore = {}
    commits: dict[int, list[Entry]] = {}
    for entry in await wal_entries(database):
        commits.setdefault(entry.seq, []).append(entry)
    for seq, entries in commits.items():
        before = dict(state)
        for entry in entries:  # range deletes come first
            if entry.kind is Kind.RANGE_TOMBSTONE:
                for key in [
                    k for k in state if k >= entry.key and (not entry.value or k < entry.value)
                ]:
                    del state[key]
                continue
            found[seq, entry.key] = before.get(entry.key)
            if entry.kind is Kind.PUT:
                state[entry.key] = entry.value
            else:
                state.pop(entry.key, None)
    return found
