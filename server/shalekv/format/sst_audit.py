"""Checks a whole SST piece by piece: it is never in memory at once, and all damage is told.

First the ends (`shalekv.format.footer_codec`, `shalekv.format.sst`): footer, index, filter. Then
every block is shown to an `SstAudit`, and at last it is asked what they amount to.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import compress
from operator import eq

from shalekv.errors import BadStructure, CorruptObject
from shalekv.format.columns import Columns
from shalekv.format.contents import UNNUMBERED, Tally
from shalekv.format.filter import Filter
from shalekv.format.footer import Footer
from shalekv.format.index import BlockIndex
from shalekv.format.load_record import decode_load
from shalekv.format.records import decode_record
from shalekv.format.section import Section
from shalekv.format.sst import read_block
from shalekv.protocol.entry import Kind
from shalekv.protocol.manifest import PendingLoad


class SstAudit:
    """The blocks of one SST, seen in order."""

    def __init__(self, footer: Footer, index: BlockIndex, key_filter: Filter | None) -> None:
        """`key_filter`: None, if there is none, or if it is damaged."""
        self._footer = footer
        self._index = index
        self._filter = key_filter
        self._tally = Tally()
        self._last_keys: dict[Section, bytes] = {}
        self._is_sound = True
        self.repeated_key: bytes | None = None  # a point with a second version
        self.loads: list[PendingLoad] = []  # that control records commit

    def check_block(self, number: int, data: bytes) -> CorruptObject | None:
        """Look at block `number`, whose bytes are `data`; what is wrong with it, if anything."""
        try:
            block = read_block(self._index, number, data)
            columns = block.columns()
            before = self._last_keys.get(block.section)
            if before is not None and before >= columns.keys[0]:
                problem = "the block before it ends with the same key or above"
                raise block.piece.malformed(0, problem)
            self._last_keys[block.section] = columns.keys[-1]
            self._tally.add(block.section, columns)
            self._look_into(block.section, columns)
        except CorruptObject as error:
            self._is_sound = False
            return error
        return None

    def check_contents(self) -> CorruptObject | None:
        """Whether the footer tells of what was seen. REQUIRES: every block was."""
        found = self._tally.contents()
        if self._index.listed_seq:
            found = replace(found, min_seq=UNNUMBERED, max_seq=UNNUMBERED)
        if not self._is_sound or found == self._footer.contents:
            return None
        layout = self._footer.layout
        problem = f"the footer tells of {self._footer.contents}, found {found}"
        offset = layout.index_offset + layout.index_len
        return BadStructure(self._footer.properties.name, offset, problem)

    def _look_into(self, section: Section, columns: Columns) -> None:
        name = self._footer.properties.name
        if section is Section.POINTS:
            if self.repeated_key is None:
                again = map(eq, columns.keys, columns.keys[1:])
                self.repeated_key = next(compress(columns.keys, again), None)
            has_all = self._filter is None or all(map(self._filter.may_contain, columns.keys))
            if not has_all:
                offset = self._footer.layout.filter_offset
                raise BadStructure(name, offset, "the filter denies a key that is here")
        if section is Section.SYSTEM:
            for kind, value in zip(columns.kinds, columns.values, strict=True):
                if kind == Kind.PUT:
                    decode_record(name, value)
        if section is Section.CONTROL:
            self.loads += [decode_load(name, entry) for entry in columns.entries()]
