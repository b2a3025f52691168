"""Named consumers: their leases keep the WAL, and they resume where they were."""

from __future__ import annotations

import asyncio

from shalekv.format import names
from shalekv.protocol.lease import find_wal_lease
from shalekv.protocol.manifest import Lease
from tests.kit.engine.databases import Database
from tests.kit.serving.sweeping import compact
from tests.kit.serving.watchers import WatchClient, Watched, watched


async def lease_of(database: Database, name: str = "c") -> Lease | None:
    return find_wal_lease(await database.manifest(), f"consumer {name}")


async def held_from(database: Database, name: str = "c") -> int | None:
    found = await lease_of(database, name)
    return None if found is None else found.wal_id_min


async def puts(cluster: Watched, count: int) -> list[tuple[int, int]]:
    """Put `count` keys, one object each; return sequence numbers and WAL ids."""
    replies = [await cluster.writer.put(b"k%d" % number) for number in range(count)]
    return [(reply.header.seq, reply.header.wal_id) for reply in replies]


async def close(cluster: Watched, client: WatchClient) -> None:
    """End the stream, and move its lease on."""
    client.stream.close()
    await client.stream.leave()
    assert cluster.watches.status().watches == 0


async def test_lease_is_there_before_the_watch_is_open() -> None:
    """When the client learns that its watch is open, the lease keeps the WAL from there on."""
    async with watched() as cluster:
        ((_, wal_id), *_) = await puts(cluster, 2)
        client = cluster.client()
        client.create(consumer="c", start_seq=1)
        await client.opened()
        held = await held_from(cluster.database)
        assert held is not None
        assert held <= wal_id
        late = cluster.client()
        late.create(consumer="late")
        await late.opened()
        assert await held_from(cluster.database, "late") == wal_id + 2


async def test_consumer_resumes_at_its_last_acknowledgement() -> None:
    """A watch opened again without `start_seq` resumes with the object of the last commit that was
    acknowledged: that commit is reported again.
    """
    async with watched() as cluster:
        client = cluster.client()
        client.create(consumer="c")
        await client.opened()
        written = await puts(cluster, 5)
        for seq, _ in written:
            assert (await client.commit()).seq == seq
        client.ack(written[2][0])
        client.create(99, b"nothing")  # answered after the acknowledgement
        await client.opened(99)
        await close(cluster, client)
        assert await held_from(cluster.database) == written[2][1]
        again = cluster.client()
        again.create(consumer="c")
        assert await again.opened() == written[2][0]
        found = [(await again.commit()).seq for _ in range(3)]
        assert found == [seq for seq, _ in written[2:]]


async def acked(cluster: Watched, principal: str, seqs: list[tuple[int, int]]) -> int:
    """Open the watch of a principal for consumer "c", take and acknowledge these commits, and
    close it; returns where it was opened.
    """
    client = cluster.client(principal)
    client.create(consumer="c")
    begin = await client.opened()
    for seq, _ in seqs:
        assert (await client.commit()).seq == seq
        client.ack(seq)
    client.create(99, b"nothing")  # answered after the acknowledgements
    while (await client.take()).watch_id != 99:
        pass  # progress, or commits of the object at which the watch has begun
    client.stream.close()
    await client.stream.leave()
    return begin


async def test_principals_do_not_share_their_consumers() -> None:
    """Two principals use one name at a time: neither sees, takes over or moves on the consumer of
    the other.
    """
    async with watched() as cluster:
        first = cluster.client("token:alice")
        first.create(consumer="c")
        await first.opened()
        written = await puts(cluster, 3)
        assert await acked(cluster, "token:bob", []) == written[-1][0] + 1
        assert await held_from(cluster.database, "c\ttoken:alice") == written[0][1]
        assert await held_from(cluster.database, "c\ttoken:bob") == written[-1][1] + 1
        assert await held_from(cluster.database) is None
        second = cluster.client("token:alice")
        second.create(consumer="c")
        assert "another watch" in (await second.closed()).message


async def test_a_principal_continues_where_nobodys_consumer_is() -> None:
    """A client that begins to send credentials keeps its place, which is its own from then on."""
    async with watched() as cluster:
        assert await acked(cluster, "", []) == 1
        written = await puts(cluster, 3)
        assert await acked(cluster, "token:alice", written) == written[0][0]
        assert await held_from(cluster.database) == written[0][1]
        assert await acked(cluster, "token:alice", []) == written[-1][0]
        assert await acked(cluster, "", []) == written[0][0]


async def test_nobody_takes_a_consumer_by_its_name() -> None:
    """The name of a consumer cannot contain what stands before the principal in its lease."""
    async with watched() as cluster:
        client = cluster.client()
        client.create(consumer="c\ttoken:alice")
        assert "characters that can be printed" in (await client.closed()).message
        assert await held_from(cluster.database, "c\ttoken:alice") is None


async def test_lease_moves_on_while_the_watch_is_open() -> None:
    """The lease moves on from time to time, also when only progress was acknowledged."""
    watching = {"watch_progress_ms": 10, "consumer_lease_ttl_s": 10}
    async with watched(watching=watching) as cluster:
        client = cluster.client()
        client.create(prefix=b"mine", consumer="c")
        await client.opened()
        written = await puts(cluster, 3)
        while (await client.take()).progress_seq < written[-1][0]:
            pass
        client.ack(written[-1][0])
        while await held_from(cluster.database) != written[-1][1]:
            cluster.clock.ahead_ms += 40_000
            await client.take()


async def test_lease_whose_objects_are_gone() -> None:
    """A consumer whose lease has expired, and whose WAL was collected, gets WAL_COLLECTED."""
    database = await Database.created()
    async with watched(database) as cluster:
        client = cluster.client()
        client.create(consumer="c")
        await client.opened()
        await puts(cluster, 5)
    await compact(database)
    await database.remove(*map(names.wal_name, (await database.wal())[:4]))
    async with watched(database) as cluster:
        client = cluster.client()
        client.create(consumer="c")
        assert (await client.closed()).reason == "WAL_COLLECTED"


async def test_one_watch_has_a_consumer() -> None:
    """While a watch is open for a consumer, another one is refused, but not after it is closed."""
    async with watched() as cluster:
        one, other = cluster.client(), cluster.client()
        one.create(consumer="c")
        await one.opened()
        other.create(consumer="c")
        assert (await other.closed()).metadata["field"] == "create.consumer"
        one.cancel()
        await one.closed()
        other.create(2, consumer="c")
        await other.opened(2)


async def test_lease_moves_on_when_the_watch_is_closed() -> None:
    """When a watch is closed, its lease moves on to what was acknowledged, even if the stream goes
    on with other watches.
    """
    async with watched() as cluster:
        client = cluster.client()
        client.create(consumer="c")
        await client.opened()
        client.create(2, b"nothing")
        await client.opened(2)
        written = await puts(cluster, 5)
        for seq, _ in written:
            assert (await client.commit()).seq == seq
        client.ack(written[2][0])
        client.cancel()
        await client.closed()
        while await held_from(cluster.database) != written[2][1]:  # noqa: ASYNC110 - no event
            await asyncio.sleep(0)
