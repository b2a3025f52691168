"""Values that expire in real servers: watches report that once, across restarts."""

from __future__ import annotations

import asyncio
from pathlib import Path

from shalekv_client import ChangeKind, Client, WatchCommit
from tests.kit.constants import variables
from tests.kit.processes.processes import Processes

FAST = (
    *("--expiry-sweep-interval-ms", "50"),
    *("--wal-trigger-age-ms", "100", "--compactor-idle-poll-ms", "50", "--fence-poll-ms", "100"),
)
SCANNING = variables({"shalekv.write.expiry_sweep:EXPIRY_SCAN_INTERVAL_S": 1})
DEADLINE_S = 200
SHORT_MS, LONG_MS = 300, 2_500
RENEWED_MS = 1_500  # would end before the long one, and is overwritten before


async def expired_keys(address: str, keys: int) -> list[bytes]:
    """Return the keys whose expiry a watch of the whole log reports, up to this many."""
    found: list[bytes] = []
    async with (
        asyncio.timeout(DEADLINE_S),
        Client(address) as client,
        client.watch(from_seq=1) as watch,
    ):
        async for event in watch:
            if isinstance(event, WatchCommit):
                ended = (each for each in event.changes if each.kind is ChangeKind.EXPIRED)
                found += (each.key for each in ended if each.expire_at_ms)
            if len(found) >= keys:
                break
    return found


async def test_expiry_of_values_is_reported_across_a_kill(
    processes: Processes, tmp_path: Path
) -> None:
    """Expiry while the writer serves or later, in memory or in the levels, is reported once; a
    reader reports the same.
    """
    url = f"file://{tmp_path}/db"
    server = await processes.serve(url, *FAST, env=SCANNING)
    async with Client(server.listen) as client:
        await client.put(b"short", b"v", ttl_ms=SHORT_MS)
        assert await expired_keys(server.listen, 1) == [b"short"]
        await client.put(b"long", b"v", ttl_ms=LONG_MS)
        async with client.session() as session:  # both at once: it must not expire in between
            renewed = (
                session.put(b"renewed", b"v", ttl_ms=RENEWED_MS),
                session.put(b"renewed", b"v"),
            )
        await asyncio.gather(*renewed)
    await server.kill()
    server = await processes.serve(url, *FAST, env=SCANNING)
    assert await expired_keys(server.listen, 2) == [b"short", b"long"]
    reader = await processes.read(url)
    assert await expired_keys(reader.listen, 2) == [b"short", b"long"]
    assert await reader.stop() == 0, reader.report()
    async with Client(server.listen) as client:
        assert await client.get(b"renewed") is not None
        assert await client.get(b"long") is None
    assert await server.stop() == 0, server.report()
