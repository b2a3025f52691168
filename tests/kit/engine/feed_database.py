"""A database in memory whose log is written by hand, and streams of it without Spark."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pyarrow as pa

from shalekv.format import names
from shalekv.format.footer import SstProperties
from shalekv.format.records import load_entry
from shalekv.format.sst import open_sst
from shalekv.format.sst_writer import encode_sst
from shalekv.protocol.entry import Entry, Kind
from shalekv.protocol.lease import RANDOM_BYTES, leased_sst_id, new_lease_id
from shalekv.protocol.manifest import Manifest, PendingLoad
from shalekv.protocol.sst_table import SstTable
from shalekv_spark.feed.options import FeedOptions
from shalekv_spark.feed.query import FeedQuery
from shalekv_spark.feed.rows import read_part
from shalekv_spark.feed.slots import FeedOffset
from tests.kit.engine.collection import CollectedDatabase

EPOCH = 7


class FeedDatabase(CollectedDatabase):
    """Writes objects that hold more than one put."""

    async def put(self, *keys: bytes, expire_at_ms: int = 0) -> int:
        seq = self.last_seq + 1
        await self.object([Entry(key, seq, Kind.PUT, b"v", expire_at_ms) for key in sorted(keys)])
        return seq

    async def object(
        self,
        points: Sequence[Entry] = (),
        ranges: Sequence[Entry] = (),
        control: Sequence[Entry] = (),
    ) -> None:
        """The next WAL object; without entries it is a fence."""
        entries = [*points, *ranges, *control]
        self.last_seq = max([self.last_seq, *(each.seq for each in entries)])
        self.last_wal_id += 1
        name = names.wal_name(self.last_wal_id)
        data = encode_sst(self._properties(name), points, ranges, (), control, block_bytes=64)
        await self.store.create(name, data)

    async def load(self, *files: Sequence[bytes]) -> PendingLoad:
        infos = []
        for keys in files:
            stem = new_lease_id(self.now_ms, self.random.randbytes(RANDOM_BYTES))
            name = names.level_name(leased_sst_id(stem, self.random.randbytes(8)))
            entries = [Entry(key, 0, Kind.PUT, b"loaded") for key in keys]
            data = encode_sst(self._properties(name), entries, block_bytes=64)
            await self.store.create(name, data)
            infos.append(open_sst(name, data, database_id=None).footer.info(0))
        pending = PendingLoad(f"load {self.last_seq}", SstTable.from_infos(infos))
        await self.edit(lambda m: _with_pending(m, pending))
        await self.object(control=[load_entry(pending, self.last_seq + 1)])
        return pending

    def query(self, **options: Any) -> FeedQuery:
        return FeedQuery(self.cas(), feed_options(**options))

    async def rows(self, query: FeedQuery, start: FeedOffset, end: FeedOffset) -> list[Any]:
        """The rows of a batch, as tasks read them."""
        batches: list[pa.RecordBatch] = []
        for part in await query.parts(start, end):
            batches += [each async for each in read_part(self.cas(), part, query.options.keys)]
        return [row for batch in batches for row in batch.to_pylist()]

    def _properties(self, name: str) -> SstProperties:
        return SstProperties(
            name=name,
            database_id=self.database_id,
            writer_epoch=EPOCH,
            writer_nonce=bytes(16),
            write_id=self.random.randbytes(16),
        )


def feed_options(**options: Any) -> FeedOptions:
    given = {"url": "file:///nowhere"} | {name: str(value) for name, value in options.items()}
    return FeedOptions.of(given)


def _with_pending(manifest: Manifest, pending: PendingLoad) -> Manifest:
    return replace(manifest, pending_loads=(*manifest.pending_loads, pending))
