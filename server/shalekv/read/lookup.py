"""Finds keys in a tree: the newest version of each, with as few blocks read as filters allow."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from shalekv.concurrency import in_parallel
from shalekv.format.block import Block
from shalekv.format.columns import Section
from shalekv.format.filter import key_hash
from shalekv.format.index import BlockHandle
from shalekv.protocol.entry import Entry
from shalekv.protocol.manifest import Version
from shalekv.protocol.sst_table import SstInfo
from shalekv.read.sst_reader import OPENED_AT_ONCE, LevelSsts, OpenSst

FETCHED_AT_ONCE = 64  # requests of one caller; the read budget bounds those of all
KEYS_AT_ONCE = 128  # looked at before other tasks have their turn: about 2 ms


async def find(ssts: LevelSsts, tree: Version, key: bytes) -> Entry | None:
    """The newest version of `key` in the tree; may be a tombstone or expired.

    None: there is none, or a range tombstone hides all. Raises `CorruptObject`, `ObjectNotFound`
    and `StoreUnavailable`.
    """
    hashed = key_hash(key)
    sources = [*tree.sources_of(key)]
    loaded: dict[bytes, OpenSst] = {}
    for at, info in enumerate(sources):
        opened = loaded.get(info.id) or ssts.held(info)
        if opened is None:
            # What is missing here is probably missing below, too: one wait, not one for each.
            loaded = await ssts.open_many(sources[at:])
            opened = loaded[info.id]
        fragment = opened.range_tombstones.over(key)
        found = await _point(ssts, opened, Section.POINTS, key, hashed)
        if found is not None:
            return found if fragment is None or found.seq >= fragment.seq else None
        if fragment is not None:
            return None  # what stands further down is older
    return None


async def find_record(ssts: LevelSsts, tree: Version, record_key: bytes) -> Entry | None:
    """The newest version of a record of the system (see `shalekv.format.records`).

    May be a tombstone or expired. Raises what `find` does.
    """
    if not tree.system:
        return None
    hashed = key_hash(record_key)
    opened = await ssts.open_many(tree.system)
    for info in tree.system:
        found = await _point(ssts, opened[info.id], Section.SYSTEM, record_key, hashed)
        if found is not None:
            return found
    return None


def may_hold(ssts: LevelSsts, tree: Version, key: bytes) -> bool:
    """Whether `find` may find `key`, as far as can be told without reading anything."""
    hashed = key_hash(key)
    for info in tree.sources_of(key):
        opened = ssts.held(info)
        if opened is None or _candidate(ssts, opened, Section.POINTS, key, hashed) is not None:
            return True
        if opened.range_tombstones.over(key) is not None:
            return False
    return False


def may_hold_record(ssts: LevelSsts, tree: Version, record_key: bytes) -> bool:
    """The same of `find_record`."""
    hashed = key_hash(record_key)
    for info in tree.system:
        opened = ssts.held(info)
        if opened is None:
            return True
        if _candidate(ssts, opened, Section.SYSTEM, record_key, hashed) is not None:
            return True
    return False


async def _point(
    ssts: LevelSsts, opened: OpenSst, section: Section, key: bytes, hashed: int
) -> Entry | None:
    """The newest version of `key` in one SST."""
    number = _candidate(ssts, opened, section, key, hashed)
    if number is None:
        return None
    block = ssts.held_block(opened.info.id, number, opened.index.listed_seq)
    if block is None:
        block = await ssts.block(opened, number)
    found = block.find(key)
    if found is None:
        ssts.filter_counts.false_positives += opened.filter is not None
    return found


def _candidate(
    ssts: LevelSsts, opened: OpenSst, section: Section, key: bytes, hashed: int
) -> int | None:
    """The block that may hold `key`, by filter and index."""
    if opened.filter is not None:
        counts = ssts.filter_counts
        if not opened.filter.may_contain_hash(hashed):
            counts.negatives += 1
            return None
        counts.positives += 1
    return opened.index.locate(section, key)


@dataclass(slots=True)
class _Place:
    """A block, and the keys that may stand in it."""

    sst_id: bytes
    number: int
    handle: BlockHandle
    has_filter: bool
    keys: list[bytes] = field(default_factory=list)
    found: dict[bytes, Entry | None] = field(default_factory=dict)

    @property
    def is_read(self) -> bool:
        """Whether the block was looked into."""
        return bool(self.found)

    def look(self, block: Block) -> None:
        """Note what the block holds of the keys."""
        self.found = {key: block.find(key) for key in self.keys}


class _Step(NamedTuple):
    """What one SST says of a key before its blocks are read."""

    place: _Place | None  # None: it has no version of the key
    hidden_below_seq: int  # by a range tombstone of this SST; `NOT_HIDDEN`: by none


NOT_HIDDEN = -1
NOWHERE = _Step(None, NOT_HIDDEN)


async def find_many(ssts: LevelSsts, tree: Version, keys: Sequence[bytes]) -> dict[bytes, Entry]:
    """Of all these keys what `find` finds; those that it does not find are missing.

    Reads every block once, and many at a time.
    """
    routes = await _Routes(ssts, tree).find(keys)
    results: dict[bytes, Entry] = {}
    while routes:
        # In each round every key needs one block more: most are done after the first.
        wanted = {id(route[0].place): route[0].place for route in routes.values()}
        await _read(ssts, [place for place in wanted.values() if place and not place.is_read])
        routes = await _advance(ssts, routes, results)
    return results


class _Routes:
    """Finds, for each of many keys, the blocks that it may stand in, from newest to oldest."""

    def __init__(self, ssts: LevelSsts, tree: Version) -> None:
        self._ssts = ssts
        self._tree = tree
        self._routes: dict[bytes, list[_Step]] = {}
        # Of each SST the keys that it may hold, with their hashes and their places in the route.
        self._asked: dict[bytes, tuple[SstInfo, list[tuple[bytes, int, int]]]] = {}

    async def find(self, keys: Sequence[bytes]) -> dict[bytes, deque[_Step]]:
        """The routes; keys that no block can hold have none."""
        for count, key in enumerate(dict.fromkeys(keys)):
            self._ask(key)
            await _turn(count)
        unopened = [*self._asked.values()]

        async def work() -> None:
            while unopened:
                # Metadata of one SST at a time, since it may take a megabyte.
                await self._look(*unopened.pop())

        await in_parallel(work, min(len(unopened), OPENED_AT_ONCE))
        found = {}
        for count, (key, steps) in enumerate(self._routes.items()):
            route = _shortened(steps)
            if route:
                found[key] = route
            await _turn(count)
        return found

    def _ask(self, key: bytes) -> None:
        hashed = key_hash(key)
        rank = -1
        for rank, info in enumerate(self._tree.sources_of(key)):
            self._asked.setdefault(info.id, (info, []))[1].append((key, hashed, rank))
        self._routes[key] = [NOWHERE] * (rank + 1)

    async def _look(self, info: SstInfo, asked: Sequence[tuple[bytes, int, int]]) -> None:
        """What this SST says of the keys."""
        ssts = self._ssts
        opened = await ssts.metadata(info)
        places: dict[int, _Place] = {}
        for count, (key, hashed, rank) in enumerate(asked):
            number = _candidate(ssts, opened, Section.POINTS, key, hashed)
            place = None
            if number is not None:
                place = places.get(number)
                if place is None:
                    has_filter = opened.filter is not None
                    place = _Place(info.id, number, opened.index[number], has_filter)
                    places[number] = place
                place.keys.append(key)
            fragment = opened.range_tombstones.over(key)
            hidden_below_seq = NOT_HIDDEN if fragment is None else fragment.seq
            self._routes[key][rank] = _Step(place, hidden_below_seq)
            await _turn(count)


def _shortened(steps: Iterable[_Step]) -> deque[_Step]:
    """The blocks to look into; what stands below a range tombstone is older."""
    route: deque[_Step] = deque()
    for step in steps:
        if step.place is not None:
            route.append(step)
        if step.hidden_below_seq != NOT_HIDDEN:
            break
    return route


async def _advance(
    ssts: LevelSsts, routes: dict[bytes, deque[_Step]], results: dict[bytes, Entry]
) -> dict[bytes, deque[_Step]]:
    """Take what was found; the routes of keys that need another block."""
    left: dict[bytes, deque[_Step]] = {}
    for count, (key, route) in enumerate(routes.items()):
        while route:
            place, hidden_below_seq = route[0]
            assert place is not None
            if not place.is_read:
                left[key] = route
                break
            route.popleft()
            found = place.found[key]
            if found is None:
                ssts.filter_counts.false_positives += place.has_filter
                continue
            if found.seq >= hidden_below_seq:
                results[key] = found
            break
        await _turn(count)
    return left


async def _read(ssts: LevelSsts, places: Sequence[_Place]) -> None:
    """Look into these blocks; neighbours come with one request."""
    missing = []
    for count, place in enumerate(places):
        held = ssts.held_block(place.sst_id, place.number, place.handle.listed_seq)
        if held is None:
            missing.append(place)
        else:
            place.look(held)
        await _turn(count)
    groups = _neighbours(missing, ssts.settings.read_ahead_bytes_max)

    async def work() -> None:
        while groups:
            group = groups.pop()
            handles = [place.handle for place in group]
            blocks = await ssts.neighbours(group[0].sst_id, group[0].number, handles)
            for place, block in zip(group, blocks, strict=True):
                place.look(block)

    await in_parallel(work, min(len(groups), FETCHED_AT_ONCE))


def _neighbours(places: Sequence[_Place], bytes_max: int) -> list[list[_Place]]:
    """Groups of blocks that stand one after the other in an object, each up to `bytes_max`."""
    groups: list[list[_Place]] = []
    after, group_bytes = (b"", 0), 0
    for place in sorted(places, key=lambda place: (place.sst_id, place.number)):
        length = place.handle.length
        if (place.sst_id, place.number) != after or group_bytes + length > bytes_max:
            groups.append([])
            group_bytes = 0
        groups[-1].append(place)
        group_bytes += length
        after = place.sst_id, place.number + 1
    return groups


async def _turn(count: int) -> None:
    """Let other tasks run, once for some keys."""
    if count % KEYS_AT_ONCE == KEYS_AT_ONCE - 1:
        await asyncio.sleep(0)
