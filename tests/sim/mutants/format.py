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
from tests.sim.planting import Mutant

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
    Mutant(
        "lose the last entry of a block",
        "Whoever reads a whole block does not get its last row.",
        [(Block, "columns", _all_but_the_last)],
        "database",
        ("I1", "I9"),
        hint=14,
    ),
    Mutant(
        "the last entry of a block is not found",
        "A lookup does not find the last key of a block.",
        [(Block, "find", _not_the_last)],
        "database",
        ("I14",),
        hint=3,
    ),
    Mutant(
        "a filter denies a key that is there",
        "A filter says no for one key of five.",
        [(Filter, "may_contain_hash", _some_are_denied)],
        "database",
        ("I14",),
        hint=3,
    ),
    Mutant(
        "ignore a checksum",
        "What is read is not held against its checksum.",
        [(Piece, "verify", _any_checksum)],
        "writers",
        ("I12",),
    ),
    Mutant(
        "a cache returns another SST",
        "SSTs that were written under one lease are taken for each other.",
        [(ssts, "_key", _by_its_lease)],
        "database",
        ("I14",),
        hint=26,
    ),
    Mutant(
        "logical time goes back",
        "A writer takes its clock for the time, whatever stands in the log.",
        [(LogicalTime, "now_ms", _clock_time)],
        "database",
        ("I2", "I5"),
        hint=2,
    ),
    Mutant(
        "range deletes hide nothing in memory",
        "A get does not see range deletes that are in memory only.",
        [(RangeTombstones, "latest", _found_anyhow)],
        "writers",
        ("I2", "I14"),
    ),
)
