"""Checks one SST in the store, in pieces: of a large one only a few megabytes are in memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from shalekv.errors import CorruptObject, ObjectNotFound, StoreError, WrongObject
from shalekv.format.filter import Filter
from shalekv.format.footer import Footer
from shalekv.format.footer_codec import read_footer
from shalekv.format.index import BlockHandle, BlockIndex
from shalekv.format.sst import open_filter, read_index
from shalekv.format.sst_audit import SstAudit
from shalekv.format.sst_tail import needed_tail
from shalekv.protocol.audit import Finding, FindingKind
from shalekv.protocol.manifest import PendingLoad
from shalekv.store.cas import CasStore

TAIL_BYTES = 64 << 10  # holds the footer unless its keys are long
PIECE_BYTES = 4 << 20  # of an object at once


@dataclass(slots=True)
class Audited:
    """What became of the check of one object."""

    name: str
    size_bytes: int
    footer: Footer | None = None  # None: it cannot be read
    loads: list[PendingLoad] = field(default_factory=list)  # that its control records commit
    repeated_key: bytes | None = None
    findings: list[Finding] = field(default_factory=list)
    is_missing: bool = False

    def add(self, error: CorruptObject) -> None:
        """One more finding."""
        self.findings.append(finding_of(error))


def finding_of(error: CorruptObject) -> Finding:
    """What an error of the format says."""
    return Finding(error.name, FindingKind(error.reason.lower()), error.problem, error.offset)


def unreadable(name: str, error: StoreError) -> Finding:
    """What an error of the store says."""
    return Finding(name, FindingKind.UNREADABLE, str(error))


class _Bytes:
    """The bytes of one object; a small one is fetched whole."""

    def __init__(self, store: CasStore, name: str, size_bytes: int) -> None:
        self._store = store
        self._name = name
        self._size_bytes = size_bytes
        self._whole: bytes | None = None

    async def read(self, offset: int, length: int) -> bytes:
        if self._size_bytes > PIECE_BYTES:
            return await self._store.reads.get_range(self._name, offset, length)
        if self._whole is None:
            self._whole = (await self._store.reads.get(self._name)).data
        return self._whole[offset : offset + length]


async def audit_object(
    store: CasStore,
    name: str,
    size_bytes: int,
    *,
    database_id: bytes,
    checksum: int | None = None,
    listed_seq: int = 0,
) -> Audited:
    """Check every byte of the SST `name`, and that the parts fit together.

    `checksum` is what the manifest says of the footer (None: nothing), `listed_seq` the sequence
    number that it gives to entries which have none. All damage is told, but what stands behind a
    footer or an index that cannot be read.
    """
    audited = Audited(name, size_bytes)
    data = _Bytes(store, name, size_bytes)
    try:
        footer = await _footer(data, audited, database_id, checksum)
        audited.footer = footer
        key_filter = await _filter(data, audited, footer)
        layout = footer.layout
        index_bytes = await data.read(layout.index_offset, layout.index_len)
        index = read_index(footer, index_bytes, listed_seq)
        await _blocks(store, data, audited, SstAudit(footer, index, key_filter), index)
    except CorruptObject as error:
        audited.add(error)
    except ObjectNotFound:
        audited.is_missing = True
    except StoreError as error:
        audited.findings.append(unreadable(name, error))
    return audited


async def _footer(
    data: _Bytes, audited: Audited, database_id: bytes, checksum: int | None
) -> Footer:
    name, size_bytes = audited.name, audited.size_bytes
    tail_bytes = min(TAIL_BYTES, size_bytes)
    tail = await data.read(size_bytes - tail_bytes, tail_bytes)
    needed = needed_tail(name, tail, size_bytes)
    if tail_bytes < needed <= size_bytes:
        tail = await data.read(size_bytes - needed, needed)
    footer = read_footer(name, tail, size_bytes, database_id=database_id)
    if checksum is not None and footer.checksum != checksum:
        at = footer.layout.index_offset + footer.layout.index_len
        problem = f"checksum of the footer is {footer.checksum:#010x}, expected {checksum:#010x}"
        audited.add(WrongObject(name, at, problem))
    return footer


async def _filter(data: _Bytes, audited: Audited, footer: Footer) -> Filter | None:
    layout = footer.layout
    try:
        return open_filter(footer, await data.read(layout.filter_offset, layout.filter_len))
    except CorruptObject as error:
        audited.add(error)
        return None


async def _blocks(
    store: CasStore, data: _Bytes, audited: Audited, audit: SstAudit, index: BlockIndex
) -> None:
    for number, handles in _pieces(index):
        offset = handles[0].offset
        piece = await data.read(offset, handles[-1].offset + handles[-1].length - offset)
        for error in await store.runtime.workers.run(_check, audit, number, handles, piece):
            audited.add(error)
    audited.repeated_key = audit.repeated_key
    audited.loads = audit.loads
    contradiction = audit.check_contents()
    if contradiction is not None:
        audited.add(contradiction)


def _check(
    audit: SstAudit, first: int, handles: Sequence[BlockHandle], piece: bytes
) -> list[CorruptObject]:
    start = handles[0].offset
    errors = []
    for number, handle in enumerate(handles, first):
        at = handle.offset - start
        error = audit.check_block(number, piece[at : at + handle.length])
        if error is not None:
            errors.append(error)
    return errors


def _pieces(index: BlockIndex) -> Iterator[tuple[int, list[BlockHandle]]]:
    """Blocks to be fetched together, each time with the number of the first."""
    first, handles, size_bytes = 0, list[BlockHandle](), 0
    for number, handle in enumerate(index):
        if handles and size_bytes + handle.length > PIECE_BYTES:
            yield first, handles
            first, handles, size_bytes = number, [], 0
        handles.append(handle)
        size_bytes += handle.length
    if handles:
        yield first, handles
