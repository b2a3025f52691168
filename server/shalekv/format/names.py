"""The names of objects, built and parsed here and nowhere else.

manifest/<20 digits>.manifest     wal/<20 digits>.sst     levels/<UUID version 7>.sst

Parsers return None for every other name: a folder may hold objects that are not ours. A name has
exactly one spelling, so that building and parsing are each other's inverse.
"""

from __future__ import annotations

import re

MANIFEST_FOLDER = "manifest/"
WAL_FOLDER = "wal/"
LEVELS_FOLDER = "levels/"

MAX_ID = 2**64 - 1
UUID_BYTES = 16
_VERSION = 7  # the upper half of byte 6
_VARIANT = 0b10  # the upper bits of byte 8

_MANIFEST = re.compile(r"manifest/([0-9]{20})\.manifest")
_WAL = re.compile(r"wal/([0-9]{20})\.sst")
# xxxxxxxx-xxxx-7xxx-[89ab]xxx-xxxxxxxxxxxx: version 7 and the variant of RFC 9562.
_LEVEL = re.compile(
    r"levels/([0-9a-f]{8}-[0-9a-f]{4}-7[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12})\.sst"
)


def manifest_name(manifest_id: int) -> str:
    """The name of manifest `manifest_id`, 0 to 2^64 - 1."""
    return f"{MANIFEST_FOLDER}{_digits(manifest_id)}.manifest"


def wal_name(wal_id: int) -> str:
    """The name of WAL object `wal_id`, 0 to 2^64 - 1."""
    return f"{WAL_FOLDER}{_digits(wal_id)}.sst"


def level_name(sst_id: bytes) -> str:
    """The name of the SST of the levels whose id is this UUID of version 7, 16 bytes."""
    if not is_uuid7(sst_id):
        raise ValueError(f"{sst_id.hex()} is not a UUID of version 7")
    text = sst_id.hex()
    uuid = "-".join((text[:8], text[8:12], text[12:16], text[16:20], text[20:]))
    return f"{LEVELS_FOLDER}{uuid}.sst"


def parse_manifest_name(name: str) -> int | None:
    """The id of the manifest with this name."""
    return _parse_id(_MANIFEST, name)


def parse_wal_name(name: str) -> int | None:
    """The id of the WAL object with this name."""
    return _parse_id(_WAL, name)


def parse_level_name(name: str) -> bytes | None:
    """The 16 bytes of the UUID of the SST with this name."""
    match = _LEVEL.fullmatch(name)
    return None if match is None else bytes.fromhex(match[1].replace("-", ""))


def is_uuid7(value: bytes) -> bool:
    """Whether these bytes are a UUID of version 7."""
    return len(value) == UUID_BYTES and (value[6] >> 4, value[8] >> 6) == (_VERSION, _VARIANT)


def _digits(number: int) -> str:
    if not 0 <= number <= MAX_ID:
        raise ValueError(f"the id {number} is not between 0 and 2^64 - 1")
    return f"{number:020d}"


def _parse_id(pattern: re.Pattern[str], name: str) -> int | None:
    match = pattern.fullmatch(name)
    if match is None:
        return None
    number = int(match[1])
    return number if number <= MAX_ID else None
