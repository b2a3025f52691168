"""What a scan need not read, because newer range tombstones hide all of it.

A fragment hides an SST's keys if it is newer than all of the SST. What the SST has deleted itself
there is hidden, too.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right

from shalekv.core.key_range import END_OF_KEYS, KeyRange
from shalekv.core.tree import upper_bound
from shalekv.format.section import Section
from shalekv.protocol.range_tombstones import Fragment, RangeTombstones
from shalekv.protocol.sst_table import SstInfo
from shalekv.read.sorted_runs import SKIPS_MAX
from shalekv.read.sst_reader import OpenSst


def is_hidden(info: SstInfo, keys: KeyRange, hidden: RangeTombstones) -> bool:
    """Whether one fragment hides all that the SST has of `keys`."""
    fragment = hidden.over(max(info.first_key, keys.start))
    if fragment is None or fragment.seq <= info.max_seq:
        return False
    return _reaches_end(fragment, info, keys)


def left_to_read(
    opened: OpenSst, unread: range, keys: KeyRange, hidden: RangeTombstones, *, reverse: bool
) -> range:
    """Of the blocks `unread` those from the first on that is not hidden, as the scan goes."""
    left = unread
    for _ in range(SKIPS_MAX):  # past it, some are read for nothing
        before = left
        if left:
            left = (_skip_back if reverse else _skip)(opened, left, keys, hidden)
        if left == before:
            break
    return left


def _skip(opened: OpenSst, unread: range, keys: KeyRange, hidden: RangeTombstones) -> range:
    index = opened.index
    fragment = hidden.over(max(index.first_key(unread[0]), keys.start))
    if fragment is None or fragment.seq <= opened.info.max_seq:
        return unread
    if _reaches_end(fragment, opened.info, keys):
        return unread[:0]
    # What is before a block that begins inside of the fragment, or with its end, is hidden.
    return unread[max(bisect_right(unread, fragment.end, key=index.first_key) - 1, 0) :]


def _skip_back(opened: OpenSst, unread: range, keys: KeyRange, hidden: RangeTombstones) -> range:
    index, last = opened.index, unread[-1]
    fragment = hidden.over(max(index.first_key(last), keys.start))
    if fragment is None or fragment.seq <= opened.info.max_seq:
        return unread
    after = last + 1
    is_behind = after in index.blocks_of(Section.POINTS) and fragment.end >= index.first_key(after)
    if not is_behind and not _reaches_end(fragment, opened.info, keys):
        return unread
    if fragment.start <= keys.start:
        return unread[:0]
    return unread[: bisect_left(unread, fragment.start, key=index.first_key)]


def _reaches_end(fragment: Fragment, info: SstInfo, keys: KeyRange) -> bool:
    """Whether no key of the SST in `keys` stands behind the fragment."""
    if keys.end and fragment.end >= keys.end:
        return True
    return fragment.end > upper_bound(info) or fragment.end == END_OF_KEYS
