"""SSTs as protobuf messages: packed columns for the levels, one by one for pending loads."""

from __future__ import annotations

from shalekv.errors import UnsupportedVersion
from shalekv.format.coding import Piece
from shalekv.protocol.sst_table import ID_BYTES, SstInfo, SstTable
from shalekv.v1 import manifest_pb2

SSTINFO_FORMAT_VERSION = 1
_EXPIRY_BYTES = 8


def table_message(table: SstTable) -> manifest_pb2.SstTable:
    """Encode the columns as a message, without a loop over SSTs."""
    return manifest_pb2.SstTable(
        count=table.count,
        ids=table.ids,
        levels=table.levels,
        first_key_offsets=table.first_key_offsets,
        first_keys=table.first_keys,
        last_key_offsets=table.last_key_offsets,
        last_keys=table.last_keys,
        filter_offsets=table.filter_offsets,
        filter_lens=table.filter_lens,
        block_meta_offsets=table.block_meta_offsets,
        block_meta_lens=table.block_meta_lens,
        min_seqs=table.min_seqs,
        max_seqs=table.max_seqs,
        entry_counts=table.entry_counts,
        tombstone_counts=table.tombstone_counts,
        sizes_bytes=table.sizes_bytes,
        checksums=table.checksums,
        # Left out unless values expire, so that versions without this column can read the table.
        first_expiries_ms=table.first_expiries_ms if table.first_expiries_ms.strip(b"\0") else b"",
    )


def table_of(message: manifest_pb2.SstTable) -> SstTable:
    """Decode the columns in a message. `ValueError` names a column whose length is wrong.

    The column of expiries may be missing: then no SST in it has values that expire. `count` may be
    any number here; it is compared with the length of the columns later.
    """
    no_expiries = bytes(_EXPIRY_BYTES * (len(message.ids) // ID_BYTES))
    return SstTable(
        count=message.count,
        ids=message.ids,
        levels=message.levels,
        first_key_offsets=message.first_key_offsets,
        first_keys=message.first_keys,
        last_key_offsets=message.last_key_offsets,
        last_keys=message.last_keys,
        filter_offsets=message.filter_offsets,
        filter_lens=message.filter_lens,
        block_meta_offsets=message.block_meta_offsets,
        block_meta_lens=message.block_meta_lens,
        min_seqs=message.min_seqs,
        max_seqs=message.max_seqs,
        entry_counts=message.entry_counts,
        tombstone_counts=message.tombstone_counts,
        sizes_bytes=message.sizes_bytes,
        checksums=message.checksums,
        first_expiries_ms=message.first_expiries_ms or no_expiries,
    )


def info_message(info: SstInfo) -> manifest_pb2.SstInfo:
    """Encode one SST."""
    return manifest_pb2.SstInfo(
        sstinfo_format_version=SSTINFO_FORMAT_VERSION,
        id=info.id,
        level=info.level,
        first_key=info.first_key,
        last_key=info.last_key,
        filter_offset=info.filter_offset,
        filter_len=info.filter_len,
        block_meta_offset=info.block_meta_offset,
        block_meta_len=info.block_meta_len,
        min_seq=info.min_seq,
        max_seq=info.max_seq,
        entry_count=info.entry_count,
        tombstone_count=info.tombstone_count,
        size_bytes=info.size_bytes,
        checksum=info.checksum,
        first_expiry_ms=info.first_expiry_ms,
    )


def info_of(message: manifest_pb2.SstInfo, piece: Piece) -> SstInfo:
    """Decode the SST in a message that was read from `piece`.

    Raises `UnsupportedVersion` for a later version, and `ValueError` for version 0, which does not
    exist.
    """
    version = message.sstinfo_format_version
    if version > SSTINFO_FORMAT_VERSION:
        problem = f"SstInfo format version {version}, expected at most {SSTINFO_FORMAT_VERSION}"
        raise UnsupportedVersion(piece.name, piece.offset, problem)
    if version == 0:
        raise ValueError("sstinfo_format_version: 0 does not exist")
    return SstInfo(
        id=message.id,
        level=message.level,
        first_key=message.first_key,
        last_key=message.last_key,
        filter_offset=message.filter_offset,
        filter_len=message.filter_len,
        block_meta_offset=message.block_meta_offset,
        block_meta_len=message.block_meta_len,
        min_seq=message.min_seq,
        max_seq=message.max_seq,
        entry_count=message.entry_count,
        tombstone_count=message.tombstone_count,
        size_bytes=message.size_bytes,
        checksum=message.checksum,
        first_expiry_ms=message.first_expiry_ms,
    )
