"""What is left of a WAL object of which a part was applied before, record by record."""

from __future__ import annotations

from shalekv.engine.quorum.objects import SECTIONS
from shalekv.errors import IllegalState
from shalekv.format.sst import Sst, open_sst
from shalekv.format.sst_encode import encode_sst
from shalekv.protocol.entry import Entry

BLOCK_BYTES = 64 << 10


def rest_of_object(found: Sst, *, applied_seq: int, applied_count: int) -> Sst:
    """The entries behind commit `applied_seq`, as an object of the same name.

    Raises `IllegalState` unless `applied_count` entries come before: what was applied is not in the
    log of the database any more.
    """
    kept: list[list[Entry]] = []
    left_out = 0
    for entries in SECTIONS:
        all_of_it = [*entries(found)]
        kept.append([entry for entry in all_of_it if entry.seq > applied_seq])
        left_out += len(all_of_it) - len(kept[-1])
    name = found.properties.name
    if left_out != applied_count:
        raise IllegalState(
            f"{name} has {left_out} entries up to commit {applied_seq}, but {applied_count} were "
            "applied when they were committed: the log was put back to an older state. Start this "
            "process again"
        )
    data = encode_sst(found.properties, *kept, block_bytes=BLOCK_BYTES)
    return open_sst(name, data, database_id=found.properties.database_id)
