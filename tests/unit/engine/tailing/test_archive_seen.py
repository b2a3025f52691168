"""How far the log is archived, as a replica that tails it knows."""

from __future__ import annotations

from shalekv.settings import MIB
from tests.kit.engine.replica import running
from tests.kit.virtual_time import virtual_time
from tests.unit.engine.tailing.ground import QuorumGround, shown, steps


@virtual_time(seed=1)
async def test_archive_is_seen_of_what_memory_does_not_keep() -> None:
    """A record that is too large to be kept until it is archived holds up nobody who waits for the
    archive.
    """
    ground = await QuorumGround.opened()
    engine = await ground.replica(reader_memtable_bytes_max=MIB)
    async with running(engine):
        await steps(lambda: engine.is_told)
        await shown(engine, await ground.put(a=bytes(MIB // 4)))
        assert engine.applying.unarchived.oldest_wal_id is None
        ground.seal()
        await ground.archive()
        await engine.archive()
        assert engine.applying.archived_wal_id in await ground.wal()
