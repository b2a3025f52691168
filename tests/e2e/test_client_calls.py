"""The Python client against a real server: every call, together with others and alone."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from itertools import chain, pairwise
from random import Random

import pytest

from shalekv_client import (
    Absent,
    Add,
    Batch,
    Client,
    ConditionFailed,
    CounterOverflow,
    DeleteRange,
    Durability,
    Exists,
    Get,
    IdempotencyKeys,
    InvalidRequest,
    KeyExpired,
    KeyReused,
    Missing,
    NotACounter,
    Operator,
    PageExpired,
    Present,
    Put,
    RangeEmpty,
    ReadLevel,
    SeqEquals,
    SeqIs,
    SyncClient,
    ValueIs,
)
from tests.kit.processes.in_process import Served, memory_store, serving

SEED = 5
DAYS_AGO_NS = 3 * 86_400 * 10**9


@pytest.fixture
async def served() -> AsyncIterator[Served]:
    """A server with a new database, whose sessions have little room."""
    limits = {"session_bytes_max": 64 * 1024, "scan_view_count_max": 2}
    async with serving(memory_store(), limits=limits) as running:
        yield running


@pytest.fixture(params=[True, False], ids=["together", "alone"])
async def client(served: Served, request: pytest.FixtureRequest) -> AsyncIterator[Client]:
    """A client that sends its calls together, or each alone."""
    async with Client(served.listen, coalesce=request.param) as connected:
        yield connected


async def test_values_come_back(client: Client) -> None:
    """What is put is got, alone and with others; what is deleted is not."""
    commit = await client.put(b"k", b"\x00\xff", ttl_ms=100_000)
    found = await client.get(b"k", read_level=ReadLevel.LINEARIZABLE)
    assert found is not None
    assert (found.value, found.seq) == (b"\x00\xff", commit.seq)
    assert found.expire_at_ms is not None
    await client.write(Batch().put(b"a", b"").put(b"b", b"2").delete(b"k"))
    values = await client.batch_get([b"a", b"k", b"b"])
    assert [value and value.value for value in values] == [b"", None, b"2"]
    assert (await client.delete(b"a")).seq == commit.seq + 2


async def test_durability_is_reached_as_asked(client: Client) -> None:
    """A reply says which durability was reached; what the server does not have is refused."""
    in_memory = await client.put(b"k", b"v", durability=Durability.MEMORY)
    assert in_memory.durability is Durability.MEMORY
    assert (await client.put(b"k", b"v")).durability is Durability.DURABLE
    with pytest.raises(InvalidRequest) as caught:
        await client.put(b"k", b"v", durability=Durability.QUORUM)
    assert caught.value.field == "durability"


async def test_conditions_hold_or_nothing_happens(client: Client) -> None:
    """A condition that does not hold is told with what was found, and changes nothing."""
    first = await client.put(b"k", b"1", condition=Absent())
    with pytest.raises(ConditionFailed) as caught:
        await client.put(b"k", b"2", condition=Absent())
    assert (caught.value.found_seq, caught.value.condition) == (first.seq, "absent")
    second = await client.put(b"k", b"2", condition=SeqEquals(first.seq))
    with pytest.raises(ConditionFailed) as caught:
        await client.delete(b"k", condition=SeqEquals(first.seq))
    assert (caught.value.found_seq, caught.value.condition) == (second.seq, "seq_equals")
    await client.delete(b"k", condition=Present())
    with pytest.raises(ConditionFailed) as caught:
        await client.delete(b"k", condition=Present())
    assert (caught.value.found_seq, caught.value.condition) == (0, "present")


async def test_counters_count(client: Client) -> None:
    """Concurrent adds are all counted, and each returns a value of its own."""
    counts = await asyncio.gather(*(client.add(b"n", 3) for _ in range(200)))
    assert sorted(counts) == list(range(3, 603, 3))
    commit = await client.write([Add(b"n", -600), Put(b"k", b"v"), Add(b"m"), Add(b"n", 5)])
    assert commit.counters == (0, 1, 5)
    with pytest.raises(NotACounter):
        await client.add(b"k")
    with pytest.raises(CounterOverflow):
        await client.add(b"m", (1 << 63) - 1)


async def test_transaction_compares_and_does(client: Client) -> None:
    """All comparisons decide; gets see the state before, adds the changes before them."""
    commit = await client.write(Batch().put(b"a", b"1").put(b"b", b"2").add(b"n", 5))
    result = await client.txn(
        [
            ValueIs(b"a", b"1"),
            ValueIs(b"b", b"3", Operator.LESS),
            SeqIs(b"a", commit.seq),
            SeqIs(b"x", 0),
            Exists(b"n"),
            Missing(b"x"),
            RangeEmpty(start=b"c", end=b"n"),
        ],
        then=[Get(b"a"), Put(b"a", b"9"), Add(b"n", 2), DeleteRange(prefix=b"b"), Get(b"b")],
        otherwise=[Get(b"n")],
    )
    values = [getattr(each, "value", each) for each in result.results]
    assert (result.succeeded, values) == (True, [b"1", None, 7, None, b"2"])
    assert result.seq == commit.seq + 1
    result = await client.txn([Exists(b"b")], then=[], otherwise=[Get(b"a"), Get(b"b")])
    values = [getattr(each, "value", each) for each in result.results]
    assert (result.succeeded, values, result.seq) == (False, [b"9", None], commit.seq + 1)


async def test_ranges_are_deleted(client: Client) -> None:
    """A range delete removes what is in the range; all keys only when that is said."""
    await client.write(Put(b"%02d" % n, b"") for n in range(30))
    await client.delete_range(start=b"05", end=b"10")
    await client.delete_range(prefix=b"2")
    keys = [entry.key async for entry in client.scan()]
    assert keys == [b"%02d" % n for n in chain(range(5), range(10, 20))]
    with pytest.raises(InvalidRequest) as caught:
        await client.delete_range()
    assert caught.value.field
    await client.delete_range(all_keys=True)
    assert [entry async for entry in client.scan()] == []


@pytest.mark.parametrize("reverse", [False, True])
async def test_pages_show_one_view(client: Client, *, reverse: bool) -> None:
    """All pages of a scan show the state of the first, whatever is written between them."""
    await client.write(Put(b"%03d" % n, bytes(50)) for n in range(100))
    pages = []
    async for page in client.scan(limit=30, limit_bytes=1_000, reverse=reverse).pages():
        pages.append([entry.key for entry in page])
        await client.write(Put(b"%03d!%d" % (n, len(pages)), b"") for n in range(100))
    keys = list(chain.from_iterable(pages))
    assert keys == sorted((b"%03d" % n for n in range(100)), reverse=reverse)
    assert all(len(page) < 30 for page in pages)


async def test_forgotten_view_ends_its_pages(client: Client) -> None:
    """The token of a view that the server had to let go is refused as expired."""
    await client.write(Put(b"%03d" % n, b"") for n in range(10))
    scans = [client.scan(limit=5) for _ in range(3)]
    for scan in scans:
        assert len([entry async for entry in scan]) == 5
    assert len([entry async for entry in scans[2].next_page()]) == 5
    with pytest.raises(PageExpired):
        await anext(scans[0].next_page())
    with pytest.raises(InvalidRequest) as caught:
        await anext(client.scan(page_token=b"mine"))
    assert caught.value.field == "page_token"


async def test_key_of_the_caller_makes_a_write_repeatable(client: Client) -> None:
    """A write with the same key is applied once, and with other content refused."""
    key = IdempotencyKeys().next()
    assert [await client.add(b"n", 2, idempotency_key=key) for _ in range(3)] == [2, 2, 2]
    with pytest.raises(KeyReused):
        await client.add(b"n", 3, idempotency_key=key)
    first = await client.put(b"k", b"v", condition=Absent(), idempotency_key=b"short")
    assert await client.put(b"k", b"v", condition=Absent(), idempotency_key=b"short") == first


async def test_key_that_is_too_old_proves_nothing(client: Client) -> None:
    """A UUID from before the window of the server is refused, and the outcome is unknown."""
    key = IdempotencyKeys(lambda: time.time_ns() - DAYS_AGO_NS).next()
    with pytest.raises(KeyExpired):
        await client.put(b"k", b"v", idempotency_key=key)
    assert await client.get(b"k") is None


async def test_session_keeps_its_order(served: Served) -> None:
    """Far more than the server holds at once goes through a session, in the order of the calls."""
    random = Random(SEED)
    async with Client(served.listen) as client, client.session() as session:
        futures = []
        for number in range(5_000):
            value = b"%d:%s" % (number, bytes(random.randrange(300)))
            futures.append(session.put(b"%d" % (number % 7), value))
            await session.ready()
        gets = [session.get(b"%d" % key, read_level=ReadLevel.LINEARIZABLE) for key in range(7)]
        failed = session.put(b"", b"")
        await session.drain()
        seqs = [future.result().seq for future in futures]
        assert all(before < after for before, after in pairwise(seqs))
        assert isinstance(failed.exception(), InvalidRequest)
        for key, get in enumerate(gets):
            found = get.result()
            assert found is None or int(found.value.split(b":")[0]) % 7 == key
        for key in range(7):
            found = await client.get(b"%d" % key)
            assert found is not None
            assert int(found.value.split(b":")[0]) >= 5_000 - 7, f"seed {SEED}"


async def test_many_callers_share_the_room(served: Served) -> None:
    """Calls that together pass what a session of the server holds are all answered."""
    async with Client(served.listen) as client:
        value = bytes(10_000)
        await asyncio.gather(*(client.put(b"%03d" % n, value) for n in range(300)))
        found = await asyncio.gather(*(client.get(b"%03d" % n) for n in range(300)))
    assert all(each is not None and each.value == value for each in found)


async def test_threads_get_what_tasks_get(served: Served) -> None:
    """The client for threads does the same at a real server."""

    def work() -> None:
        with SyncClient(served.listen) as client:
            commit = client.put(b"k", b"v", condition=Absent())
            with pytest.raises(ConditionFailed):
                client.put(b"k", b"v", condition=Absent())
            client.write(Put(b"%02d" % n, b"") for n in range(20))
            assert [len(page) for page in client.scan(end=b"k", limit=8).pages()] == [8, 8, 4]
            with client.session() as session:
                adds = [session.add(b"n") for _ in range(500)]
            assert [add.result() for add in adds] == list(range(1, 501))
            assert client.status().view.seq > commit.seq

    await asyncio.to_thread(work)


async def test_servers_that_accept_less_get_less() -> None:
    """A server that is set to accept small messages only gets such, and all calls succeed."""
    limits, server = {"batch_count_max": 20}, {"message_bytes_max": 64 * 1024}
    async with (
        serving(memory_store(), limits=limits, server=server) as served,
        Client(served.listen) as client,
    ):
        for _ in range(2):
            await asyncio.gather(*(client.put(b"%03d" % n, bytes(3_000)) for n in range(200)))
        assert await client.add(b"n") == 1
        assert (await client.status()).view.seq == 401
