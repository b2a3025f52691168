"""Looks at the files of a load before it is committed: are they what the load says?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from shalekv.engine.levels.parallel import in_parallel
from shalekv.errors import CorruptObject, InvalidRequest, ObjectNotFound
from shalekv.format.names import level_name
from shalekv.format.sst_metadata import metadata_range, read_metadata
from shalekv.protocol.entry import NO_EXPIRY
from shalekv.protocol.sst_table import SstInfo
from shalekv.store.cas import CasStore

FILES_AT_ONCE = 16


async def check_files(store: CasStore, infos: Sequence[SstInfo], *, database_id: bytes) -> int:
    """When the oldest of the files was written, by the store's clock, milliseconds.

    Reads footer and index of each: the checksum in the footer vouches for the rest. Raises
    `InvalidRequest` for a file that is missing, is not as it is listed, or holds other entries than
    puts and tombstones without a sequence number; and `StoreUnavailable`.
    """
    unchecked = [*enumerate(infos)]
    modified_ms: list[int] = []

    async def work() -> None:
        while unchecked:
            at, info = unchecked.pop()
            modified_ms.append(await _check(store, at, info, database_id))

    await in_parallel(work, min(len(unchecked), FILES_AT_ONCE))
    return min(modified_ms)


async def _check(store: CasStore, at: int, info: SstInfo, database_id: bytes) -> int:
    name = level_name(info.id)
    try:
        found = await store.reads.head(name)
        start, length = metadata_range(info, with_filter=False)
        data = await store.reads.get_range(name, start, length)
        metadata = read_metadata(info, data, database_id=database_id, with_filter=False)
    except (ObjectNotFound, CorruptObject) as error:
        raise InvalidRequest(f"ssts[{at}]", str(error)) from error
    contents = metadata.footer.contents
    if not contents.is_unnumbered or contents.entry_count != (
        contents.put_count + contents.tombstone_count
    ):
        problem = "holds more than puts and tombstones with the sequence number 0"
        raise InvalidRequest(f"ssts[{at}]", f"{name} {problem}")
    # When the first of its values expires is known to who has written it, and not to its footer.
    listed = replace(info, first_expiry_ms=NO_EXPIRY)
    if found.size_bytes != info.size_bytes or metadata.footer.info(info.level) != listed:
        raise InvalidRequest(f"ssts[{at}]", f"{name} is not what it is listed as")
    return found.modified_ms
