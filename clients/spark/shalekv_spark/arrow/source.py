"""Sources of sorted rows, read group by group of blocks while the next group is fetched.

Blocks are columns already (`shalekv.format.block`). So a group of adjacent blocks is decoded
without a Python object for each row: the whole group is checked at once, and the same column of all
blocks is joined. If anything does not fit, the format package reads block by block, and raises an
error that says what is wrong, and where.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_right
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Protocol

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
from lz4.block import LZ4BlockError, decompress

from shalekv.errors import BadStructure, CorruptObject, ShaleError
from shalekv.format.block import HAS_EXPIRY, HAS_KINDS, HAS_SEQS, KNOWN_FLAGS
from shalekv.format.block_frame import HEADER_BYTES, Codec, uncompressed
from shalekv.format.coding import ALIGNMENT, Piece, crc32c
from shalekv.format.columns import KINDS_OF, Columns, Section
from shalekv.format.index import BlockIndex
from shalekv.format.sst import read_block
from shalekv.format.statistics import blocks_between
from shalekv.jobs.compact.sources import joined
from shalekv.protocol.entry import Entry, KeyRange, Kind
from shalekv_spark.arrow.merging import SourceRows, newest_versions
from shalekv_spark.arrow.objects import OpenedObject, StoredRows
from shalekv_spark.arrow.rows import Bytes, Numbers, Rows, bools_of, numbers_array, rows_of

_SECTION = Section.POINTS
_COLUMNS_AT = HEADER_BYTES + 8
_FRAME = int(_SECTION) << 8  # the first word of a block of codec 0
_OFFSETS_MAX = 2**31 - 1  # of Arrow
_LZ4_AT = HEADER_BYTES + 4
_LZ4_RATIO_MAX = 255
_PADDINGS = [bytes(count) for count in range(ALIGNMENT)]

Positions = npt.NDArray[np.int64]
Words = npt.NDArray[np.uint32]

_ROW_BYTES = 20  # of columns for each row, beside key and value and without expiry


class _Unfit(Exception):
    """A block is not as the format demands; the format package finds out what is wrong."""


@dataclass(frozen=True, slots=True)
class _Handles:
    """The entries of the index for some adjacent blocks, as columns."""

    starts: Positions  # relative to the first of them
    lengths: Positions
    checksums: Words
    rows: Positions
    first_keys: pa.BinaryArray

    @classmethod
    def of(cls, index: BlockIndex, numbers: range) -> _Handles:
        """Read the entries of these blocks.

        REQUIRES: the index was found sound by `shalekv.format.index`.
        """
        data, count = index.piece.data, index.count

        def column(at: int, code: str, extra: int = 0) -> npt.NDArray[np.unsignedinteger]:
            width = np.dtype(code).itemsize
            return np.frombuffer(data, code, len(numbers) + extra, at + width * numbers.start)

        offsets = column(8, "<u8").astype(np.int64)
        lengths_at = 8 + 8 * count
        key_offsets_at = lengths_at + 12 * count
        keys_at = key_offsets_at + 4 * (count + 1) + count
        buffers = [
            None,
            pa.py_buffer(column(key_offsets_at, "<u4", 1)),
            pa.py_buffer(memoryview(data)[keys_at:]),
        ]
        return cls(
            offsets - offsets[0],
            column(lengths_at, "<u4").astype(np.int64),
            column(lengths_at + 4 * count, "<u4").astype(np.uint32),
            column(lengths_at + 8 * count, "<u4").astype(np.int64),
            pa.Array.from_buffers(pa.binary(), len(numbers), buffers),
        )


def rows_of_blocks(index: BlockIndex, numbers: range, data: bytes, *, with_values: bool) -> Rows:
    """Decode the points in one or more adjacent blocks, whose bytes are `data`.

    Raises `CorruptObject` as the format package does, also when the blocks are out of order.
    """
    try:
        handles = _Handles.of(index, numbers)
        _check_sums(handles, data)
        starts, plain_data = _uncompressed(index, numbers, handles, data)
        return _Group(handles, starts, plain_data, index.assigned_seq).rows(with_values=with_values)
    except (_Unfit, CorruptObject):  # the error has to name the first damaged block
        return rows_of(_one_by_one(index, numbers, data), with_values=with_values)


def _one_by_one(index: BlockIndex, numbers: range, data: bytes) -> Columns:
    """Decode the blocks by the format package, which raises the error of the first damaged one."""
    base = index[numbers[0]].offset
    decoded: list[Columns] = []
    for number in numbers:
        handle = index[number]
        at = handle.offset - base
        columns = read_block(index, number, data[at : at + handle.length]).columns()
        if decoded and decoded[-1].keys[-1] >= columns.keys[0]:
            raise out_of_order(index, number)
        decoded.append(columns)
    return joined(decoded)


def _check_sums(handles: _Handles, data: bytes) -> None:
    ends = handles.starts + handles.lengths
    if len(data) != ends[-1]:
        raise _Unfit
    bounds = zip(handles.starts.tolist(), ends.tolist(), strict=True)
    if [crc32c(data[start:end]) for start, end in bounds] != handles.checksums.tolist():
        raise _Unfit


def _uncompressed(
    index: BlockIndex, numbers: range, handles: _Handles, data: bytes
) -> tuple[Positions, bytes]:
    """Return where each block begins after decompression, and the blocks with codec 0."""
    starts = handles.starts
    codecs = np.frombuffer(data, np.uint8)[starts]
    if not codecs.any():
        return starts, data
    if ((codecs == Codec.NONE) | (codecs == Codec.LZ4)).all():
        pieces, lengths = _from_lz4(handles, data, codecs == Codec.LZ4)
    else:
        name, base = index.piece.name, index[numbers[0]].offset
        ends = (starts + handles.lengths).tolist()
        blocks = [
            uncompressed(Piece(name, base + start, data[start:end]))[0].data
            for start, end in zip(starts.tolist(), ends, strict=True)
        ]
        pieces, lengths = [blocks], np.fromiter(map(len, blocks), np.int64, len(blocks))
    return lengths.cumsum() - lengths, b"".join(chain.from_iterable(zip(*pieces, strict=True)))


def _from_lz4(
    handles: _Handles, data: bytes, is_lz4: npt.NDArray[np.bool_]
) -> tuple[Sequence[Sequence[bytes | memoryview]], Positions]:
    """Decompress blocks of which some are LZ4 and the rest plain: header, columns, padding.

    The result is that of `shalekv.format.block_frame`, which works block by block and takes three
    times as long. Raises `_Unfit`.
    """
    _demand((handles.lengths > _LZ4_AT).all())
    words, at = np.frombuffer(data, "<u4"), handles.starts >> 2
    raw_len = words[at + 1].astype(np.int64)
    stored_len = np.where(is_lz4, words[at + 2], raw_len).astype(np.int64)
    data_at = np.where(is_lz4, _LZ4_AT, HEADER_BYTES)
    _demand((words[at] & ~np.uint32(0xFF) == _FRAME).all())
    _demand((_padded(data_at + stored_len) == handles.lengths).all())
    _demand((raw_len <= np.where(is_lz4, stored_len * _LZ4_RATIO_MAX, raw_len)).all())
    view, begin = memoryview(data), handles.starts + data_at
    columns = zip(
        begin.tolist(), (begin + stored_len).tolist(), raw_len.tolist(), is_lz4, strict=True
    )
    try:
        raws = [
            decompress(view[start:end], uncompressed_size=size) if compressed else view[start:end]
            for start, end, size, compressed in columns
        ]
    except LZ4BlockError:
        raise _Unfit from None
    _demand([*map(len, raws)] == raw_len.tolist())
    headers = np.empty((len(raws), 2), "<u4")
    headers[:, 0], headers[:, 1] = _FRAME, raw_len
    lengths = _padded(HEADER_BYTES + raw_len)
    paddings = [_PADDINGS[size] for size in (lengths - HEADER_BYTES - raw_len).tolist()]
    return (headers.view("V8").ravel().tolist(), raws, paddings), lengths


def _padded(lengths: Positions) -> Positions:
    padded: Positions = -(-lengths // ALIGNMENT) * ALIGNMENT
    return padded


class _Group:
    """Blocks of codec 0 whose checksums were right. All methods raise `_Unfit`."""

    def __init__(
        self, handles: _Handles, starts: Positions, data: bytes, assigned_seq: int
    ) -> None:
        self._handles = handles
        self._view = memoryview(data)
        self._starts = starts
        self._assigned_seq = assigned_seq
        lengths = np.append(starts[1:], len(data)) - starts
        _demand((lengths > _COLUMNS_AT).all())
        frames, raw_len, self._rows, self._flags = (
            self._word(starts + 4 * number) for number in range(4)
        )
        _demand((frames == _FRAME).all() and (self._rows == handles.rows).all())
        _demand(not (self._flags & ~KNOWN_FLAGS).any() and self._rows.all())
        _demand((_padded(HEADER_BYTES + raw_len) == lengths).all())
        self._expiry_at = _COLUMNS_AT + 8 * np.where(self._has(HAS_SEQS), self._rows, 1)
        self._key_offsets_at = self._expiry_at + 8 * np.where(self._has(HAS_EXPIRY), self._rows, 0)
        keys_at = self._kinds_at + np.where(self._has(HAS_KINDS), self._rows, 0)
        _demand((keys_at <= lengths).all())
        self._key_bytes = self._word(starts + self._value_offsets_at - 4)
        self._value_bytes = self._word(starts + self._kinds_at - 4)
        self._keys_at = starts + keys_at
        ends = self._keys_at + self._key_bytes + self._value_bytes
        _demand((ends == starts + HEADER_BYTES + raw_len).all())

    @property
    def _value_offsets_at(self) -> Positions:
        at: Positions = self._key_offsets_at + 4 * (self._rows + 1)
        return at

    @property
    def _kinds_at(self) -> Positions:
        at: Positions = self._value_offsets_at + 4 * (self._rows + 1)
        return at

    def rows(self, *, with_values: bool) -> Rows:
        """Return all rows, checked for their order and the rules of the section."""
        key_offsets = self._offsets(self._key_offsets_at, self._key_bytes)
        value_offsets = self._offsets(self._value_offsets_at, self._value_bytes)
        kinds = self._kinds(value_offsets)
        seqs = self._seqs()
        keys = _binary(key_offsets, self._joined(self._keys_at, self._key_bytes))
        firsts = numbers_array(self._rows.cumsum() - self._rows, pa.int64())
        _demand(pc.all(pc.equal(keys.take(firsts), self._handles.first_keys)).as_py())
        _check_order(keys, seqs)
        values = None
        if with_values:
            values_at = self._keys_at + self._key_bytes
            values = _binary(value_offsets, self._joined(values_at, self._value_bytes))
        return Rows(keys, values, seqs, kinds, self._expiry())

    def _word(self, at: Positions) -> Positions:
        words: Positions = np.frombuffer(self._view, "<u4")[at >> 2].astype(np.int64)
        return words

    def _has(self, flag: int) -> npt.NDArray[np.bool_]:
        found: npt.NDArray[np.bool_] = self._flags & flag != 0
        return found

    def _joined(self, starts: Positions, lengths: Positions) -> bytes:
        view = self._view
        bounds = zip(starts.tolist(), (starts + lengths).tolist(), strict=True)
        return b"".join([view[start:end] for start, end in bounds])

    def _offsets(self, at: Positions, sizes: Positions) -> npt.NDArray[np.int32]:
        """Return the offsets of all rows in the bytes that `_joined` makes of these `sizes`."""
        total = int(sizes.sum())
        _demand(total <= _OFFSETS_MAX and not self._word(self._starts + at).any())
        own = np.frombuffer(self._joined(self._starts + at, 4 * self._rows), "<u4")
        offsets = np.empty(len(own) + 1, np.int64)
        offsets[:-1] = own
        offsets[:-1] += np.repeat(sizes.cumsum() - sizes, self._rows)
        offsets[-1] = total
        _demand((offsets[1:] >= offsets[:-1]).all())
        return offsets.astype(np.int32)

    def _seqs(self) -> Numbers:
        has_seqs = self._has(HAS_SEQS)
        at = self._starts + _COLUMNS_AT
        if has_seqs.all() and not self._assigned_seq:
            return np.frombuffer(self._joined(at, 8 * self._rows), "<u8")
        shared = np.frombuffer(self._view, "<u8")[at >> 3]
        if self._assigned_seq:
            _demand(not has_seqs.any() and not shared.any())
            return np.full(int(self._rows.sum()), self._assigned_seq, np.uint64)
        seqs = np.repeat(shared, self._rows)
        if has_seqs.any():
            own = self._joined(at[has_seqs], 8 * self._rows[has_seqs])
            seqs[np.repeat(has_seqs, self._rows)] = np.frombuffer(own, "<u8")
        return seqs

    def _expiry(self) -> Numbers | None:
        has_expiry = self._has(HAS_EXPIRY)
        if not has_expiry.any():
            return None
        at = (self._starts + self._expiry_at)[has_expiry]
        own = np.frombuffer(self._joined(at, 8 * self._rows[has_expiry]), "<u8")
        if has_expiry.all():
            return own if own.any() else None
        expire_at_ms = np.zeros(int(self._rows.sum()), np.uint64)
        expire_at_ms[np.repeat(has_expiry, self._rows)] = own
        return expire_at_ms if own.any() else None

    def _kinds(self, value_offsets: npt.NDArray[np.int32]) -> Bytes | None:
        has_kinds = self._has(HAS_KINDS)
        if not has_kinds.any():
            return None
        at = (self._starts + self._kinds_at)[has_kinds]
        own = self._joined(at, self._rows[has_kinds])
        _demand(not own.translate(None, KINDS_OF[_SECTION]))
        kinds = np.full(int(self._rows.sum()), Kind.PUT, np.uint8)
        kinds[np.repeat(has_kinds, self._rows)] = np.frombuffer(own, np.uint8)
        tombstones = kinds == Kind.TOMBSTONE
        _demand(not (value_offsets[1:] - value_offsets[:-1])[tombstones].any())
        return kinds if tombstones.any() else None


def _demand(condition: object) -> None:
    if not condition:
        raise _Unfit


def _binary(offsets: npt.NDArray[np.int32], data: bytes) -> pa.BinaryArray:
    buffers = [None, pa.py_buffer(offsets), pa.py_buffer(data)]
    return pa.Array.from_buffers(pa.binary(), len(offsets) - 1, buffers)


def _check_order(keys: pa.BinaryArray, seqs: Numbers) -> None:
    """Demand that rows are sorted by key, and versions of one key from newest to oldest."""
    before, after = keys.slice(0, len(keys) - 1), keys.slice(1)
    if pc.all(pc.less(before, after), min_count=0).as_py():
        return
    _demand(pc.all(pc.less_equal(before, after)).as_py())
    same = bools_of(pc.equal(before, after))
    _demand((seqs[:-1][same] > seqs[1:][same]).all())


def out_of_order(index: BlockIndex, number: int) -> BadStructure:
    """Return the error for a block whose first key is not above the last key of the one before."""
    problem = "the block before it ends with the same key or above"
    return BadStructure(index.piece.name, index[number].offset, problem)


@dataclass(frozen=True, slots=True)
class SourceRequest:
    """The rows that a scan requests of every source."""

    keys: KeyRange
    seq: int
    all_versions: bool
    with_values: bool
    group_bytes: int  # fetched at once; half of it is ready before a merge

    def of(self, rows: Rows, max_seq: int) -> Rows:
        """Return the requested ones of a source's rows, whose greatest seq is `max_seq`."""
        start, end = self.keys
        high = rows.first_from(end) if end else len(rows)
        rows = rows.part(min(rows.first_from(start) if start else 0, high), high)
        if max_seq > self.seq:
            rows = rows.kept(rows.seqs <= np.uint64(self.seq))
        return rows if self.all_versions else newest_versions(rows)


