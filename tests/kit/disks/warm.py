"""A file system of which all files are in the page cache."""

from __future__ import annotations

from shalekv.store.files import REAL_FILE_SYSTEM
from tests.kit.disks.careless import ForwardingFileSystem


class WarmFileSystem(ForwardingFileSystem):
    """The real file system, whose reads never have to wait; it remembers what is open."""

    def __init__(self) -> None:
        super().__init__(REAL_FILE_SYSTEM)

    def pread_now(self, descriptor: int, length: int, offset: int) -> bytes | None:
        return self.pread(descriptor, length, offset)
