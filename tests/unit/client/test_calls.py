"""Every call of the client does what it says, over a real socket."""

from __future__ import annotations

import pytest

from shalekv.v1 import admin_pb2
from shalekv_client import (
    Absent,
    Add,
    Batch,
    Change,
    Client,
    Commit,
    Compare,
    Condition,
    ConditionFailed,
    CounterOverflow,
    Delete,
    DeleteRange,
    Durability,
    Entry,
    Exists,
    Get,
    InvalidRequest,
    Missing,
    NotACounter,
    Operator,
    PageExpired,
    Present,
    Put,
    RangeEmpty,
    ReadLevel,
    RequestKind,
    Role,
    SeqEquals,
    SeqIs,
    TxnResult,
    Value,
    ValueIs,
)
from tests.kit.serving.dict_server import DATABASE_ID, EPOCH, DictServer


async def filled(client: Client, count: int) -> list[bytes]:
    """Puts keys k00, k01, ... whose values are their numbers; returns the keys."""
    keys = [b"k%02d" % number for number in range(count)]
    await client.write(Put(key, key[1:]) for key in keys)
    return keys


async def test_put_is_found_with_its_sequence_number(client: Client) -> None:
    """A get returns the value of the last put, and the number of the commit that wrote it."""
    await client.put(b"k", b"old")
    commit = await client.put(b"k", b"\x00\xff")
    assert commit == Commit(seq=2, wal_id=2, epoch=EPOCH, durability=Durability.DURABLE)
    assert await client.get(b"k") == Value(b"\x00\xff", seq=2, expire_at_ms=None)


async def test_empty_value_is_not_a_missing_one(client: Client) -> None:
    """An empty value is found; a key that was never put is None."""
    await client.put(b"empty", b"")
    assert await client.get(b"empty") == Value(b"", seq=1, expire_at_ms=None)
    assert await client.get(b"other") is None


async def test_delete_removes(client: Client) -> None:
    """A deleted key is not found; deleting it again succeeds."""
    await client.put(b"k", b"v")
    first = await client.delete(b"k")
    second = await client.delete(b"k")
    assert first.seq < second.seq
    assert await client.get(b"k") is None


async def test_batch_get_keeps_the_order_of_the_keys(client: Client) -> None:
    """One result for each key, in the order asked, None where there is no value."""
    await filled(client, 3)
    found = await client.batch_get([b"k02", b"none", b"k00", b"k02"])
    assert [value and value.value for value in found] == [b"02", None, b"00", b"02"]


async def test_batch_is_one_commit(client: Client, server: DictServer) -> None:
    """All changes of a batch have one sequence number, and later ones win."""
    await client.put(b"gone", b"x")
    batch = Batch([Put(b"a", b"1")]).put(b"b", b"2").delete(b"gone").put(b"a", b"3")
    assert (len(batch), batch.size_bytes) == (4, 10)
    commit = await client.write(batch)
    found = await client.batch_get([b"a", b"b", b"gone"])
    assert found == [Value(b"3", commit.seq, None), Value(b"2", commit.seq, None), None]
    assert server.state.calls["Write"] == 1


async def test_batch_counts_what_it_was_made_from() -> None:
    """A batch made from changes is the same as one that they were added to."""
    changes: list[Change] = [
        Put(b"a", b"12", ttl_ms=5),
        Delete(b"b"),
        DeleteRange(b"c", b"d"),
        DeleteRange(prefix=b"ef"),
        Add(b"n", -3),
    ]
    batch = Batch().put(b"a", b"12", ttl_ms=5).delete(b"b")
    batch.delete_range(start=b"c", end=b"d").delete_range(prefix=b"ef").add(b"n", -3)
    assert list(Batch(changes)) == changes == list(batch)
    assert Batch(changes).size_bytes == batch.size_bytes == 9