class RowSource(Protocol):
    """Rows sorted by key; versions of one key from newest to oldest."""

    @property
    def bound(self) -> bytes | None:
        """The greatest key up to which all rows have been read; None: all rows have been read."""
        ...

    async def fill(self, tasks: asyncio.TaskGroup) -> None:
        """Read until there is enough for a merge. Raises `CorruptObject` and `StoreError`.

        `tasks` outlives this source.
        """
        ...

    def take(self, bound: bytes | None) -> Sequence[SourceRows]:
        """Take the rows that were read up to the key `bound`, which is included; None: all."""
        ...

    def take_tombstones(self) -> list[Entry]:
        """Take the range tombstones that were found since the last call.

        They are found before any row whose key they may cover.
        """
        ...

    def close(self) -> None:
        """Cancel reads that are under way."""
        ...


class Buffer:
    """Rows that were read and not taken. By itself, it is a source of rows in memory."""

    def __init__(self, rows: Rows | None = None) -> None:
        self._parts: deque[SourceRows] = deque()
        self.size_bytes = 0
        if rows is not None and len(rows):
            self.add(rows)

    bound: bytes | None = None

    async def fill(self, tasks: asyncio.TaskGroup) -> None:
        """Do nothing: there is nothing to read."""

    def take_tombstones(self) -> list[Entry]:
        return []

    def close(self) -> None:
        """Do nothing: no read is under way."""

    @property
    def last_key(self) -> bytes | None:
        """The greatest key; None: it is empty."""
        return self._parts[-1].last_key if self._parts else None

    def add(self, rows: Rows) -> None:
        """Add one or more rows behind all others."""
        self._parts.append(SourceRows(rows, rows.key(0), rows.key(len(rows) - 1)))
        self.size_bytes += rows.size_bytes

    def take(self, bound: bytes | None) -> Sequence[SourceRows]:
        taken = []
        while self._parts and (bound is None or self._parts[0].first_key <= bound):
            part = self._parts.popleft()
            self.size_bytes -= part.rows.size_bytes
            if bound is not None and part.last_key > bound:
                rows = part.rows
                stop = rows.first_after(bound)
                rest = SourceRows(rows.part(stop, len(rows)), rows.key(stop), part.last_key)
                self._parts.appendleft(rest)
                self.size_bytes += rest.rows.size_bytes
                part = SourceRows(rows.part(0, stop), part.first_key, rows.key(stop - 1))
            taken.append(part)
        return taken


