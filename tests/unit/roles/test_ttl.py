"""Values that expire: by logical time, in every way to read and to compare."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any

from shalekv.v1 import kv_pb2
from tests.kit.engine.databases import Database
from tests.kit.serving.messages import get
from tests.kit.serving.roles import (
    LINEARIZABLE,
    UNCOMMITTED,
    Serving,
    pairs,
    serving,
)
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
