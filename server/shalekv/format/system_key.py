"""The keys of section 2, a key space of the system's own: first byte the kind of record.

    0x01  idempotency record: then the key that the client chose, 1 to 64 bytes

Readers refuse kinds that they don't know: who skips a record loses what it protects.
"""

from __future__ import annotations

import enum
from collections.abc import Collection, Iterable
from operator import itemgetter

CLIENT_KEY_BYTES_MAX = 64


class RecordKind(enum.IntEnum):
    """What a record of the system is about. The numbers are part of the format."""

    IDEMPOTENCY = 1


_first_byte = itemgetter(slice(1))  # empty for an empty key
_KNOWN = frozenset(bytes((kind,)) for kind in RecordKind)


def record_key(idempotency_key: bytes) -> bytes:
    """The key of the record of a client's key. `ValueError`: that does not have 1 to 64 bytes."""
    if not 1 <= len(idempotency_key) <= CLIENT_KEY_BYTES_MAX:
        problem = f"expected 1 to {CLIENT_KEY_BYTES_MAX} bytes, found {len(idempotency_key)}"
        raise ValueError(f"idempotency key: {problem}")
    return bytes((RecordKind.IDEMPOTENCY,)) + idempotency_key


def client_key(key: bytes) -> bytes:
    """The client's key in the key of an idempotency record. `ValueError`: it is no such key."""
    if key_violation((key,)) is not None:
        raise ValueError(f"{key.hex()} is not the key of an idempotency record")
    return key[1:]


def key_violation(keys: Collection[bytes]) -> str | None:
    """What is wrong with these keys, one or more, as keys of section 2; None: nothing."""
    if not all(keys):
        return "the key of a record is empty, and names no kind"
    kind = unknown_kind(keys)
    if kind is not None:
        return f"a record has the unknown kind {kind}"
    lengths = {*map(len, keys)}
    if min(lengths) == 1 or max(lengths) > 1 + CLIENT_KEY_BYTES_MAX:
        return f"a client's key in a record does not have 1 to {CLIENT_KEY_BYTES_MAX} bytes"
    return None


def unknown_kind(keys: Iterable[bytes]) -> int | None:
    """The least kind of record among these keys that this version does not know, if any."""
    strangers = {*map(_first_byte, keys)} - _KNOWN - {b""}
    return min(strangers)[0] if strangers else None
