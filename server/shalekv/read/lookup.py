"""Lookups in the levels: the newest entry of each key, with as few block reads as filters allow.

`find` reads one key, and `find_many` many keys in parallel. Both take a `Version`, the set of SSTs
of all levels that one manifest names.

The SSTs whose range contains the key are searched from the newest to the oldest: those of L0, then
at most one of each sorted run. In each of them, filter and index say which block may have the key.
The first entry that is found is the newest one. A search also ends at the first SST with a range
tombstone over the key, since everything in older SSTs is older than that.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Final, NamedTuple

from shalekv.concurrency import in_parallel
from shalekv.format.block import Block
from shalekv.format.columns import Section
from shalekv.format.filter import first_candidate, key_hash
from shalekv.format.index import BlockHandle
from shalekv.protocol.entry import Entry
from shalekv.protocol.manifest import Version
from shalekv.protocol.sst_table import SstInfo
from shalekv.read.sst_reader import OPENED_AT_ONCE, LevelSsts, OpenSst
from shalekv.telemetry.activity import CallActivity, current_call

FETCHED_AT_ONCE = 64  # requests of one caller; the read budget bounds those of all


class Unread(Enum):
    """The answer of a lookup that would have to fetch something."""

    UNREAD = "unread"


UNREAD: Final = Unread.UNREAD
KEYS_AT_ONCE = 128  # keys handled before other tasks may run: about 2 ms


async def find(ssts: LevelSsts, version: Version, key: bytes) -> Entry | None:
    """Return the newest entry of `key` in the levels; it may be a tombstone or expired.

    None: there is none, or a range tombstone hides all. Raises `CorruptObject`, `ObjectNotFound`
    and `StoreUnavailable`.
    """
    hashed = key_hash(key)
    sources = [*version.sources_of(key)]
    loaded: dict[bytes, OpenSst] = {}
    call = current_call()
    for at, info in enumerate(sources):
        if call is not None:
            call.ssts_searched += 1
        opened = loaded.get(info.id) or ssts.cached(info)
        if opened is None:
            # The SSTs below are probably not in memory, either: wait once, not for each.
            loaded = await ssts.open_many(sources[at:])
            opened = loaded[info.id]
        fragment = opened.range_tombstones.over(key)
        found = await _find_in_sst(ssts, opened, Section.POINTS, key, hashed, call)
        if found is not None:
            return found if fragment is None or found.seq >= fragment.seq else None
        if fragment is not None:
            return None  # everything further down is older
    return None


async def find_record(ssts: LevelSsts, version: Version, record_key: bytes) -> Entry | None:
    """Return the newest entry of a system record (see `shalekv.format.records`).

    It may be a tombstone or expired. Raises as `find`.
    """
    if not version.system:
        return None
    hashed = key_hash(record_key)
    opened = await ssts.open_many(version.system)
    call = current_call()
    for info in version.system:
        if call is not None:
            call.ssts_searched += 1
        found = await _find_in_sst(ssts, opened[info.id], Section.SYSTEM, record_key, hashed, call)
        if found is not None:
            return found
    return None


def find_now(ssts: LevelSsts, version: Version, key: bytes) -> Entry | Unread | None:
    """Return what `find` returns, if all that it needs is at hand; else `UNREAD`.

    That is what is in memory, and blocks that the store has without waiting. There is no error.
    """
    hashed = key_hash(key)
    sources = version.sources_of(key)
    usual = ssts.all_cached(sources)
    if usual is not None:
        return _find_in_usual(ssts, usual, key, hashed)
    for info in sources:
        opened = ssts.cached(info)
        if opened is None:
            return UNREAD
        found = None
        number = _candidate_block(ssts, opened, Section.POINTS, key, hashed)
        if number is not None:
            block = ssts.block_at_hand(opened, number)
            if block is None:
                return UNREAD
            found = block.find(key)
            if found is None:
                ssts.filter_counts.false_positives += opened.filter is not None
        fragment = opened.range_tombstones.over(key) if opened.range_tombstones else None
        if found is not None:
            return found if fragment is None or found.seq >= fragment.seq else None
        if fragment is not None:
            return None  # everything further down is older
    return None


def _find_in_usual(
    ssts: LevelSsts, sources: Sequence[OpenSst], key: bytes, hashed: int
) -> Entry | Unread | None:
    """Return what `find_now` returns, where no SST has range tombstones."""
    counts = ssts.filter_counts
    filters = [opened.filter for opened in sources]
    at = first_candidate(filters, hashed, 0)
    counts.negatives += at
    while at < len(filters):
        opened = sources[at]
        counts.positives += opened.filter is not None
        number = opened.index.locate(Section.POINTS, key)
        if number is not None:
            block = ssts.block_at_hand(opened, number)
            if block is None:
                return UNREAD
            found = block.find(key)
            if found is not None:
                return found
            counts.false_positives += opened.filter is not None
        after = at + 1
        at = first_candidate(filters, hashed, after)
        counts.negatives += at - after
    return None


def may_hold(ssts: LevelSsts, version: Version, key: bytes) -> bool:
    """Return False if cached metadata proves that `find` returns None, and else True.

    Nothing is fetched: an SST whose metadata is not cached may have the key.
    """
    hashed = key_hash(key)
    for info in version.sources_of(key):
        opened = ssts.cached(info)
        if (
            opened is None
            or _candidate_block(ssts, opened, Section.POINTS, key, hashed) is not None
        ):
            return True
        if opened.range_tombstones.over(key) is not None:
            return False
    return False


def may_hold_record(ssts: LevelSsts, version: Version, record_key: bytes) -> bool:
    """Return False if cached metadata proves that `find_record` returns None, and else True."""
    hashed = key_hash(record_key)
    for info in version.system:
        opened = ssts.cached(info)
        if opened is None:
            return True
        if _candidate_block(ssts, opened, Section.SYSTEM, record_key, hashed) is not None:
            return True
    return False


async def _find_in_sst(
    ssts: LevelSsts,
    opened: OpenSst,
    section: Section,
    key: bytes,
    hashed: int,
    call: CallActivity | None,
) -> Entry | None:
    """Return the newest entry of `key` in one SST, which a range tombstone may hide."""
    number = _candidate_block(ssts, opened, section, key, hashed)
    if number is None:
        return None
    block = ssts.block_at_hand(opened, number)
    if call is not None:
        call.blocks_cached += block is not None
        call.blocks_fetched += block is None
    if block is None:
        block = await ssts.block(opened, number)
    found = block.find(key)
    if found is None:
        ssts.filter_counts.false_positives += opened.filter is not None
    return found


def _candidate_block(
    ssts: LevelSsts, opened: OpenSst, section: Section, key: bytes, hashed: int
) -> int | None:
    """Return the number of the block that may have `key`, by filter and index; None: no block."""
    if opened.filter is not None:
        counts = ssts.filter_counts
        if not opened.filter.may_contain_hash(hashed):
            counts.negatives += 1
            return None
        counts.positives += 1
    return opened.index.locate(section, key)


@dataclass(slots=True)
class _BlockSearch:
    """The search of a block for the keys that may be in it."""

    sst_id: bytes
    number: int
    handle: BlockHandle
    has_filter: bool
    keys: list[bytes] = field(default_factory=list)
    found: dict[bytes, Entry | None] = field(default_factory=dict)

    @property
    def is_searched(self) -> bool:
        """Return whether the block was searched."""
        return bool(self.found)

    def run(self, block: Block) -> None:
        """Search the block for the keys."""
        self.found = {key: block.find(key) for key in self.keys}


class _Step(NamedTuple):
    """Answers of filter, index and range tombstones of one SST about a key."""

    search: _BlockSearch | None  # None: the SST has no entry of the key
    hidden_below_seq: int  # by a range tombstone of this SST; `NOT_HIDDEN`: by none


NOT_HIDDEN = -1
UNPROBED = _Step(None, NOT_HIDDEN)  # in place of a step that is not known yet


async def find_many(ssts: LevelSsts, version: Version, keys: Sequence[bytes]) -> dict[bytes, Entry]:
    """Return what `find` returns, for each of many keys; keys not found are missing.

    Reads every block once, and many at a time.
    """
    routes = await _Routes(ssts, version).find(keys)
    results: dict[bytes, Entry] = {}
    while routes:
        # Each round reads one more block for every key: most are done after the first.
        wanted = {id(route[0].search): route[0].search for route in routes.values()}
        await _read(
            ssts, [search for search in wanted.values() if search and not search.is_searched]
        )
        routes = await _advance(ssts, routes, results)
    return results


class _Routes:
    """Finds, for each of many keys, its route: the blocks that may have it, newest first."""

    def __init__(self, ssts: LevelSsts, version: Version) -> None:
        self._ssts = ssts
        self._version = version
        self._routes: dict[bytes, list[_Step]] = {}
        # By SST: the keys that may be in it, their hashes, and its ranks in their routes.
        self._keys_by_sst: dict[bytes, tuple[SstInfo, list[tuple[bytes, int, int]]]] = {}

    async def find(self, keys: Sequence[bytes]) -> dict[bytes, deque[_Step]]:
        """Return the routes; keys that no block can hold have none."""
        for count, key in enumerate(dict.fromkeys(keys)):
            self._add_key(key)
            await _yield_sometimes(count)
        unopened = [*self._keys_by_sst.values()]
        call = current_call()
        if call is not None:
            call.ssts_searched += len(unopened)

        async def work() -> None:
            while unopened:
                # Each worker holds the metadata of one SST at a time, since it may take a megabyte.
                await self._probe(*unopened.pop())

        await in_parallel(work, min(len(unopened), OPENED_AT_ONCE))
        found = {}
        for count, (key, steps) in enumerate(self._routes.items()):
            route = _blocks_to_search(steps)
            if route:
                found[key] = route
            await _yield_sometimes(count)
        return found

    def _add_key(self, key: bytes) -> None:
        """Note the key for each SST whose range contains it."""
        hashed = key_hash(key)
        rank = -1
        for rank, info in enumerate(self._version.sources_of(key)):
            self._keys_by_sst.setdefault(info.id, (info, []))[1].append((key, hashed, rank))
        self._routes[key] = [UNPROBED] * (rank + 1)

    async def _probe(self, info: SstInfo, probed_keys: Sequence[tuple[bytes, int, int]]) -> None:
        """Put the step of this SST into the routes of these keys."""
        ssts = self._ssts
        opened = await ssts.metadata(info)
        searches: dict[int, _BlockSearch] = {}
        for count, (key, hashed, rank) in enumerate(probed_keys):
            number = _candidate_block(ssts, opened, Section.POINTS, key, hashed)
            search = None
            if number is not None:
                search = searches.get(number)
                if search is None:
                    has_filter = opened.filter is not None
                    search = _BlockSearch(info.id, number, opened.index[number], has_filter)
                    searches[number] = search
                search.keys.append(key)
            fragment = opened.range_tombstones.over(key)
            hidden_below_seq = NOT_HIDDEN if fragment is None else fragment.seq
            self._routes[key][rank] = _Step(search, hidden_below_seq)
            await _yield_sometimes(count)


def _blocks_to_search(steps: Iterable[_Step]) -> deque[_Step]:
    """Return the steps that have a block, up to the first SST with a range tombstone over the key.

    Everything in older SSTs is older than that range tombstone.
    """
    route: deque[_Step] = deque()
    for step in steps:
        if step.search is not None:
            route.append(step)
        if step.hidden_below_seq != NOT_HIDDEN:
            break
    return route


async def _advance(
    ssts: LevelSsts, routes: dict[bytes, deque[_Step]], results: dict[bytes, Entry]
) -> dict[bytes, deque[_Step]]:
    """Take the results of a round; return the routes of keys that need another block."""
    left: dict[bytes, deque[_Step]] = {}
    for count, (key, route) in enumerate(routes.items()):
        while route:
            search, hidden_below_seq = route[0]
            assert search is not None
            if not search.is_searched:
                left[key] = route
                break
            route.popleft()
            found = search.found[key]
            if found is None:
                ssts.filter_counts.false_positives += search.has_filter
                continue
            if found.seq >= hidden_below_seq:
                results[key] = found
            break
        await _yield_sometimes(count)
    return left


async def _read(ssts: LevelSsts, searches: Sequence[_BlockSearch]) -> None:
    """Search these blocks; fetch adjacent ones with one request."""
    missing = []
    for count, search in enumerate(searches):
        held = ssts.cached_block(search.sst_id, search.number, search.handle.assigned_seq)
        if held is None:
            missing.append(search)
        else:
            search.run(held)
        await _yield_sometimes(count)
    groups = []
    for count, group in enumerate(_group_adjacent(missing, ssts.read_ahead_bytes_max)):
        search, *others = group
        block = None if others else ssts.block_now(search.sst_id, search.number, search.handle)
        if block is None:
            groups.append(group)
        else:
            search.run(block)
        await _yield_sometimes(count)

    call = current_call()
    if call is not None:
        fetched = sum(map(len, groups))
        call.blocks_cached += len(searches) - fetched
        call.blocks_fetched += fetched

    async def work() -> None:
        while groups:
            group = groups.pop()
            handles = [search.handle for search in group]
            blocks = await ssts.adjacent_blocks(group[0].sst_id, group[0].number, handles)
            for search, block in zip(group, blocks, strict=True):
                search.run(block)

    await in_parallel(work, min(len(groups), FETCHED_AT_ONCE))


def _group_adjacent(searches: Sequence[_BlockSearch], bytes_max: int) -> list[list[_BlockSearch]]:
    """Group blocks that are adjacent in an object, each group up to `bytes_max`."""
    groups: list[list[_BlockSearch]] = []
    after, group_bytes = (b"", 0), 0
    for search in sorted(searches, key=lambda search: (search.sst_id, search.number)):
        length = search.handle.length
        if (search.sst_id, search.number) != after or group_bytes + length > bytes_max:
            groups.append([])
            group_bytes = 0
        groups[-1].append(search)
        group_bytes += length
        after = search.sst_id, search.number + 1
    return groups


async def _yield_sometimes(count: int) -> None:
    """Let other tasks run after each `KEYS_AT_ONCE` keys; `count` numbers the keys from 0."""
    if count % KEYS_AT_ONCE == KEYS_AT_ONCE - 1:
        await asyncio.sleep(0)
