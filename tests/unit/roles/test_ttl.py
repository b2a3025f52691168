"""Values that expire: by logical time, in every way to read and to compare."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any

from shalekv.v1 import kv_pb2
from tests.kit.engine.databases import Database
from tests.kit.inline_runtime import gathered
from tests.kit.serving.messages import absent, add, change, delete_range, get, present, put
from tests.kit.serving.roles import (
    CALL,
    LINEARIZABLE,
    MEMORY,
    UNCOMMITTED,
    Serving,
    pairs,
    serving,
)
from tests.kit.states import counter
from tests.sim.run import simulate
from tests.sim.world import World

TTL_MS = 1_000
EXISTS = kv_pb2.Compare(key=b"a", exists=True)


def in_still_time(main: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Run `main` where time stands still but for what it lets pass."""

    async def in_world(_: World) -> None:
        await main()

    simulate(1, in_world)


async def has_value(writer: Serving) -> set[bool]:
    """Whether key a has a value, asked in all ways."""
    found = [(await writer.get(b"a", level)).found for level in (0, LINEARIZABLE, UNCOMMITTED)]
    batch = await writer.ask(kv_pb2.BatchGetRequest(keys=[b"a"]))
    scanned = await writer.scan() + await writer.scan(keys_only=True)
    in_txn = await writer.ask(kv_pb2.TxnRequest(compares=[EXISTS], then=[get(b"a")], otherwise=[]))
    read = await writer.ask(kv_pb2.TxnRequest(then=[get(b"a")]))
    empty = kv_pb2.Compare(range_empty=kv_pb2.KeyRange(prefix=b"a"))
    emptiness = await writer.ask(kv_pb2.TxnRequest(compares=[empty], then=[get(b"b")]))
    return {
        *found,
        batch.results[0].found,
        *[len(reply.entries) > 0 for reply in scanned],
        in_txn.succeeded,
        read.results[0].get.found,
        not emptiness.succeeded,
    }


def test_value_lives_exactly_as_long_as_it_was_given() -> None:
    """To the last millisecond it is there in every read and comparison, then in none."""

    async def main() -> None:
        async with serving() as writer:
            now_ms = writer.engine.time.now_ms()
            await writer.put(b"a", b"1", ttl_ms=TTL_MS)
            assert (await writer.get(b"a")).expire_at_ms == now_ms + TTL_MS
            writer.pass_ms(TTL_MS - 1)
            assert await has_value(writer) == {True}
            writer.pass_ms(1)
            assert await has_value(writer) == {False}
            reply = await writer.get(b"a")
            assert (reply.value, reply.seq, reply.expire_at_ms) == (b"", 0, 0)

    in_still_time(main)


