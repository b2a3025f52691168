"""Snapshots that come and go by the command `shalekv snapshot`, and what each of them holds.

What a snapshot holds is read from its objects alone, without the engine: it must be the same for as
long as the snapshot lives, and a state that the database went through.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from pathlib import Path

from shalekv.core.entry import Entry, Kind
from shalekv.core.key_range import KeyRange
from shalekv.core.loads import CommittedLoad, level_rows
from shalekv.core.manifest import Manifest
from shalekv.core.sst_table import SstInfo
from shalekv.core.tree import SYSTEM_LEVEL
from shalekv.format import names
from shalekv.format.load_record import decode_load
from shalekv.format.sst import open_sst
from tests.judging.commits import Between, Commits, State, Told, Violation
from tests.kit.processes.meanwhile import Meanwhile

LIVES = ("1h", "10m")  # none expires while it is looked at
HELD_MAX = 3

Held = dict[bytes, Entry]  # the newest put of each key that has one


@dataclass(slots=True)
class Seen:
    """A snapshot, and what it holds."""

    snapshot_id: str
    manifest: Manifest
    seq: int
    held: Held


class SnapshotLoad:
    """Creates, renews and deletes snapshots, one after the other."""

    def __init__(self, database: Meanwhile) -> None:
        """Nothing is created yet."""
        self._database = database
        self._alive: list[Seen] = []
        self._all: list[Seen] = []
        self._is_stopped = False
        self._passed = asyncio.Event()
        self.looks = 0

    def stop(self) -> None:
        """`run` returns soon."""
        self._is_stopped = True

    async def passed(self) -> None:
        """Wait until one more command has ended."""
        self._passed.clear()
        await self._passed.wait()

    async def run(self) -> None:
        """Create, renew and delete until `stop`."""
        number = 0
        while not self._is_stopped:
            number += 1
            ttl = LIVES[number % len(LIVES)]
            made = await self._run("create", "--name", f"number {number}", "--ttl", ttl)
            seen = await asyncio.to_thread(self._read, made)
            self._alive.append(seen)
            self._all.append(seen)
            if number % 2:
                renewed = self._alive[0]
                await self._run("renew", renewed.snapshot_id, "--ttl", "1h")
            if len(self._alive) > HELD_MAX:
                await self._look_and_delete(self._alive[number % 2])

    async def end(self) -> None:
        """Look at all snapshots that are left, and delete them."""
        while self._alive:
            await self._look_and_delete(self._alive[0])

    def check(self, commits: Commits) -> None:
        """Judge what the snapshots hold. Raises `Violation`."""
        ordered = sorted(self._all, key=lambda seen: seen.seq)
        states = commits.states(seen.seq for seen in ordered)
        for seen, state in zip(ordered, states, strict=True):
            _check(seen, state)

    async def _look_and_delete(self, seen: Seen) -> None:
        again = await asyncio.to_thread(self._read, seen.snapshot_id)
        if (again.seq, again.held) != (seen.seq, seen.held):
            raise Violation(f"snapshot {seen.snapshot_id} holds something else than before")
        self._alive.remove(seen)
        await self._run("delete", seen.snapshot_id)

    async def _run(self, *argv: str) -> str:
        command = await self._database.run("snapshot", *argv)
        self._passed.set()
        return command.stdout().strip()

    def _read(self, snapshot_id: str) -> Seen:
        self.looks += 1
        snapshots = {each.id.hex(): each for each in self._database.manifest().snapshots}
        if snapshot_id not in snapshots:
            raise Violation(f"snapshot {snapshot_id} is gone")
        found = snapshots[snapshot_id]
        manifest = self._database.manifest(found.manifest_id)
        entries = [
            entry
            for info in manifest.leveled_ssts
            if info.level != SYSTEM_LEVEL
            for entry in _entries_of(self._database.folder, manifest, info)
        ]
        seq = manifest.last_compacted_seq
        last = manifest.wal_id_last_seen
        for slot in range(manifest.first_uncompacted_wal_id, 0 if last is None else last + 1):
            found_there = _logged(self._database.folder, manifest, slot)
            entries += found_there
            seq = max(seq, *(entry.seq for entry in found_there), 0)
        return Seen(snapshot_id, manifest, seq, _newest(entries))


def _entries_of(folder: Path, manifest: Manifest, info: SstInfo) -> list[Entry]:
    name = names.level_name(info.id)
    sst = open_sst(
        name,
        (folder / name).read_bytes(),
        database_id=manifest.database_id,
        checksum=info.checksum,
        listed_seq=info.max_seq,
    )
    return [*sst.entries(), *sst.range_tombstones()]


def _logged(folder: Path, manifest: Manifest, slot: int) -> list[Entry]:
    """All that a WAL object commits, loads included."""
    name = names.wal_name(slot)
    sst = open_sst(name, (folder / name).read_bytes(), database_id=manifest.database_id)
    entries = [*sst.entries(), *sst.range_tombstones()]
    for record in sst.control_entries():
        pending = decode_load(name, record)
        load = CommittedLoad(pending.load_id, pending.ssts, record.seq, slot)
        for info in level_rows(load):
            entries += _entries_of(folder, manifest, info)
    return entries


def _newest(entries: list[Entry]) -> Held:
    newest: Held = {}
    for entry in entries:
        if entry.kind is Kind.RANGE_TOMBSTONE:
            continue
        other = newest.get(entry.key)
        if other is None or other.seq < entry.seq:
            newest[entry.key] = entry
    for entry in entries:
        if entry.kind is Kind.RANGE_TOMBSTONE:
            for key in [key for key in newest if _hides(entry, newest[key])]:
                del newest[key]
    return {key: entry for key, entry in newest.items() if entry.kind is Kind.PUT}


def _hides(tombstone: Entry, entry: Entry) -> bool:
    keys = KeyRange(tombstone.key, tombstone.value)
    is_inside = keys.start <= entry.key and (not keys.end or entry.key < keys.end)
    return is_inside and entry.seq < tombstone.seq


def _check(seen: Seen, state: State) -> None:
    """What has expired may be there still, or not."""
    for key in {*seen.held, *state.keys_in(KeyRange(b"", b""))}:
        entry = seen.held.get(key)
        told = None if entry is None else Told(entry.value, entry.seq)
        expected = state.find(key, Between(0, 2**63))
        if told not in expected:
            raise Violation(f"snapshot at {seen.seq}: {key!r} is {told}, expected {expected}")
