"""Mutants of blocks, filters, caches and checksums."""

from __future__ import annotations

from shalekv.core.entry import Entry
from shalekv.core.range_tombstones import RangeTombstones
from shalekv.core.sst_table import SstInfo
from shalekv.engine.levels import ssts
from shalekv.engine.logical_time import LogicalTime
from shalekv.format.block import Block
from shalekv.format.coding import MAX_U64, Piece
from shalekv.format.columns import Columns
from shalekv.format.filter import Filter
from tests.sim.planting import mutant

_real_columns = Block.columns
_real_find = Block.find
_real_may_contain_hash = Filter.may_contain_hash


def _all_but_the_last(self: Block) -> Columns:
    columns = _real_columns(self)
    count = len(columns.keys)
    return columns if count == 1 else columns.rows(0, count - 1)


def _not_the_last(self: Block, key: bytes, seq: int = MAX_U64) -> Entry | None:
    return None if len(self) > 1 and key == self.last_key else _real_find(self, key, seq)


def _some_are_denied(self: Filter, hashed: int) -> bool:
    return bool(hashed % 5) and _real_may_contain_hash(self, hashed)


def _any_checksum(_self: Piece, _expected: int, _what: str) -> None:
    """It is taken for right."""


def _by_its_lease(info: SstInfo) -> bytes:
    return info.id[:8]


def _clock_time(self: LogicalTime) -> int:
    return int(self._clock.monotonic_ms() + self._offset_ms) - 30_000


def _found_anyhow(_self: RangeTombstones, _key: bytes, found: Entry | None) -> Entry | None:
    return found


MUTANTS = (
    mutant("lose the last entry of a block", (Block, "columns", _all_but_the_last), hint=14),
    mutant("the last entry of a block is not found", (Block, "find", _not_the_last), hint=3),
    mutant(
        "a filter denies a key that is there",
        (Filter, "may_contain_hash", _some_are_denied),
        hint=3,
    ),
    mutant("ignore a checksum", (Piece, "verify", _any_checksum)),
    mutant("a cache returns another SST", (ssts, "_key", _by_its_lease), hint=26),
    mutant("logical time goes back", (LogicalTime, "now_ms", _clock_time), hint=2),
    mutant("range deletes hide nothing in memory", (RangeTombstones, "latest", _found_anyhow)),
)
