"""The names of objects, built and parsed here and nowhere else.

manifest/<20 digits>.manifest     wal/<20 digits>.sst     levels/<UUID version 7>.sst
election/<20 digits>.lease        access/<20 digits>.policy
<any of these>.<UUID>.<checksum>  temporary: two-phase compare-and-swap copies it to <any of these>

Parsers return None for every other name: a folder may hold objects of others. A name has exactly
one spelling, so that building and parsing are each other's inverse.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache

MANIFEST_FOLDER = "manifest/"
WAL_FOLDER = "wal/"
LEVELS_FOLDER = "levels/"
ELECTION_FOLDER = "election/"
ACCESS_FOLDER = "access/"
VERIFY_FOLDER = "verify/"  # of checks of the store; no role of a database reads it

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
_ELECTION = re.compile(r"election/([0-9]{20})\.lease")
_POLICY = re.compile(r"access/([0-9]{20})\.policy")
_TEMPORARY = re.compile(
    r"(.+)\.([0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12})\.([0-9a-f]{8})"
)


@dataclass(frozen=True, slots=True)
class TemporaryName:
    """The name of an object that is to be copied to `destination`."""

    destination: str
    uuid: bytes  # 16 bytes
    checksum: int  # CRC-32C of the object

    def __str__(self) -> str:
        """Return the name."""
        return temporary_name(self.destination, self.uuid, self.checksum)


def manifest_name(manifest_id: int) -> str:
    """Return the name of manifest `manifest_id`, 0 to 2^64 - 1."""
    return f"{MANIFEST_FOLDER}{_digits(manifest_id)}.manifest"


def wal_name(wal_id: int) -> str:
    """Return the name of WAL object `wal_id`, 0 to 2^64 - 1."""
    return f"{WAL_FOLDER}{_digits(wal_id)}.sst"


def election_name(lease_id: int) -> str:
    """Return the name of lease `lease_id` of the election of a writer, 0 to 2^64 - 1."""
    return f"{ELECTION_FOLDER}{_digits(lease_id)}.lease"


def policy_name(version: int) -> str:
    """Return the name of this version of the access policy, 0 to 2^64 - 1."""
    return f"{ACCESS_FOLDER}{_digits(version)}.policy"


@lru_cache(maxsize=4_096)
def level_name(sst_id: bytes) -> str:
    """Return the name of the SST of the levels with this id, a UUID of version 7 in 16 bytes."""
    if not is_uuid7(sst_id):
        raise ValueError(f"{sst_id.hex()} is not a UUID of version 7")
    return f"{LEVELS_FOLDER}{_uuid(sst_id)}.sst"


def temporary_name(destination: str, uuid: bytes, checksum: int) -> str:
    """Return the name of an object that is to be copied to `destination`.

    `uuid` has 16 bytes; `checksum` is the CRC-32C of the object.
    """
    if len(uuid) != UUID_BYTES or not 0 <= checksum < 2**32:
        raise ValueError(f"{uuid.hex()} and {checksum} are not 16 bytes and a CRC-32C")
    return f"{destination}.{_uuid(uuid)}.{checksum:08x}"


def parse_manifest_name(name: str) -> int | None:
    """Return the id of the manifest with this name."""
    return _parse_id(_MANIFEST, name)


def parse_wal_name(name: str) -> int | None:
    """Return the id of the WAL object with this name."""
    return _parse_id(_WAL, name)


def parse_election_name(name: str) -> int | None:
    """Return the id of the lease with this name."""
    return _parse_id(_ELECTION, name)


def parse_policy_name(name: str) -> int | None:
    """Return the version of the access policy with this name."""
    return _parse_id(_POLICY, name)


def parse_level_name(name: str) -> bytes | None:
    """Return the id of the SST with this name, the 16 bytes of its UUID."""
    match = _LEVEL.fullmatch(name)
    return None if match is None else bytes.fromhex(match[1].replace("-", ""))


def parse_temporary_name(name: str) -> TemporaryName | None:
    """Return the parts of the name of a temporary object."""
    match = _TEMPORARY.fullmatch(name)
    if match is None:
        return None
    return TemporaryName(match[1], bytes.fromhex(match[2].replace("-", "")), int(match[3], 16))


def is_uuid7(value: bytes) -> bool:
    """Return whether these bytes are a UUID of version 7."""
    return len(value) == UUID_BYTES and (value[6] >> 4, value[8] >> 6) == (_VERSION, _VARIANT)


def _uuid(value: bytes) -> str:
    text = value.hex()
    return "-".join((text[:8], text[8:12], text[12:16], text[16:20], text[20:]))


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
