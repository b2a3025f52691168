"""The first slot of a clone's WAL: whoever fills it gives the clone its id.

The object holds nothing. All who make a clone at one URL, at once or after one of them has crashed,
find the id in it and make the same clone: so none of them stands in the way of another.
"""

from __future__ import annotations

from shalekv.core.cloning import FIRST_SLOT, first_write_id
from shalekv.engine.founding import remains
from shalekv.format import names
from shalekv.format.footer import SstProperties
from shalekv.format.sst import open_sst
from shalekv.format.sst_encode import encode_fence
from shalekv.protocol.manifest import NO_NONCE
from shalekv.store.cas import CasStore
from shalekv.store.claim import Taken

_ID_BYTES = 16


async def claim_id(store: CasStore) -> bytes:
    """The id of the clone that is made in this store.

    Raises `IllegalState` when something else stands in its WAL: the manifests of another database
    are lost. REQUIRES: no manifest was there when somebody looked.
    """
    async for info in store.reads.list(names.WAL_FOLDER):
        wal_id = names.parse_wal_name(info.name)
        if wal_id is not None and wal_id != FIRST_SLOT:
            raise remains(store, info.name)
    database_id = store.runtime.random.randbytes(_ID_BYTES)
    name = names.wal_name(FIRST_SLOT)
    outcome = await store.claim(name, _object(database_id))
    if not isinstance(outcome, Taken):
        return database_id
    taken = open_sst(name, outcome.data, database_id=None).properties
    if taken.write_id != first_write_id(taken.database_id):
        raise remains(store, name)
    return taken.database_id


def _object(database_id: bytes) -> bytes:
    properties = SstProperties(
        name=names.wal_name(FIRST_SLOT),
        database_id=database_id,
        writer_epoch=0,
        writer_nonce=NO_NONCE,
        write_id=first_write_id(database_id),
    )
    return encode_fence(properties)
