"""Levels made by hand, on a store that records every read."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import pairwise
from operator import attrgetter
from typing import Any

from shalekv.format.block_frame import Codec
from shalekv.format.filter import FilterKeys
from shalekv.format.footer import SstProperties
from shalekv.format.names import level_name
from shalekv.format.sst import Sst, open_sst
from shalekv.format.sst_writer import encode_sst
from shalekv.protocol.entry import NO_RANGE_TOMBSTONES, Entry, Kind
from shalekv.protocol.manifest import Manifest, Version
from shalekv.protocol.sst_table import SstInfo, SstTable
from shalekv.read.sst_reader import LevelSsts
from shalekv.settings import CacheSettings, StoreSettings
from shalekv.settings.model import MIB
from shalekv.store.api import Created
from shalekv.store.cas import CasStore
from shalekv.store.disk_cache import DiskCache
from shalekv.store.memory import MemoryObjects, MemoryStore
from tests.kit.inline_runtime import finish, inline_runtime
from tests.kit.samples import DATABASE_ID, properties
from tests.kit.store import FaultyStore, Gate


class Levels:
    """SSTs that are added one by one, and the version that they make."""

    def __init__(self) -> None:
        self.objects = MemoryObjects()
        self.gate = Gate("get_range")
        self.store = FaultyStore(MemoryStore(lambda: 0, objects=self.objects), before=self.gate)
        self.infos: list[SstInfo] = []

    def add(
        self,
        level: int,
        entries: Iterable[Entry] = (),
        range_tombstones: Iterable[Entry] = (),
        records: Sequence[Entry] = (),
        *,
        block_bytes: int = 64,
        codec: Codec = Codec.NONE,
        filter_bits: float | None = 10.0,
    ) -> SstInfo:
        sst_id = bytes.fromhex("0198c0de00007000") + (2**63 + len(self.infos)).to_bytes(8, "big")
        filter_bytes = b""
        if records and filter_bits is not None:
            filter_keys = FilterKeys(filter_bits)
            filter_keys.add([entry.key for entry in records])
            filter_bytes, filter_bits = filter_keys.build(), None
        data = encode_sst(
            _properties(level_name(sst_id)),
            entries,
            range_tombstones,
            records,
            block_bytes=block_bytes,
            codec=codec,
            filter_bits_per_key=filter_bits,
            filter_bytes=filter_bytes,
        )
        assert finish(self.store.create(level_name(sst_id), data)) == Created()
        self.infos.append(self.sst(level_name(sst_id)).footer.info(level))
        return self.infos[-1]

    def sst(self, name: str) -> Sst:
        return open_sst(name, self.data(name), database_id=DATABASE_ID)

    def data(self, name: str) -> bytes:
        found = self.objects.find(name)
        assert found is not None
        return found.data

    def overwrite(self, name: str, data: bytes) -> None:
        self.objects.remove(name)
        assert finish(self.store.create(name, data)) == Created()

    def version(self) -> Version:
        manifest = Manifest(
            database_id=DATABASE_ID,
            manifest_id=1,
            write_id=bytes(16),
            leveled_ssts=SstTable.from_infos(self.infos),
        )
        return Version.of(manifest)

    def open(self, disk: DiskCache | None = None, /, **settings: Any) -> LevelSsts:
        values = {"metadata_cache_bytes": 64 * MIB, "block_cache_bytes": 64 * MIB} | settings
        cas = CasStore(self.store, inline_runtime(), StoreSettings(read_attempts=1))
        return LevelSsts(
            cas, database_id=DATABASE_ID, settings=CacheSettings.model_validate(values), disk=disk
        )

    def block_reads(self) -> Counter[tuple[str, int]]:
        """Count the reads of each block of points or records, whole, since the store was made."""
        found: Counter[tuple[str, int]] = Counter()
        handles = {
            name: [*self.sst(name).index] for name in {name for name, _, _ in self.store.reads}
        }
        for name, offset, length in self.store.reads:
            first = bisect_left(handles[name], offset, key=attrgetter("offset"))
            for number, handle in enumerate(handles[name][first:], first):
                if handle.offset + handle.length > offset + length:
                    break
                found[name, number] += 1
        return found


def add_run(
    levels: Levels,
    level: int,
    entries: Sequence[Entry],
    range_tombstones: Sequence[Entry] = (),
    *,
    cuts: Sequence[bytes] = (),
    **options: Any,
) -> None:
    """Add a sorted run of several SSTs: `cuts` are the first keys of all but the first.

    Its range tombstones are clipped to each SST, as a merge clips them.
    """
    fragments = NO_RANGE_TOMBSTONES.with_added(range_tombstones).fragments
    bounds: list[bytes | None] = [b"", *cuts, None]
    for start, end in pairwise(bounds):
        assert start is not None
        slice_ = [e for e in entries if start <= e.key and (end is None or e.key < end)]
        clipped = []
        for fragment in fragments:
            low = max(fragment.start, start)
            high = fragment.end if end is None else min(fragment.end, end)
            if low < high:
                clipped.append(range_tombstone(low, high, fragment.seq))
        if slice_ or clipped:
            levels.add(level, slice_, clipped, **options)


def range_tombstone(start: bytes, end: bytes, seq: int) -> Entry:
    """A range tombstone; an `end` that no key reaches is none."""
    return Entry(start, seq, Kind.RANGE_TOMBSTONE, b"" if len(end) > 60_000 else end)


def _properties(name: str) -> SstProperties:
    return replace(properties(name), writer_epoch=1)
