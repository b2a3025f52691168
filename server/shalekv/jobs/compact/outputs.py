"""Writing the outputs of a compaction: rows in the order of their keys become SSTs of a level.

Each SST covers a share of the key space: a range of keys that adjoins that of the next SST. A range
tombstone that crosses the border of two shares is cut there, so each SST holds everything about its
share.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from operator import add

from shalekv.errors import IllegalState
from shalekv.format.block_frame import Codec
from shalekv.format.columns import Columns, Section, columns_of
from shalekv.format.footer import SstProperties
from shalekv.format.names import level_name
from shalekv.format.sst_writer import SstWriter
from shalekv.jobs.compact.pace import TokenBucket, request_deadline
from shalekv.protocol.compaction.jobs import OlderKeys
from shalekv.protocol.compaction.publish import CompactorId
from shalekv.protocol.entry import (
    END_OF_KEYS,
    NO_RANGE_TOMBSTONES,
    Entry,
    Fragment,
    KeyRange,
    Kind,
    RangeTombstones,
)
from shalekv.protocol.lease import leased_sst_id
from shalekv.protocol.sst_table import SstInfo
from shalekv.settings import LevelCodec, LevelSettings
from shalekv.store.cas import CasStore, Taken

_LEASED_RANDOM_BYTES = 8
_WRITE_ID_BYTES = 16
_TOMBSTONE_BYTES = 24  # of a range tombstone in a block, without its keys
_CODECS = {
    LevelCodec.NONE: Codec.NONE,
    LevelCodec.LZ4: Codec.LZ4,
    LevelCodec.ZSTD: Codec.ZSTD,
}


@dataclass(frozen=True, slots=True)
class OutputOwner:
    """The identity under which SSTs are written; their footers and ids contain it."""

    database_id: bytes
    compactor: CompactorId
    lease_id: bytes
    logical_time_ms: int


class LevelWriter:
    """Creates the SSTs of levels."""

    def __init__(
        self, store: CasStore, owner: OutputOwner, settings: LevelSettings, pace: TokenBucket
    ) -> None:
        self._store = store
        self._owner = owner
        self._settings = settings
        self._pace = pace
        self.written_bytes = 0

    def begin(self) -> SstWriter:
        """Begin an SST, under an id that the lease protects."""
        owner, random, settings = self._owner, self._store.runtime.random, self._settings
        sst_id = leased_sst_id(owner.lease_id, random.randbytes(_LEASED_RANDOM_BYTES))
        properties = SstProperties(
            name=level_name(sst_id),
            database_id=owner.database_id,
            writer_epoch=owner.compactor.epoch,
            writer_nonce=owner.compactor.nonce,
            write_id=random.randbytes(_WRITE_ID_BYTES),
            logical_time_ms=owner.logical_time_ms,
        )
        return SstWriter(
            properties,
            block_bytes=settings.block_bytes,
            codec=_CODECS[settings.codec],
            filter_bits_per_key=settings.filter_bits or None,
        )

    async def create(self, writer: SstWriter, level: int) -> SstInfo:
        """Upload a finished SST, and return its entry for `level` of the manifest.

        Raises `StoreUnavailable` when it is not known to be in the store after a long time: it may
        exist then, but nothing references it.
        """
        data, footer = writer.finish()
        await self._pace.take(len(data))
        self.written_bytes += len(data)
        name = footer.properties.name
        async with request_deadline(self._store.url, "create", name, len(data)):
            outcome = await self._store.claim(name, data)
        if isinstance(outcome, Taken):
            message = f"{name} exists with other bytes, although its id was drawn at random"
            raise IllegalState(message)
        return replace(footer.info(level), first_expiry_ms=writer.first_expiry_ms)


class Outputs:
    """The SSTs of one level that together hold the rows and range tombstones of a range of keys."""

    def __init__(
        self,
        writer: LevelWriter,
        level: int,
        *,
        section: Section,
        keys: KeyRange,
        target_bytes: int,
        older: OlderKeys,
        cuts: Sequence[bytes] = (),
    ) -> None:
        """Close an SST at `target_bytes`, and before each key of `cuts`, which are ascending.

        A range tombstone is dropped unless `older` may hold a key inside it (I2).
        """
        self._cuts = deque(cut for cut in cuts if cut > keys.start)
        self._writer = writer
        self._level = level
        self._section = section
        self._start = keys.start  # of the share of the open SST
        self._end = keys.end or END_OF_KEYS
        self._target_bytes = target_bytes
        self._older = older
        self._open: SstWriter | None = None
        self._last_key = b""  # of all rows so far
        self._lone_seq = 0  # of the empty key, while it is the only one of the open SST; else 0
        self.infos: list[SstInfo] = []

    async def add(self, rows: Columns, tombstones: RangeTombstones) -> None:
        """Add the next rows; `tombstones` includes all that cover keys up to the last of them."""
        at, count = 0, len(rows.keys)
        if not count:
            return
        ends: list[int] = []
        while at < count:
            if self._cuts and self._cuts[0] <= rows.keys[at]:
                await self._close(self._cuts.popleft(), tombstones)
                continue
            free_bytes = self._target_bytes - self._size_bytes(tombstones, rows.keys[at])
            if free_bytes <= 0 and rows.keys[at] > self._start:
                await self._close(rows.keys[at], tombstones)
                continue
            stop = count
            if at or sum(map(len, rows.keys)) + sum(map(len, rows.values)) > free_bytes:
                ends = ends or _ends(rows)
                stop = max(bisect_right(ends, ends[at] + max(free_bytes, 0)) - 1, at + 1)
            if self._cuts:
                stop = min(stop, bisect_left(rows.keys, self._cuts[0], at + 1))
            is_lone = self._open is None and stop == at + 1 and not rows.keys[at]
            self._lone_seq = rows.seqs[at] if is_lone else 0
            if self._open is None:
                self._open = self._writer.begin()
            self._open.add(self._section, rows.rows(at, stop))
            at = stop
        self._last_key = rows.keys[-1]

    async def finish(self, tombstones: RangeTombstones) -> Sequence[SstInfo]:
        """Return all SSTs by key; none if nothing is left. `tombstones` are all of the range."""
        while self._cuts and self._cuts[0] < self._end:
            await self._finish_share(self._cuts.popleft(), tombstones)
        await self._finish_share(self._end, tombstones)
        return self.infos

    async def _finish_share(self, end: bytes, tombstones: RangeTombstones) -> None:
        pieces = self._pieces(tombstones, end)
        # Without rows between them, many range tombstones still fill several SSTs.
        free_bytes = self._target_bytes - (self._open.size_bytes if self._open else 0)
        for piece in pieces:
            free_bytes -= _weight(piece)
            if free_bytes < 0 and piece.start > max(self._start, self._last_key):
                await self._close(piece.start, tombstones)
                free_bytes = self._target_bytes - _weight(piece)
        await self._close(end, tombstones)

    def _size_bytes(self, tombstones: RangeTombstones, key: bytes) -> int:
        """Return the size of the open SST if it ends before `key`."""
        size_bytes = self._open.size_bytes if self._open is not None else 0
        if tombstones is NO_RANGE_TOMBSTONES:
            return size_bytes
        return size_bytes + sum(map(_weight, self._pieces(tombstones, key)))

    async def _close(self, end: bytes, tombstones: RangeTombstones) -> None:
        """Close the open SST, whose share ends before `end`; the next share begins there."""
        pieces = self._pieces(tombstones, end)
        self._start = end
        if self._open is None and not pieces:
            return
        if self._lone_seq and not pieces:
            # The bounds of the empty key alone would mean that there is no upper bound, and overlap
            # all that follows in the level. This tombstone hides nothing, and gives an upper bound.
            pieces = [Fragment(b"", b"\x00", self._lone_seq)]
        sst = self._open or self._writer.begin()
        self._open, self._lone_seq = None, 0
        if pieces:
            sst.add(Section.RANGE_TOMBSTONES, columns_of([*map(_entry, pieces)]))
        self.infos.append(await self._writer.create(sst, self._level))

    def _pieces(self, tombstones: RangeTombstones, end: bytes) -> list[Fragment]:
        """Return the range tombstones of the open SST if it ends before `end`."""
        start = self._start
        found = tombstones.between(start, end)
        pieces = [Fragment(max(f.start, start), min(f.end, end), f.seq) for f in found]
        return [piece for piece in pieces if self._older.may_hold_any(piece.start, piece.end)]


def _ends(rows: Columns) -> list[int]:
    """Return the bytes of keys and values before each row, and finally of all rows."""
    return [*accumulate(map(add, map(len, rows.keys), map(len, rows.values)), initial=0)]


def _weight(piece: Fragment) -> int:
    end_bytes = 0 if piece.end == END_OF_KEYS else len(piece.end)
    return _TOMBSTONE_BYTES + len(piece.start) + end_bytes


def _entry(piece: Fragment) -> Entry:
    end = b"" if piece.end == END_OF_KEYS else piece.end
    return Entry(piece.start, piece.seq, Kind.RANGE_TOMBSTONE, end)