def test_life_begins_with_the_order_of_a_write() -> None:
    """Of a put, a batch and a transaction alike, whether or not they wait to become durable."""

    async def main() -> None:
        async with serving() as writer:
            now_ms = writer.engine.time.now_ms()
            writer.store.is_holding = True
            puts = [put(b"b", ttl_ms=TTL_MS)]
            await writer.put(b"a", ttl_ms=TTL_MS, durability=MEMORY)
            await writer.ask(kv_pb2.WriteRequest(changes=puts, durability=MEMORY))
            answer = writer.begin(kv_pb2.TxnRequest(then=[change(put(b"c", ttl_ms=TTL_MS))]))
            assert not isinstance(answer, kv_pb2.TxnReply)
            writer.pass_ms(TTL_MS // 2)
            writer.store.let_go()
            await answer
            (reply,) = await writer.scan()
            assert [entry.expire_at_ms for entry in reply.entries] == [now_ms + TTL_MS] * 3

    in_still_time(main)


def test_conditions_judge_by_what_is_visible() -> None:
    """An expired value is none: absent holds, present fails, and its number is not found."""

    async def main() -> None:
        async with serving() as writer:
            await writer.put(b"a", b"1", ttl_ms=TTL_MS)
            await writer.put(b"a", b"2", ttl_ms=TTL_MS, precondition=present())
            writer.pass_ms(TTL_MS)
            found = kv_pb2.Compare(key=b"a", seq=0)
            assert (await writer.ask(kv_pb2.TxnRequest(compares=[found]))).succeeded
            await writer.put(b"a", b"3", precondition=absent())
            reply = await writer.get(b"a")
            assert (reply.value, reply.expire_at_ms) == (b"3", 0)

    in_still_time(main)


def test_put_gives_a_key_another_life() -> None:
    """A later put decides alone: it may lengthen, shorten or end the limit of a value's life."""

    async def main() -> None:
        async with serving() as writer:
            await writer.put(b"a", ttl_ms=TTL_MS)
            await writer.put(b"a", ttl_ms=2 * TTL_MS)
            await writer.put(b"b", ttl_ms=TTL_MS)
            await writer.put(b"b")
            await writer.put(b"c")
            await writer.put(b"c", ttl_ms=TTL_MS)
            writer.pass_ms(TTL_MS)
            assert [key for key, _ in pairs(await writer.scan())] == [b"a", b"b"]
            writer.pass_ms(TTL_MS)
            assert [key for key, _ in pairs(await writer.scan())] == [b"b"]

    in_still_time(main)


def test_counter_keeps_its_time() -> None:
    """An add does not touch the expiry; one that has expired counts from 0 and lives for ever."""

    async def main() -> None:
        async with serving() as writer:
            await writer.put(b"n", counter(40), ttl_ms=TTL_MS)
            expires = (await writer.get(b"n")).expire_at_ms
            assert list(
                (await writer.ask(kv_pb2.WriteRequest(changes=[add(b"n", 2)]))).counters
            ) == [42]
            assert (await writer.get(b"n")).expire_at_ms == expires
            writer.pass_ms(TTL_MS)
            assert list(
                (await writer.ask(kv_pb2.WriteRequest(changes=[add(b"n", 2)]))).counters
            ) == [2]
            assert (await writer.get(b"n")).expire_at_ms == 0

    in_still_time(main)


def test_expired_counter_may_be_of_any_length() -> None:
    """What has expired is not looked at: neither its length nor its value."""

    async def main() -> None:
        async with serving() as writer:
            await writer.put(b"n", b"no counter", ttl_ms=TTL_MS)
            writer.pass_ms(TTL_MS)
            changes = [add(b"n", 7), delete_range(prefix=b"x")]
            reply = await writer.ask(kv_pb2.WriteRequest(changes=changes))
            assert list(reply.counters) == [7]

    in_still_time(main)


def test_scan_judges_all_by_one_moment() -> None:
    """What was alive when the scan began is in it to the end; the next scan does not see it."""

    async def main() -> None:
        async with serving() as writer:
            for number in range(100):
                await writer.put(b"%02d" % number, b"x" * 100, ttl_ms=TTL_MS)
            scan = writer.kv.scan(kv_pb2.ScanRequest(), CALL)
            first = await anext(scan)
            writer.pass_ms(TTL_MS)
            rest = await gathered(scan)
            assert len(pairs([first, *rest])) == 100
            assert pairs(await writer.scan()) == []

    in_still_time(main)


def test_pages_judge_by_the_moment_of_the_first() -> None:
    """A value that expires between two pages is in the later one: together they are one scan."""

    async def main() -> None:
        async with serving() as writer:
            for key in (b"a", b"b", b"c"):
                await writer.put(key, ttl_ms=TTL_MS)
            (first,) = await writer.scan(limit=1)
            writer.pass_ms(TTL_MS)
            rest = await writer.scan(page_token=first.page_token)
            assert [key for key, _ in pairs([first, *rest])] == [b"a", b"b", b"c"]
            assert pairs(await writer.scan()) == []

    in_still_time(main)


def test_expired_value_does_not_come_back_after_a_restart() -> None:
    """Logical time never goes back: what had expired for a reader stays so at the next writer."""

    async def main() -> None:
        database = await Database.created()
        async with serving(database) as writer:
            await writer.put(b"a", ttl_ms=TTL_MS)
            await writer.put(b"b", ttl_ms=3 * TTL_MS)
            writer.pass_ms(TTL_MS)
            assert not (await writer.get(b"a")).found
            await writer.put(b"c")  # carries the time into the log
        async with serving(database) as writer:
            assert [key for key, _ in pairs(await writer.scan())] == [b"b", b"c"]
            writer.pass_ms(2 * TTL_MS)
            assert [key for key, _ in pairs(await writer.scan())] == [b"c"]

    in_still_time(main)
