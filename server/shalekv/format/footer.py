"""What the footer of an SST says: whose it is, what is in it, and where."""

from __future__ import annotations

from dataclasses import dataclass

from shalekv.format.contents import SstContents
from shalekv.format.names import parse_level_name, parse_wal_name
from shalekv.protocol.sst_table import SstInfo


@dataclass(frozen=True, slots=True, kw_only=True)
class SstProperties:
    """What the writer of an SST decides about it, apart from the entries.

    `name` is the name of the object. `writer_nonce` is the nonce of the process that holds
    `writer_epoch`; `write_id` belongs to this slot and these bytes.
    """

    name: str
    database_id: bytes
    writer_epoch: int
    writer_nonce: bytes
    write_id: bytes
    logical_time_ms: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class SstLayout:
    """Where the parts of an SST stand. A filter of length 0 is none."""

    object_size: int
    filter_offset: int
    filter_len: int
    index_offset: int
    index_len: int
    filter_checksum: int
    index_checksum: int


@dataclass(frozen=True, slots=True)
class Footer:
    """A footer that belongs to the object and the database that it was expected of."""

    properties: SstProperties
    contents: SstContents
    layout: SstLayout
    checksum: int

    def time_told(self, reset_wal_id: int | None) -> int:
        """The logical time that this WAL object proves to have been reached; 0: none.

        One without entries proves none: nothing was decided by it. Nor do those up to
        `reset_wal_id`, which were made before logical time was set back.
        """
        wal_id = parse_wal_name(self.properties.name)
        is_before = reset_wal_id is not None and wal_id is not None and wal_id <= reset_wal_id
        return 0 if is_before or not self.contents.entry_count else self.properties.logical_time_ms

    def info(self, level: int) -> SstInfo:
        """How the manifest lists this SST as part of `level`; only for objects in ``levels/``."""
        sst_id = parse_level_name(self.properties.name)
        if sst_id is None:
            raise ValueError(f"{self.properties.name} is no SST of the levels")
        contents, layout = self.contents, self.layout
        return SstInfo(
            id=sst_id,
            level=level,
            first_key=contents.first_key,
            last_key=contents.last_key,
            filter_offset=layout.filter_offset,
            filter_len=layout.filter_len,
            block_meta_offset=layout.index_offset,
            block_meta_len=layout.index_len,
            min_seq=contents.min_seq,
            max_seq=contents.max_seq,
            entry_count=contents.entry_count,
            tombstone_count=contents.tombstone_count + contents.range_tombstone_count,
            size_bytes=layout.object_size,
            checksum=self.checksum,
        )
