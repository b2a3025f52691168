"""What is wrong with the bytes of a stored object."""

from __future__ import annotations

from shalekv.errors.root import ShaleError


class CorruptObject(ShaleError):
    """Stored bytes are not what was written."""

    reason = "CORRUPT_OBJECT"

    def __init__(self, name: str, offset: int, problem: str) -> None:
        """`name` is the object, `offset` the byte at which the problem was seen."""
        super().__init__(f"{name} at byte {offset}: {problem}")
        self.name = name
        self.offset = offset
        self.problem = problem


class BadMagic(CorruptObject):
    """Not an object of ours."""

    reason = "BAD_MAGIC"


class UnsupportedVersion(CorruptObject):
    """Written by a newer version of ShaleKV. Upgrade this one."""

    reason = "UNSUPPORTED_VERSION"


class Truncated(CorruptObject):
    """The object is shorter, or longer, than it says."""

    reason = "TRUNCATED"


class BadChecksum(CorruptObject):
    """A checksum does not match."""

    reason = "BAD_CHECKSUM"


class WrongObject(CorruptObject):
    """The bytes are intact, but belong to another name or to another database."""

    reason = "WRONG_OBJECT"


class BadStructure(CorruptObject):
    """The checksums match, but the contents contradict each other or the format."""

    reason = "BAD_STRUCTURE"
