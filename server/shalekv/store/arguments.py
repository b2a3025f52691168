"""Checks of the arguments that every store takes, so that all stores refuse the same ones."""

from __future__ import annotations

from shalekv.errors import InvalidRequest

# Ends the names of files that a local store is still writing. No store creates an object with it.
TEMP_SUFFIX = ".tmp"

# Object stores stop at 1,024 bytes with the root of the database before the name; file systems
# at 255 bytes per part, of which a temporary file takes some more than the object.
MAX_NAME_BYTES = 512
MAX_PART_BYTES = 200


def check_name(name: str) -> None:
    """Raise `InvalidRequest` unless `name` stays below the root of the database.

    What a list shows passes, foreign names included, for the collector deletes those.
    """
    parts = name.split("/")
    if any(part in {"", ".", ".."} for part in parts) or "\0" in name:
        raise InvalidRequest(
            "name",
            f"{name!r} is not the name of an object: names look like wal/0001.sst, and have no "
            "empty, '.' or '..' parts",
        )


def check_new_name(name: str) -> None:
    """Raise `InvalidRequest` unless every store can create an object of this name."""
    check_name(name)
    parts = name.split("/")
    longest_bytes = max(len(part.encode("utf-8", "surrogateescape")) for part in parts)
    if not name.isascii() or not name.isprintable() or "\\" in name:
        raise InvalidRequest("name", f"{name!r} has characters other than printable ASCII")
    if longest_bytes > MAX_PART_BYTES or len(name) > MAX_NAME_BYTES:
        raise InvalidRequest(
            "name",
            f"{name!r} is too long: at most {MAX_NAME_BYTES} bytes, {MAX_PART_BYTES} per part",
        )
    if name.endswith(TEMP_SUFFIX):
        raise InvalidRequest("name", f"{name!r} ends in {TEMP_SUFFIX}, as unfinished files do")


def check_prefix(prefix: str) -> None:
    """Raise `InvalidRequest` unless `prefix` is a folder: a name and a slash."""
    if not prefix.endswith("/"):
        raise InvalidRequest("prefix", f"{prefix!r} is not a folder: it does not end in /")
    check_name(prefix[:-1])


def byte_range(size_bytes: int, offset: int, length: int) -> tuple[int, int]:
    """First byte and length of what `get_range` takes from an object of `size_bytes`.

    A negative `offset` counts from the end; one that reaches before the beginning means it.
    """
    if length < 0:
        raise InvalidRequest("length", f"{length} is negative")
    first = max(0, size_bytes + offset) if offset < 0 else min(offset, size_bytes)
    return first, min(length, size_bytes - first)
