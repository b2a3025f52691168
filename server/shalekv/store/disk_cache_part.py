"""A part of an SST as a file of the cache on disk: how it is named, and when it is believed.

    0   magic 8
    8   database id 16, SST id 16
    40  offset u64, length u64 of the part in the SST
    56  CRC-32C u32 of bytes 0 to 55 and of the part
    60  the part

Numbers are stored least significant byte first. The name is a hash of bytes 8 to 55: so a file says
itself what it is, and one that was cut, changed or put under another name is not believed.
"""

from __future__ import annotations

import re
import struct
from hashlib import blake2b
from typing import NamedTuple

from shalekv.format.coding import crc32c

MAGIC = b"ShalePrt"
NAME_BYTES = 16
HEADER_BYTES = 60
PAGE_BYTES = 4096  # what files are rounded up to on most disks

# Folders, in groups that are scanned by one call of a worker; the names in them begin with theirs.
SHARDS = tuple(tuple(f"{first:x}{second:x}" for second in range(16)) for first in range(16))
TEMP_SUFFIX = ".tmp"

_KEY = struct.Struct("<16s16sQQ")
_OURS = re.compile(r"[0-9a-f]{32}(\.[0-9a-f]+-[0-9a-f]+\.tmp)?", re.ASCII)


class Part(NamedTuple):
    """`length` bytes of an SST from byte `offset` on. Ids are never used again, so they stay."""

    database_id: bytes
    sst_id: bytes
    offset: int
    length: int

    @property
    def file_name(self) -> str:
        """The name of its file; the first two letters are its shard, too."""
        return blake2b(_KEY.pack(*self), digest_size=NAME_BYTES).hexdigest()

    @property
    def file_bytes(self) -> int:
        """The size of its file."""
        return HEADER_BYTES + self.length


def to_file(part: Part, data: bytes) -> bytes:
    """The contents of the file that keeps `data`."""
    head = MAGIC + _KEY.pack(*part)
    return b"".join((head, crc32c(data, crc32c(head)).to_bytes(4, "little"), data))


def from_file(part: Part, contents: bytes) -> bytes | None:
    """The part that `to_file` was given; None: these are not its bytes."""
    head = MAGIC + _KEY.pack(*part)
    if len(contents) != part.file_bytes or not contents.startswith(head):
        return None
    data = contents[HEADER_BYTES:]
    expected = int.from_bytes(contents[len(head) : HEADER_BYTES], "little")
    return data if crc32c(data, crc32c(head)) == expected else None


def is_ours(name: str) -> bool:
    """Whether a file of this name was written by a cache: others are left alone."""
    return _OURS.fullmatch(name) is not None


def on_disk(size_bytes: int) -> int:
    """What a file of this size takes."""
    return -(-size_bytes // PAGE_BYTES) * PAGE_BYTES
