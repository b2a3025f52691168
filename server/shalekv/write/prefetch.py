"""Prefetch: reads from the levels what a write depends on, before the write is decided."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import TypeAlias

from shalekv.errors import ObjectNotFound, ShaleError
from shalekv.protocol.entry import KeyRange
from shalekv.protocol.transaction import Needs
from shalekv.read.memtable import Memtable
from shalekv.read.read_set import RangeInLevels, ReadSet, counted_in_levels, range_in_levels
from shalekv.read.version import PinnedVersion
from shalekv.read.version_set import VersionSet
from shalekv.write.group_commit import GroupCommit
from shalekv.write.pending_writes import NewestState, PendingWrites

ExplainMissing: TypeAlias = Callable[[ObjectNotFound, PinnedVersion], Awaitable[ShaleError]]


COUNTING_MAX = 4  # range deletes at a time that read which keys they count: each holds megabytes


class Prefetch:
    """Builds read sets, and checks whether they are still current."""

    def __init__(
        self,
        *,
        levels: VersionSet,
        log: GroupCommit,
        memtable: Memtable,
        state: Callable[[PendingWrites, ReadSet], NewestState],
        now_ms: Callable[[], int],
        explain_missing: ExplainMissing,
    ) -> None:
        """`now_ms` is logical time; `explain_missing` finds the reason why an object is missing."""
        self._levels = levels
        self._log = log
        self._memtable = memtable
        self._state = state
        self._now_ms = now_ms
        self._explain_missing = explain_missing
        self._counting = asyncio.Semaphore(COUNTING_MAX)

    def known(self, needs: Needs) -> ReadSet | None:
        """The read set for `needs`, if it is known without a request to the store; else None."""
        if self._log.pending_writes.is_loading and (needs.keys or needs.ranges):
            return None
        pinned = self._levels.current
        if needs.record_key and pinned.may_hold_record(needs.record_key):
            return None
        if not pinned.version.is_empty:
            if needs.ranges:
                return None
            if any(not self._is_kept(key) and pinned.may_hold(key) for key in needs.keys):
                return None
        return self._levels.pruner.empty_read_set

    def lacks_record(self, record_key: bytes) -> bool:
        """Return whether the levels certainly have no idempotency record with this key."""
        return not self._levels.current.may_hold_record(record_key)

    async def fetch(self, needs: Needs) -> ReadSet:
        """Read the read set for `needs` from the levels. It holds while `is_current` is true.

        Raises `RangeTooCostly`, `StoreError`, `CorruptObject`, and as `explain_missing`.
        """
        if not needs.counts_ranges:
            return await self._fetch(needs)
        async with self._counting:
            return await self._fetch(needs)

    async def _fetch(self, needs: Needs) -> ReadSet:
        while True:
            if needs.keys or needs.ranges:
                # A load is found in the levels once it has landed.
                await self._log.pending_writes.wait_loaded()
            pinned, token = self._levels.current, self._levels.pruner.token
            keys = [key for key in needs.keys if not self._is_kept(key)]
            try:
                found = await pinned.find_many(keys) if keys and not pinned.version.is_empty else {}
                ranges = {
                    each: await self._range_in_levels(pinned, each, is_counted=needs.counts_ranges)
                    for each in needs.ranges
                }
                record = await pinned.find_record(needs.record_key) if needs.record_key else None
            except ObjectNotFound as missing:
                # Not `explain`, which may wait until `token`, held here, is released.
                raise await self._explain_missing(missing, pinned) from missing
            read_set = ReadSet(token, found, ranges, record)
            if self.is_current(read_set, needs):
                return read_set

    async def _range_in_levels(
        self, pinned: PinnedVersion, keys: KeyRange, *, is_counted: bool
    ) -> RangeInLevels:
        pending_writes = self._log.pending_writes
        in_memory = self._state(pending_writes, self._levels.pruner.empty_read_set).durable
        levels, now_ms = replace(in_memory, runs=(), pinned=pinned), self._now_ms()
        if is_counted:
            return await counted_in_levels(levels, keys, now_ms=now_ms)
        return await range_in_levels(
            levels,
            keys,
            now_ms=now_ms,
            is_shadowed=self._is_kept,
            is_hidden=lambda key: pending_writes.get(key) is not None,
        )

    def _is_kept(self, key: bytes) -> bool:
        """Return whether memory has a version of `key`, and keeps it while the current token is
        held.

        Versions that are not durable do not count: their commits may be decided again, and not
        write the key then.
        """
        found = self._memtable.get(key)
        return found is not None and found.seq > self._levels.pruner.droppable_seq

    def is_current(self, read_set: ReadSet, needs: Needs) -> bool:
        """Return whether memory holds everything newer than the version that `read_set` was read
        from.
        """
        if read_set.token is not self._levels.pruner.token:
            return not (needs.keys or needs.ranges or needs.record_key)
        return not (self._log.pending_writes.is_loading and (needs.keys or needs.ranges))
