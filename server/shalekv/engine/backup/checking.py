"""Is this what it is said to be: the bytes of an object, of a copy, before they are passed on.

Every byte of an SST is covered by a checksum of the SST itself; in the repository another one is in
the name of the copy, and covers all.
"""

from __future__ import annotations

from shalekv.errors import BadChecksum, Truncated, WrongObject
from shalekv.format.backup_names import Copy, LevelCopy, WalCopy
from shalekv.format.coding import crc32c
from shalekv.format.names import level_name
from shalekv.format.sst import Sst, open_sst
from shalekv.protocol.sst_table import SstInfo


def level_copy(info: SstInfo, data: bytes) -> LevelCopy:
    """What the copy of this SST is called, when its bytes are sound. Raises `CorruptObject`."""
    name = level_name(info.id)
    check_size(name, data, info.size_bytes)
    open_sst(name, data, database_id=None, checksum=info.checksum)
    return LevelCopy(info.id, crc32c(data))


def wal_copy(name: str, data: bytes, wal_id: int, database_id: bytes) -> WalCopy:
    """What the copy of this WAL object is called, when its bytes are sound."""
    sst = open_sst(name, data, database_id=database_id)
    return WalCopy(wal_id, sst.properties.write_id, crc32c(data))


def check_copy(copy: Copy, size_bytes: int, data: bytes) -> Sst:
    """The SST in the bytes of a copy. Raises a `CorruptObject`, which names the copy."""
    name = str(copy)
    check_size(name, data, size_bytes)
    checksum = crc32c(data)
    if checksum != copy.checksum:
        problem = f"checksum is {checksum:#010x}, expected {copy.checksum:#010x}"
        raise BadChecksum(name, 0, problem)
    sst = open_sst(copy.source, data, database_id=None)
    if isinstance(copy, WalCopy) and sst.properties.write_id != copy.write_id:
        raise WrongObject(name, 0, f"its write id is {sst.properties.write_id.hex()}")
    return sst


def check_size(name: str, data: bytes, size_bytes: int) -> None:
    """Raise `Truncated` unless there are so many."""
    if len(data) != size_bytes:
        problem = f"has {len(data)} bytes, expected {size_bytes}"
        raise Truncated(name, min(len(data), size_bytes), problem)
