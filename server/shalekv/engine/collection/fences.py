"""Finds the fences in the WAL, which are never collected (rule F1), without reading the rest.

The size in the listing tells which objects can be fences; the footer of each is read once.
"""

from __future__ import annotations

from collections.abc import Iterable

from shalekv.core.collectable import Listed
from shalekv.engine.levels.parallel import in_parallel
from shalekv.errors import CorruptObject, ObjectNotFound
from shalekv.format.footer_codec import MIN_FOOTER_BYTES, read_footer
from shalekv.format.index import encode_index
from shalekv.store.cas import CasStore

# An index of no blocks, and a footer without keys: whatever has an entry is larger.
FENCE_BYTES = len(encode_index(())) + MIN_FOOTER_BYTES
READS_MAX = 16


class Fences:
    """Knows which WAL objects of one database are fences."""

    def __init__(self, store: CasStore) -> None:
        """Nothing is known yet."""
        self._store = store
        self._known: dict[Listed, bool] = {}

    async def among(self, listed: Iterable[Listed]) -> frozenset[str]:
        """The names of those of these WAL objects that are fences.

        What cannot be read counts as one: it may be, and it is small.
        """
        candidates = [each for each in listed if each.size_bytes <= FENCE_BYTES]
        self._known = {each: self._known[each] for each in candidates if each in self._known}
        unread = [each for each in candidates if each not in self._known]

        async def read() -> None:
            while unread:
                each = unread.pop()
                self._known[each] = await self._is_fence(each)

        await in_parallel(read, min(READS_MAX, len(unread)))
        return frozenset(each.name for each in candidates if self._known[each])

    async def _is_fence(self, listed: Listed) -> bool:
        name, size_bytes = listed.name, listed.size_bytes
        try:
            data = await self._store.reads.get_range(name, 0, size_bytes)
            footer = read_footer(name, data, size_bytes, database_id=None)
        except (CorruptObject, ObjectNotFound):
            return True
        return footer.contents.entry_count == 0
