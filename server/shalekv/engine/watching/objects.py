"""WAL objects as watches need them, made of what is stored."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence

from shalekv.core.key_range import KeyRange
from shalekv.format.load_record import decode_load
from shalekv.format.sst import Sst
from shalekv.protocol.entry import Entry
from shalekv.protocol.loads import CommittedLoad, load_tree
from shalekv.read.source import tree_sources
from shalekv.read.sst_reader import LevelSsts
from shalekv.watch.change_event import AppliedObject


def object_of(found: Sst, wal_id: int) -> AppliedObject | None:
    """What the object in slot `wal_id` holds; None: it is a fence. Raises a `CorruptObject`."""
    contents = found.footer.contents
    if not contents.entry_count:
        return None
    load = None
    for entry in found.control_entries():
        pending = decode_load(found.properties.name, entry)
        load = CommittedLoad(pending.load_id, pending.ssts, entry.seq, wal_id)
    return AppliedObject(
        wal_id, contents.max_seq, [*found.entries()], [*found.range_tombstones()], load
    )


async def load_parts(
    ssts: LevelSsts, load: CommittedLoad, keys: KeyRange
) -> AsyncGenerator[Sequence[Entry], None]:
    """What a load has put into a range, by key, in parts that are not empty.

    Raises `CorruptObject`, `ObjectNotFound` and `StoreUnavailable`.
    """
    for source in tree_sources(ssts, load_tree(load), keys, reverse=False):
        while (window := await source.next()) is not None:
            if window.run.entries:
                yield window.run.entries
