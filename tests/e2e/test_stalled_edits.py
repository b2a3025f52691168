"""Edits of the manifest by processes that stood still before they made them: rules F2 and F3.

Meanwhile what they rest on has expired and was collected, or the name of their manifest is free
again, since it was made by others and collected.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

from shalekv.cli.exit_codes import ExitCode
from shalekv_client import Client
from tests.e2e.late_writes import check_history, write
from tests.kit.processes.child import Child
from tests.kit.processes.history import History
from tests.kit.processes.load import TIMEOUT_MS
from tests.kit.processes.meanwhile import COMPACT_ALL, SERVE, SHORT_LIVED, Meanwhile, stalled
from tests.kit.processes.processes import Processes
from tests.kit.processes.rivals import epoch_of
from tests.kit.processes.wal_contents import manifest_path

DEADLINE_S = 200
LEASE_S = 20  # so that a compaction of next to nothing is over before the lease is renewed
FIRST_EDIT = "before create manifest/ 1"
PUBLICATION = "before create manifest/ 2"  # the compactor's first edit takes its epoch


async def test_a_compactor_whose_outputs_were_collected_publishes_nothing_of_them(
    processes: Processes, tmp_path: Path
) -> None:
    """A compactor that stood still before it published, until its lease was dropped and what it had
    written was collected, finds the lease lost; it compacts anew, and every read is right.
    """
    async with asyncio.timeout(DEADLINE_S):
        database, history = Meanwhile(processes, tmp_path / "db"), History(4)
        server = await database.serve(*SHORT_LIVED)
        async with Client(server.listen, timeout_ms=TIMEOUT_MS) as client:
            await write(history, client)
            flags = ("--once", *COMPACT_ALL, "--compactor-lease-ttl-s", str(LEASE_S))
            compactor = database.start_stalling(PUBLICATION, "compactor", *flags)
            await stalled(compactor)
            doomed = database.objects("levels/")
            assert doomed
            await write(history, client)
            await database.collect_until(lambda _: not database.objects("levels/"))
            compactor.resume()
            assert await compactor.exited() == ExitCode.OK, compactor.report()
            failed = [each for each in compactor.lines() if each["event"] == "compaction failed"]
            assert ["lease" in each["problem"] for each in failed] == [True], compactor.report()
            await write(history, client)
        assert database.objects("levels/")
        assert not database.objects("levels/") & doomed
        await check_history(database, history, server)


async def test_a_snapshot_that_was_dropped_while_it_was_renewed_stays_gone(
    processes: Processes, tmp_path: Path
) -> None:
    """A renewal that stood still before its edit, until the snapshot had expired and its manifest
    was collected, fails and says so: nobody is told that the snapshot lives.
    """
    async with asyncio.timeout(DEADLINE_S):
        database = await written_database(processes, tmp_path / "db")
        await database.run("snapshot", "create", "--name", "short", "--ttl", "1h")
        (snapshot,) = database.manifest().snapshots
        renewal = database.start_stalling(FIRST_EDIT, "snapshot", "renew", "short", "--ttl", "1h")
        await stalled(renewal)
        # Somebody else cuts its life short only now: so the renewal stands still in time.
        await database.run("snapshot", "renew", "short", "--ttl", "1s")
        pinned = manifest_path(database.folder, snapshot.manifest_id)
        await database.collect_until(lambda _: not pinned.exists())
        assert not database.manifest().snapshots
        renewal.resume()
        assert await renewal.exited() == ExitCode.USAGE, renewal.report()
        assert snapshot.id.hex() in renewal.stderr(), renewal.report()
        assert "has expired" in renewal.stderr(), renewal.report()
        assert not database.manifest().snapshots
        await database.check()


async def test_a_snapshot_at_a_recycled_manifest_id_is_made_again(
    processes: Processes, tmp_path: Path
) -> None:
    """A snapshot whose manifest was created where others had been and were collected is made once
    more, in a manifest that counts: who is told its id can rely on it.
    """
    async with asyncio.timeout(DEADLINE_S):
        database = await written_database(processes, tmp_path / "db")
        making = database.start_stalling(FIRST_EDIT, "snapshot", "create", "--name", "kept")
        await stalled(making)
        buried = await database.bury_next_manifest()
        making.resume()
        assert await making.exited() == ExitCode.OK, making.report()
        assert [each.name for each in database.manifest(buried).snapshots] == ["kept"]
        assert [each.id.hex() for each in database.manifest().snapshots] == making.stdout().split()
        await database.collect()
        await database.check()


async def test_an_epoch_at_a_recycled_manifest_id_is_not_won(
    processes: Processes, tmp_path: Path
) -> None:
    """An opener whose epoch was created where other manifests had been and were collected begins
    again, and serves under an epoch that counts.
    """
    async with asyncio.timeout(DEADLINE_S):
        database, history = Meanwhile(processes, tmp_path / "db"), History(5)
        server = await database.serve(*SHORT_LIVED)
        async with Client(server.listen, timeout_ms=TIMEOUT_MS) as client:
            await write(history, client)
        assert await server.stop() == ExitCode.OK, server.report()
        opener = database.start_stalling(FIRST_EDIT, *SERVE, *SHORT_LIVED)
        await stalled(opener)
        buried = await database.bury_next_manifest()
        opener.resume()
        await opener.ready()
        assert database.manifest(buried).writer_epoch == 2
        assert database.manifest().writer_epoch == epoch_of(opener) == 2
        assert database.manifest().writer_nonce == database.manifest(buried).writer_nonce
        async with Client(opener.listen, timeout_ms=TIMEOUT_MS) as client:
            await write(history, client)
        await check_history(database, history, opener)


async def test_a_publication_at_a_recycled_manifest_id_is_made_again(
    processes: Processes, tmp_path: Path
) -> None:
    """A compactor whose publication was created where other manifests had been and were collected
    publishes once more, in a manifest that counts, before it goes on.
    """
    async with asyncio.timeout(DEADLINE_S):
        database, history = Meanwhile(processes, tmp_path / "db"), History(6)
        server = await database.serve(*SHORT_LIVED)
        async with Client(server.listen, timeout_ms=TIMEOUT_MS) as client:
            await write(history, client)
        assert await server.stop() == ExitCode.OK, server.report()
        compactor = database.start_stalling(PUBLICATION, "compactor", "--once", *COMPACT_ALL)
        await stalled(compactor)
        buried = await database.bury_next_manifest()
        compactor.resume()
        assert await compactor.exited() == ExitCode.OK, compactor.report()
        compacted = [each for each in compactor.lines() if each["event"] == "compacted"]
        assert len(compacted) == 1, compactor.report()
        assert _has_levels(database, buried)
        assert _has_levels(database)
        await database.collect()
        again = await database.serve()
        await check_history(database, history, again)


async def written_database(processes: Processes, folder: Path) -> Meanwhile:
    """A database with some writes in it, and nobody who serves it."""
    database, history = Meanwhile(processes, folder), History(0)
    server: Child = await database.serve(*SHORT_LIVED)
    async with Client(server.listen, timeout_ms=TIMEOUT_MS) as client:
        await write(history, client)
    assert await server.stop() == ExitCode.OK, server.report()
    return database


def _has_levels(database: Meanwhile, manifest_id: int | None = None) -> bool:
    return len(database.manifest(manifest_id).leveled_ssts) > 0