async def test_values_expire_when_they_are_told_to(client: Client, server: DictServer) -> None:
    """The time to live reaches the server, alone and in a batch."""
    await client.put(b"a", b"1", ttl_ms=1_000)
    await client.write([Put(b"b", b"2", ttl_ms=2_000)])
    put, write = server.state.requests
    assert (put.ttl_ms, write.changes[0].put.ttl_ms) == (1_000, 2_000)
    found = await client.get(b"a")
    assert found is not None
    assert found.expire_at_ms == 1_000


async def test_conditions_decide_about_put_and_delete(client: Client) -> None:
    """What a condition demands must hold; when it does not, the error tells what was found."""
    first = await client.put(b"k", b"1", condition=Absent())
    second = await client.put(b"k", b"2", condition=SeqEquals(first.seq))
    conditions: list[Condition] = [Absent(), SeqEquals(first.seq), SeqEquals(0)]
    for condition in conditions:
        with pytest.raises(ConditionFailed) as caught:
            await client.delete(b"k", condition=condition)
        assert caught.value.found_seq == second.seq
    assert (await client.delete(b"k", condition=Present())).seq == second.seq + 1
    with pytest.raises(ConditionFailed) as caught:
        await client.put(b"k", b"3", condition=Present())
    assert (caught.value.found_seq, caught.value.condition) == (0, "present")


async def test_counters_are_added_to(client: Client) -> None:
    """An add returns the new value; a batch returns those of all its counters, in order."""
    assert [await client.add(b"n"), await client.add(b"n", 41)] == [1, 42]
    commit = await client.write(Batch().add(b"n", -2).put(b"k", b"v").add(b"m", 7).add(b"n"))
    assert commit.counters == (40, 7, 41)
    with pytest.raises(NotACounter):
        await client.add(b"k")
    with pytest.raises(CounterOverflow):
        await client.add(b"n", (1 << 63) - 1)
    assert await client.add(b"n", 0) == 41


async def test_range_is_deleted(client: Client, server: DictServer) -> None:
    """A range delete takes an interval, a prefix, or all keys if that is said."""
    await filled(client, 12)
    await client.delete_range(start=b"k01", end=b"k04")
    await client.delete_range(prefix=b"k1")
    found = [entry.key async for entry in client.scan()]
    assert found == [b"k00", b"k04", b"k05", b"k06", b"k07", b"k08", b"k09"]
    await client.delete_range(all_keys=True)
    assert [entry async for entry in client.scan()] == []
    assert [request.all for request in server.state.requests if hasattr(request, "all")] == [
        False,
        False,
        True,
    ]


async def test_transaction_takes_one_branch(client: Client) -> None:
    """All comparisons decide which branch is done; each of its operations has its result."""
    await client.write(Batch().put(b"a", b"1").add(b"n", 5))
    result = await client.txn(
        [ValueIs(b"a", b"1"), SeqIs(b"a", 1), Exists(b"n"), Missing(b"x"), RangeEmpty(prefix=b"y")],
        then=[Get(b"a"), Put(b"a", b"2"), Add(b"n"), Delete(b"x"), Get(b"x"), Get(b"a")],
        otherwise=[Get(b"n")],
    )
    assert result == TxnResult(
        succeeded=True,
        results=(Value(b"1", 1, None), None, 6, None, None, Value(b"1", 1, None)),
        seq=2,
        wal_id=2,
        durability=Durability.DURABLE,
    )
    result = await client.txn([Missing(b"a")], then=[], otherwise=[Get(b"a")])
    assert (result.succeeded, result.results) == (False, (Value(b"2", 2, None),))


