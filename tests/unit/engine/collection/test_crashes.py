"""A collector that is killed, wherever it is, leaves a correct database (I8)."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path

from shalekv.engine.collection.collecting import Collecting
from shalekv.engine.wal import list_wal
from shalekv.format import names
from shalekv.settings import StoreSettings
from shalekv.store.cas import CasStore
from shalekv.store.local import LocalStore
from tests.kit.engine.collection import Ground
from tests.kit.engine.collection_files import load, save
from tests.kit.engine.running_log import yielding_runtime
from tests.unit.engine.collection.crash_driver import AT_ONCE

REPOSITORY = Path(__file__).parents[4]
FOR_AGES_S = 10**10
FENCE = names.wal_name(0)


async def database() -> Ground:
    """One with garbage of every kind, and with everything that is to stay."""
    ground = await Ground.created()
    await ground.fence()
    await ground.wal(5)
    await ground.compact(4)
    await ground.snapshots().create(ttl_ms=1)
    await ground.snapshots().create(ttl_ms=None)
    await ground.wal(3)
    await ground.compact(6)
    await ground.merge()
    await ground.write_sst(await ground.lease())
    await ground.write_sst(await ground.lease(FOR_AGES_S))
    await ground.store.create("levels/left-over.sst", b"not ours")
    return ground


async def test_crash_at_every_call_of_the_file_system(tmp_path: Path) -> None:
    """Whatever is needed is there, the WAL has no hole, and the next collection finishes the work.

    The crashed collections end as the one does that nobody has killed.
    """
    before = await database()
    save(before, tmp_path / "template")
    driver = [sys.executable, "-m", "tests.unit.engine.collection.crash_driver"]
    arguments = [str(tmp_path / "template"), str(tmp_path / "crashed")]
    await asyncio.to_thread(
        subprocess.run, [*driver, *arguments], check=True, cwd=REPOSITORY, timeout=100
    )
    copies = sorted((tmp_path / "crashed").iterdir(), key=lambda path: int(path.name))
    states = set()
    for copy in copies:
        left = load(copy, before)
        await left.check_reachable()
        first = (await left.manifest()).first_uncompacted_wal_id
        assert (await list_wal(left.cas(), first)).first_gap == before.last_wal_id + 1
        states.add(frozenset(left.names() & before.names()))
        runtime = yielding_runtime()
        cas = CasStore(LocalStore(copy, runtime), runtime, StoreSettings())
        await Collecting(cas, AT_ONCE).collect()
        cleaned = load(copy, before)
        await cleaned.check_reachable()
        (lease,) = (await cleaned.manifest()).leases
        leased = cleaned.leased_names(lease)
        assert len(leased) == 1
        assert cleaned.names() == await cleaned.needed() | leased | {FENCE}
    assert states >= {frozenset(before.names())}
    # Each object that goes is gone in one more state than the one before it.
    final = load(copies[-1], before).names() & before.names()
    assert len(states) == len(before.names() - final) + 1
