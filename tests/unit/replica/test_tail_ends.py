"""Tails that end: trimmed, reset to an older state, or overtaken by the archive."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace

import pytest

from shalekv.errors import IllegalState, RecordTrimmed
from shalekv.protocol.quorum_records import Record
from shalekv.replica.apply import UnarchivedBuffer
from shalekv.settings import MIB
from shalekv.write.quorum.links import TailPiece
from tests.kit.engine.replica import pass_s, running
from tests.kit.virtual_time import virtual_time
from tests.unit.replica.cluster import QuorumCluster, shown, steps


@virtual_time(seed=1)
async def test_trimmed_records_are_read_from_the_archive() -> None:
    """Trimmed records are read from the archive at once; then the tail continues behind.

    No other safekeeper is asked for them.
    """
    cluster = await QuorumCluster.opened()
    engine = await cluster.join(poll_interval_ms=100)
    tail, asked = cluster.links.tail, list[int]()

    async def trimmed(
        address: str, database_id: bytes, first_wal_id: int
    ) -> AsyncIterator[TailPiece]:
        asked.append(first_wal_id)
        if len(asked) == 1:
            cluster.seal()
            await cluster.archive(trims=True)
            raise RecordTrimmed("it is in the archive")
        async for piece in tail(address, database_id, first_wal_id):
            yield piece

    cluster.links.tail = trimmed  # type: ignore[method-assign]
    seq = await cluster.put(a=b"1")
    async with running(engine):
        await steps(lambda: engine.is_pushed)
        assert engine.watermark.seq == seq
        assert asked[1] > asked[0]
        assert len(asked) == 2
        assert cluster.links.status_count == 2 * len(cluster.safekeepers)


@virtual_time(seed=1)
async def test_a_log_reset_to_an_older_state_ends_a_replica() -> None:
    """A replica that has shown records that are no longer in the log ends."""
    cluster = await QuorumCluster.opened()
    engine = await cluster.join(poll_interval_ms=100)
    tail, others = cluster.links.tail, list[Record]()

    async def put_back(
        address: str, database_id: bytes, first_wal_id: int
    ) -> AsyncIterator[TailPiece]:
        async for piece in tail(address, database_id, first_wal_id):
            if others:
                yield TailPiece(others, piece.committed_lsn)
                return
            yield piece

    cluster.links.tail = put_back  # type: ignore[method-assign]

    async def read() -> None:
        async with running(engine):
            await steps(lambda: engine.is_pushed)
            await shown(engine, await cluster.put(a=b"1"))
            (last,) = {safekeeper.kept.records[-1] for safekeeper in cluster.safekeepers}
            others.append(replace(last, payload=b"other", checksum=last.checksum ^ 1))
            for safekeeper in cluster.safekeepers:
                safekeeper.kept.moved.set()
            await pass_s(60)

    with pytest.raises(ExceptionGroup) as caught:
        await read()
    assert caught.group_contains(IllegalState, match="is another than the one that was applied")


async def test_records_of_a_dropped_object_take_no_memory() -> None:
    """Records that arrive after their object was archived are not kept."""
    cluster = await QuorumCluster.opened()
    record = cluster.append(b"payload", ends_object=True)
    kept = UnarchivedBuffer(MIB)
    kept.add(record)
    assert [*kept.records(record.wal_id)] == [record]
    kept.drop_through(record.wal_id)
    kept.add(record)
    assert (kept.oldest_wal_id, kept.size_bytes) == (None, 0)
