"""Named consumers: their leases keep the WAL, and they go on where they were."""

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


async def puts(under: Watched, count: int) -> list[tuple[int, int]]:
    """Some puts, one object each: their sequence numbers and WAL ids."""
    replies = [await under.writer.put(b"k%d" % number) for number in range(count)]
    return [(reply.header.seq, reply.header.wal_id) for reply in replies]


async def gone(under: Watched, client: WatchClient) -> None:
    """The stream is over, and its lease moved on."""
    client.stream.close()
    await client.stream.leave()
    assert under.watches.status().watches == 0


async def test_lease_is_there_before_the_watch_is_open() -> None:
    """When the client hears that its watch is open, the lease keeps all from there on."""
    async with watched() as under:
        ((_, wal_id), *_) = await puts(under, 2)
        client = under.client()
        client.create(consumer="c", start_seq=1)
        await client.opened()
        held = await held_from(under.database)
        assert held is not None
        assert held <= wal_id
        late = under.client()
        late.create(consumer="late")
        await late.opened()
        assert await held_from(under.database, "late") == wal_id + 2


async def test_consumer_goes_on_with_what_it_has_not_acknowledged() -> None:
    """Opened again without a number, a watch tells what comes after the last acknowledgement: the
    object that holds it is told again.
    """
    async with watched() as under:
        client = under.client()
        client.create(consumer="c")
        await client.opened()
        written = await puts(under, 5)
        for seq, _ in written:
            assert (await client.commit()).seq == seq
        client.ack(written[2][0])
        client.create(99, b"nothing")  # answered behind the acknowledgement
        await client.opened(99)
        await gone(under, client)
        assert await held_from(under.database) == written[2][1]
        again = under.client()
        again.create(consumer="c")
        assert await again.opened() == written[2][0]
        found = [(await again.commit()).seq for _ in range(3)]
        assert found == [seq for seq, _ in written[2:]]


async def test_lease_moves_on_while_the_watch_is_open() -> None:
    """What is acknowledged is let go of from time to time, also when only progress was told."""
    watching = {"watch_progress_ms": 10, "consumer_lease_ttl_s": 10}
    async with watched(watching=watching) as under:
        client = under.client()
        client.create(prefix=b"mine", consumer="c")
        await client.opened()
        written = await puts(under, 3)
        while (await client.take()).progress_seq < written[-1][0]:
            pass
        client.ack(written[-1][0])
        while await held_from(under.database) != written[-1][1]:
            under.clock.ahead_ms += 40_000
            await client.take()


async def test_lease_whose_objects_are_gone() -> None:
    """A consumer whose lease has run out, and whose WAL was collected, is told so."""
    database = await Database.created()
    async with watched(database) as under:
        client = under.client()
        client.create(consumer="c")
        await client.opened()
        await puts(under, 5)
    await compact(database)
    await database.remove(*map(names.wal_name, (await database.wal())[:4]))
    async with watched(database) as under:
        client = under.client()
        client.create(consumer="c")
        assert (await client.closed()).reason == "WAL_COLLECTED"


async def test_one_watch_has_the_name() -> None:
    """While a watch is open for a consumer, another is refused; then it may have the name."""
    async with watched() as under:
        one, other = under.client(), under.client()
        one.create(consumer="c")
        await one.opened()
        other.create(consumer="c")
        assert (await other.closed()).metadata["field"] == "create.consumer"
        one.cancel()
        await one.closed()
        other.create(2, consumer="c")
        await other.opened(2)


async def test_lease_moves_on_when_the_watch_is_closed() -> None:
    """The stream may go on with other watches: what the closed one has acknowledged is let go of
    now, and nothing of it is kept.
    """
    async with watched() as under:
        client = under.client()
        client.create(consumer="c")
        await client.opened()
        client.create(2, b"nothing")
        await client.opened(2)
        written = await puts(under, 5)
        for seq, _ in written:
            assert (await client.commit()).seq == seq
        client.ack(written[2][0])
        client.cancel()
        await client.closed()
        # Nobody is told of this: it is seen from outside alone.
        while await held_from(under.database) != written[2][1]:  # noqa: ASYNC110 - as said
            await asyncio.sleep(0)