class ObjectsSource:
    """The rows of stored objects, each of which has greater keys than the one before."""

    def __init__(self, objects: Sequence[StoredRows], wanted: SourceRequest) -> None:
        """Create a source that has read nothing."""
        self._unopened = [*objects][::-1]
        self._wanted = wanted
        self._buffer = Buffer()
        self._object: StoredRows | None = None
        self._opened: OpenedObject | None = None
        self._blocks = range(0)  # of the open object, not fetched yet
        self._group_bytes = 0.0  # as stored
        self._coming: tuple[OpenedObject, range, asyncio.Task[bytes | ShaleError]] | None = None
        self._tombstones: list[Entry] = []
        self._last_key: bytes | None = None  # the last one decoded of the open object

    @property
    def bound(self) -> bytes | None:
        return self._buffer.last_key if self._has_more else None

    async def fill(self, tasks: asyncio.TaskGroup) -> None:
        wanted = self._wanted
        while self._has_more and (
            self._buffer.last_key is None or self._buffer.size_bytes < wanted.group_bytes / 2
        ):
            if self._coming is None:
                await self._fetch(tasks)
                continue
            opened, numbers, task = self._coming
            found = await task
            self._coming = None
            if isinstance(found, ShaleError):
                raise found
            rows = rows_of_blocks(opened.index, numbers, found, with_values=wanted.with_values)
            self._check_order(opened, numbers, rows)
            await self._fetch(tasks)
            rows = wanted.of(rows, opened.max_seq)
            if len(rows):
                self._buffer.add(rows)

    def take(self, bound: bytes | None) -> Sequence[SourceRows]:
        return self._buffer.take(bound)

    def take_tombstones(self) -> list[Entry]:
        found, self._tombstones = self._tombstones, []
        return found

    def close(self) -> None:
        if self._coming is not None:
            self._coming[-1].cancel()

    @property
    def _has_more(self) -> bool:
        return self._coming is not None or bool(self._blocks) or bool(self._unopened)

    async def _fetch(self, tasks: asyncio.TaskGroup) -> None:
        """Begin to fetch the next group of blocks, if there is one."""
        while not self._blocks and self._unopened:
            await self._open(self._unopened.pop())
        if not self._blocks or self._opened is None or self._object is None:
            return
        numbers = self._next_group(self._opened)
        self._blocks = self._blocks[len(numbers) :]
        work = _outcome(self._object, self._opened, numbers)
        self._coming = (self._opened, numbers, tasks.create_task(work))

    async def _open(self, stored: StoredRows) -> None:
        opened = await stored.open()
        contents, layout = opened.footer.contents, opened.footer.layout
        row_bytes = contents.key_bytes + contents.value_bytes + _ROW_BYTES * contents.entry_count
        expansion = row_bytes / layout.object_size
        self._group_bytes = self._wanted.group_bytes / max(expansion, 1.0)
        self._object, self._opened, self._last_key = stored, opened, None
        self._blocks = blocks_between(opened.index, Section.POINTS, *self._wanted.keys)
        self._tombstones += [each for each in opened.tombstones if each.seq <= self._wanted.seq]

    def _next_group(self, opened: OpenedObject) -> range:
        """Return the next blocks, one or more, with about as many bytes as a group may have."""
        index, blocks = opened.index, self._blocks
        limit = index[blocks[0]].offset + self._group_bytes
        if index[blocks[-1]].offset + index[blocks[-1]].length <= limit:
            return blocks
        count = bisect_right(blocks, limit, key=lambda number: index[number].offset) - 1
        return blocks[: max(count, 1)]

    def _check_order(self, opened: OpenedObject, numbers: range, rows: Rows) -> None:
        """Check that this group is behind the one before; within a group, order is checked."""
        if self._last_key is not None and rows.key(0) <= self._last_key:
            raise out_of_order(opened.index, numbers[0])
        self._last_key = rows.key(len(rows) - 1)


async def _outcome(stored: StoredRows, opened: OpenedObject, numbers: range) -> bytes | ShaleError:
    """Read blocks; return an error instead of raising it, to be raised when they are needed."""
    try:
        return await stored.blocks(opened.index, numbers)
    except ShaleError as error:
        return error
