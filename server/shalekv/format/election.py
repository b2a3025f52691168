"""Leases of the election of a writer, as objects: one line of JSON after its checksum.

    5b2d0c9a {"holder":"there:7654","id":41,"nonce":"<32 digits>","released":false,"ttl_ms":3000}

The text is readable for people. A lease only decides which process *tries* to be the writer. So an
object that is damaged or of a newer version counts as nobody's lease, and ends by time as others
do.
"""

from __future__ import annotations

import json
import re

from shalekv.format.coding import crc32c
from shalekv.protocol.lease import ElectionLease

NONCE_BYTES = 16
TTL_MS_MAX = 86_400_000

_LINE = re.compile(rb"([0-9a-f]{8}) (.*)\n", re.DOTALL)
_HEX = re.compile(r"[0-9a-f]{32}")


def encode_lease(lease_id: int, lease: ElectionLease) -> bytes:
    """Return the object with this id: its bytes differ for each id and each tenure."""
    members = {
        "holder": lease.holder,
        "id": lease_id,
        "nonce": lease.nonce.hex(),
        "released": lease.is_released,
        "ttl_ms": lease.ttl_ms,
    }
    body = json.dumps(members, separators=(",", ":")).encode()
    return b"%08x %s\n" % (crc32c(body), body)


def decode_lease(lease_id: int, data: bytes) -> ElectionLease | None:
    """Return the lease in the object with this id; None: it is not a valid lease."""
    line = _LINE.fullmatch(data)
    if line is None or int(line[1], 16) != crc32c(line[2]):
        return None
    try:
        members = json.loads(line[2])
    except (ValueError, RecursionError):
        return None
    match members:
        case {
            "holder": str(holder),
            "id": int(found_id),
            "nonce": str(nonce),
            "released": bool(is_released),
            "ttl_ms": int(ttl_ms),
        } if found_id == lease_id and _HEX.fullmatch(nonce) and 0 < ttl_ms <= TTL_MS_MAX:
            return ElectionLease(holder, bytes.fromhex(nonce), ttl_ms, is_released)
    return None