@pytest.mark.parametrize(
    ("compare", "holds"),
    [
        (ValueIs(b"a", b"5", Operator.LESS), False),
        (ValueIs(b"a", b"6", Operator.LESS), True),
        (ValueIs(b"a", b"4", Operator.GREATER), True),
        (ValueIs(b"a", b"5", Operator.NOT_EQUAL), False),
        (ValueIs(b"x", b"5"), False),
        (ValueIs(b"x", b"5", Operator.NOT_EQUAL), True),
        (SeqIs(b"x", 0), True),
        (SeqIs(b"a", 0, Operator.GREATER), True),
        (Exists(b"x"), False),
        (Missing(b"a"), False),
        (RangeEmpty(b"a", b"b"), False),
        (RangeEmpty(b"b"), True),
    ],
    ids=repr,
)
async def test_comparisons_reach_the_server(
    client: Client, compare: Compare, *, holds: bool
) -> None:
    """Each comparison is sent as what it says."""
    await client.put(b"a", b"5")
    assert (await client.txn([compare], then=[])).succeeded is holds


async def test_pages_go_on_where_a_limit_has_ended_them(client: Client) -> None:
    """A page token continues the scan at the same view, whatever was written meanwhile."""
    keys = await filled(client, 8)
    first = client.scan(limit=3)
    assert [entry.key async for entry in first] == keys[:3]
    assert first.more
    await client.delete_range(all_keys=True)
    second = client.scan(limit=3, page_token=first.page_token)
    assert [entry.key async for entry in second] == keys[3:6]
    third = second.next_page()
    assert [entry.key async for entry in third] == keys[6:]
    assert (third.more, third.page_token) == (False, b"")
    with pytest.raises(ValueError, match="no next page"):
        third.next_page()


async def test_pages_are_cut_by_bytes(client: Client) -> None:
    """`limit_bytes` ends a page; all pages together are the range."""
    keys = await filled(client, 7)
    pages = [page async for page in client.scan(limit_bytes=12, reverse=True).pages()]
    assert [len(page) for page in pages] == [3, 3, 1]
    assert [entry.key for page in pages for entry in page] == keys[::-1]


async def test_expired_page_is_told_apart(client: Client) -> None:
    """A page token whose view is gone is refused as such."""
    with pytest.raises(PageExpired):
        await anext(client.scan(page_token=b"gone"))


async def test_scan_can_be_read_by_messages(client: Client) -> None:
    """`read` returns the entries as they came together, and none at the end."""
    await filled(client, 7)
    scan = client.scan()
    assert (await anext(scan)).key == b"k00"
    assert [len(await scan.read()) for _ in range(4)] == [2, 3, 1, 0]


async def test_scan_crosses_messages_in_order(client: Client) -> None:
    """A scan yields every entry once, in key order, however the stream is cut."""
    keys = await filled(client, 10)
    entries = [entry async for entry in client.scan()]
    assert entries == [Entry(key, key[1:], seq=1, expire_at_ms=None) for key in keys]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({"start": b"k03", "end": b"k05"}, ["k03", "k04"]),
        ({"prefix": b"k0", "limit": 2}, ["k00", "k01"]),
        ({"reverse": True, "limit": 2}, ["k11", "k10"]),
        ({"prefix": b"k1"}, ["k10", "k11"]),
        ({"start": b"x"}, []),
    ],
)
async def test_scan_takes_its_range(
    client: Client, arguments: dict[str, bytes | bool | int], expected: list[str]
) -> None:
    """Start, end, prefix, direction and limit reach the server as they were given."""
    await filled(client, 12)
    found = [entry.key.decode() async for entry in client.scan(**arguments)]  # type: ignore[arg-type] # one table for all
    assert found == expected


async def test_scan_can_leave_values_out(client: Client) -> None:
    """With `keys_only` the values are empty."""
    await filled(client, 2)
    assert [entry.value async for entry in client.scan(keys_only=True)] == [b"", b""]


async def test_scan_tells_its_view_and_whether_there_is_more(client: Client) -> None:
    """`view` is the state that was read, `more` whether a limit ended it before its range did."""
    await filled(client, 5)
    cut, whole = client.scan(limit=4), client.scan(limit=5)
    assert [len([entry async for entry in scan]) for scan in (cut, whole)] == [4, 5]
    assert (cut.more, whole.more) == (True, False)
    assert cut.view is not None
    assert (cut.view.seq, cut.view.role, cut.view.database_id) == (1, Role.WRITER, DATABASE_ID)


async def test_scan_can_be_left(client: Client) -> None:
    """A scan that is left early yields no more, and the client goes on."""
    await filled(client, 9)
    async with client.scan() as entries:
        async for entry in entries:
            assert entry.key == b"k00"
            break
    assert [entry async for entry in entries] == []
    assert await client.get(b"k08") is not None


async def test_scan_is_refused_when_it_begins(client: Client) -> None:
    """An impossible range is an error of the first entry, not of making the scan."""
    scan = client.scan(prefix=b"a", start=b"b")
    with pytest.raises(InvalidRequest) as caught:
        await anext(scan)
    assert caught.value.field == "range.prefix"
    assert [entry async for entry in scan] == []


async def test_levels_reach_the_server(client: Client, server: DictServer) -> None:
    """Read level and durability are sent as they were given."""
    await client.put(b"k", b"v", durability=Durability.MEMORY)
    await client.get(b"k", read_level=ReadLevel.LINEARIZABLE)
    put, get = server.state.requests
    assert Durability(put.durability) is Durability.MEMORY
    assert ReadLevel(get.header.read_level) is ReadLevel.LINEARIZABLE


async def test_status_is_typed(client: Client) -> None:
    """The status tells of process, writer, memtable and manifest; what is not set is None."""
    await filled(client, 3)
    status = await client.status()
    assert (status.version, status.url, status.uptime_ms) == ("0.0.7", "memory://dict", 90_061_000)
    assert (status.view.epoch, status.view.seq, status.memtable.keys) == (EPOCH, 1, 3)
    assert status.writer is not None
    assert status.writer.commits == 1
    assert status.manifest.wal_id_last_compacted is None


async def test_stats_are_typed(client: Client, server: DictServer) -> None:
    """Every kind has a number; what a newer server may add is left out."""
    process = admin_pb2.ProcessRequests(role="collector", uptime_ms=60_000)
    process.requests.add(kind=admin_pb2.REQUEST_KIND_LIST, requests=7)
    process.requests.add(kind=99, requests=1)  # of a newer server
    told = admin_pb2.StatsReply(url="s3://b", endpoint="here:9", records="sqlite")
    told.processes.append(process)
    server.state.stats.append(told)
    stats = await client.stats()
    assert (stats.view.epoch, stats.url, stats.endpoint) == (EPOCH, "s3://b", "here:9")
    assert stats.records == "sqlite"
    (collector,) = stats.processes
    assert (collector.role, collector.uptime_ms) == ("collector", 60_000)
    assert collector.requests == dict.fromkeys(RequestKind, 0) | {RequestKind.LIST: 7}


async def test_large_messages_pass(client: Client) -> None:
    """Values over gRPC's usual limit of 4 MiB go both ways."""
    value = b"x" * (5 * 1024 * 1024)
    await client.put(b"large", value)
    found = await client.get(b"large")
    assert found is not None
    assert found.value == value


@pytest.mark.parametrize(
    "address",
    [
        "",
        "localhost",
        "localhost:",
        ":7654",
        "localhost:0",
        "localhost:65536",
        "http://x:1",
        "::1:7",
    ],
)
async def test_address_must_be_host_and_port(address: str) -> None:
    """What is not HOST:PORT is refused at once; gRPC would take some of it for something else."""
    with pytest.raises(ValueError, match="address is HOST:PORT"):
        Client(address)


async def test_timeout_must_be_positive(client: Client) -> None:
    """A call with no time at all is refused before it is sent."""
    with pytest.raises(ValueError, match="timeout_ms"):
        await client.get(b"k", timeout_ms=0)


def test_clients_belong_to_a_running_loop() -> None:
    """A client made where no event loop runs is refused, and not bound to some other loop."""
    with pytest.raises(RuntimeError, match="no running event loop"):
        Client("127.0.0.1:7654")
