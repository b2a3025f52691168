"""Scans in pages: one view for all of them, whatever happens meanwhile."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shalekv.errors import InvalidRequest, PageExpired
from shalekv.roles.writer import Writer
from shalekv.settings import DatabaseSettings, LimitSettings, ServeSettings
from shalekv.v1 import kv_pb2
from tests.kit.engine.databases import Database
from tests.kit.engine.running_log import quiesce
from tests.kit.inline_runtime import gathered
from tests.kit.serving.messages import delete_range, put
from tests.kit.serving.roles import CALL, MEMORY, UNCOMMITTED, Serving, pairs, serving
from tests.sim.run import simulate
from tests.sim.world import World

Pairs = list[tuple[bytes, bytes]]


async def fill(writer: Serving, count: int = 10, value: bytes = b"1") -> Pairs:
    """So many keys in one commit."""
    keys = [b"%03d" % number for number in range(count)]
    await writer.ask(kv_pb2.WriteRequest(changes=[put(key, value) for key in keys]))
    return [(key, value) for key in keys]


async def page(
    writer: Serving, token: bytes = b"", level: Any = 0, **fields: Any
) -> tuple[Pairs, bytes]:
    """One page, and the token of the next; empty: it was the last."""
    replies = await writer.scan(level, page_token=token, **fields)
    assert [reply.more for reply in replies[:-1]] == [False] * (len(replies) - 1)
    assert {reply.page_token for reply in replies[:-1]} <= {b""}
    last = replies[-1]
    assert last.more == bool(last.page_token)
    return pairs(replies), last.page_token


async def pages(writer: Serving, token: bytes = b"", level: Any = 0, **fields: Any) -> list[Pairs]:
    """All pages from `token` on."""
    found = []
    while True:
        entries, token = await page(writer, token, level, **fields)
        found.append(entries)
        if not token:
            return found


def union(found: list[Pairs]) -> Pairs:
    """The entries of some pages."""
    return [entry for entries in found for entry in entries]


@pytest.mark.parametrize("reverse", [False, True])
async def test_pages_by_count(reverse: bool) -> None:  # noqa: FBT001 - a parameter of the test
    """Each page has as many entries as its limit says, the last one what is left."""
    async with serving() as writer:
        whole = await fill(writer)
        found = await pages(writer, limit=4, reverse=reverse)
        assert [len(entries) for entries in found] == [4, 4, 2]
        assert union(found) == (whole[::-1] if reverse else whole)
        exactly = await pages(writer, limit=5, reverse=reverse)
        assert [len(entries) for entries in exactly] == [5, 5]


async def test_pages_by_bytes() -> None:
    """A page ends with the entry that brings keys and values to the limit."""
    async with serving() as writer:
        await fill(writer, 5, b"v" * 7)
        assert [len(each) for each in await pages(writer, limit_bytes=11)] == [2, 2, 1]
        assert [len(each) for each in await pages(writer, limit_bytes=20)] == [2, 2, 1]
        assert [len(each) for each in await pages(writer, limit_bytes=1)] == [1] * 5
        keys_only = await pages(writer, limit_bytes=6, keys_only=True)
        assert [len(each) for each in keys_only] == [2, 2, 1]
        assert {value for _, value in union(keys_only)} == {b""}


async def test_limits_may_change_on_the_way() -> None:
    """Each page is cut by the limits of its own request."""
    async with serving() as writer:
        whole = await fill(writer)
        first, token = await page(writer, limit=1)
        second, token = await page(writer, token, limit_bytes=5)
        rest, token = await page(writer, token)
        assert (len(first), len(second), token) == (1, 2, b"")
        assert first + second + rest == whole


async def test_page_may_be_asked_for_again() -> None:
    """Whoever lost a page sends its token once more, and gets the same page."""
    async with serving() as writer:
        await fill(writer)
        _, token = await page(writer, limit=3)
        second = await page(writer, token, limit=3)
        await page(writer, second[1], limit=3)
        assert (await page(writer, token, limit=3))[0] == second[0]


async def test_pages_see_the_view_of_the_first() -> None:
    """Writes, deletes, range deletes and merges of runs change nothing in the pages that follow."""
    async with serving() as writer:
        whole = await fill(writer, 60)
        found, token = await page(writer, limit=7)
        seqs = set()
        while token:
            number = len(found)
            await writer.put(b"%03d" % (number + 1), b"changed")
            await writer.delete(b"%03d" % (number + 2))
            key_range = kv_pb2.KeyRange(start=b"%03d" % (number + 3), end=b"%03d" % (number + 9))
            await writer.ask(kv_pb2.DeleteRangeRequest(range=key_range))
            await writer.put(b"%03d x" % (number + 1), b"new")
            await quiesce()
            replies = await writer.scan(page_token=token, limit=7)
            seqs |= {reply.header.seq for reply in replies}
            found, token = found + pairs(replies), replies[-1].page_token
        assert found == whole
        assert seqs == {1}
        assert writer.engine.log.objects_written > 20
        assert writer.engine.memtable.run_count < 10  # so runs were merged
        await writer.ask(kv_pb2.DeleteRangeRequest(all=True))
        assert pairs(await writer.scan()) == []


async def test_uncommitted_pages_see_one_state() -> None:
    """What was in memory only when the first page was read is in the later pages, and no more."""
    async with serving() as writer:
        writer.store.is_holding = True
        for key in (b"a", b"b", b"c"):
            await writer.put(key, b"1", durability=MEMORY)
        first, token = await page(writer, level=UNCOMMITTED, limit=1)
        await writer.put(b"b", b"2", durability=MEMORY)
        await writer.delete(b"c", durability=MEMORY)
        assert union(await pages(writer, token, limit=1)) == [(b"b", b"1"), (b"c", b"1")]
        assert first == [(b"a", b"1")]


BOUNDS = st.sampled_from([b"", b"a", b"ab", b"b", b"b\xff", b"c"])
KEYS = [
    bytes([first]) + rest for first in b"abc" for rest in (b"", b"\0", b"b", b"\xff", b"\xff\0")
]


@settings(deadline=None)
@given(
    written=st.lists(st.tuples(st.sampled_from(KEYS), st.integers(0, 9)), max_size=20),
    deleted=st.tuples(BOUNDS, BOUNDS),
    bounds=st.tuples(BOUNDS, BOUNDS),
    limits=st.lists(
        st.fixed_dictionaries({"limit": st.integers(1, 4)})
        | st.fixed_dictionaries({"limit_bytes": st.integers(1, 9)}),
        min_size=1,
        max_size=4,
    ),
    flags=st.fixed_dictionaries({"reverse": st.booleans(), "keys_only": st.booleans()}),
)
def test_union_of_pages_is_one_scan(
    written: list[tuple[bytes, int]],
    deleted: tuple[bytes, bytes],
    bounds: tuple[bytes, bytes],
    limits: list[dict[str, int]],
    flags: dict[str, bool],
) -> None:
    """Whatever the limits of the pages, together they hold what one scan holds, in its order."""

    async def main() -> None:
        async with serving() as writer:
            changes = [put(key, b"v" * size) for key, size in written]
            changes += [delete_range(start=min(deleted), end=max(deleted))] * any(deleted)
            changes += [put(b"bb")]
            await writer.ask(kv_pb2.WriteRequest(changes=changes))
            fields: dict[str, Any] = {"range": kv_pb2.KeyRange(start=min(bounds), end=max(bounds))}
            whole = pairs(await writer.scan(**fields, **flags))
            found: Pairs = []
            token, turn = b"", 0
            while token or not turn:
                limit = limits[turn % len(limits)]
                entries, token = await page(writer, token, **fields, **flags, **limit)
                assert entries or not token
                found += entries
                turn += 1
            assert found == whole

    asyncio.run(main())


async def test_foreign_tokens_are_refused() -> None:
    """Flipped, cut, of another database, range, direction or `keys_only`: all name the field."""
    async with serving(await Database.created(1)) as other:
        await fill(other)
        _, foreign = await page(other, limit=1)
    async with serving(await Database.created(2)) as writer:
        await fill(writer)
        _, token = await page(writer, limit=1)
        flipped = [
            (int.from_bytes(token, "big") ^ (1 << bit)).to_bytes(len(token), "big")
            for bit in range(8 * len(token))
        ]
        wrong: list[dict[str, Any]] = [{"page_token": each} for each in (*flipped, foreign, b"x")]
        wrong += [
            {"page_token": token, "range": kv_pb2.KeyRange(prefix=b"0")},
            {"page_token": token, "reverse": True},
            {"page_token": token, "keys_only": True},
        ]
        for fields in wrong:
            with pytest.raises(InvalidRequest) as caught:
                await writer.scan(**fields)
            assert caught.value.field == "page_token"
        assert len(writer.kv.scans.views) == 1
        assert len((await page(writer, token))[0]) == 9


def test_token_expires_after_its_last_page() -> None:
    """The view lives for `scan_view_ttl_ms` after each page that used it, then PAGE_EXPIRED."""

    async def main(world: World) -> None:
        limits = LimitSettings(scan_view_ttl_ms=1_000)
        async with serving(limits=limits) as writer:
            await fill(writer)
            _, token = await page(writer, limit=1)
            for _ in range(3):
                await world.sleep_ms(999)
                _, token = await page(writer, token, limit=1)
            await world.sleep_ms(1_000)
            with pytest.raises(PageExpired):
                await page(writer, token)
            assert len(writer.kv.scans.views) == 0

    simulate(1, main)


def test_last_page_may_be_asked_for_again() -> None:
    """Its view is kept for as long as that of any page, though nothing follows it."""

    async def main(world: World) -> None:
        async with serving(limits=LimitSettings(scan_view_ttl_ms=1_000)) as writer:
            await fill(writer)
            _, token = await page(writer, limit=1)
            for _ in range(3):
                await world.sleep_ms(999)
                assert len((await page(writer, token))[0]) == 9
            await world.sleep_ms(1_000)
            with pytest.raises(PageExpired):
                await page(writer, token)

    simulate(1, main)


def test_slow_page_gives_a_token_that_works() -> None:
    """The time counts from the end of a page: one that is read slowly is not lost by that."""

    async def main(world: World) -> None:
        limits = LimitSettings(scan_view_ttl_ms=1_000, scan_message_bytes=1_024)
        async with serving(limits=limits) as writer:
            whole = await fill(writer, 20, b"v" * 500)
            first, token = await page(writer, limit=2)
            request = kv_pb2.ScanRequest(page_token=token, limit=10)
            slow = []
            async for reply in writer.kv.scan(request, CALL):
                slow.append(reply)
                if not reply.more:
                    await world.sleep_ms(5_000)
                    with pytest.raises(PageExpired):
                        await page(writer, token)
            assert len(slow) > 3
            rest = await gathered(
                writer.kv.scan(kv_pb2.ScanRequest(page_token=slow[-1].page_token), CALL)
            )
            assert first + pairs([*slow, *rest]) == whole

    simulate(1, main)


async def test_too_many_views_drive_out_the_oldest() -> None:
    """Beyond `scan_view_count_max` the view that was used longest ago is gone: PAGE_EXPIRED."""
    async with serving(limits=LimitSettings(scan_view_count_max=2)) as writer:
        await fill(writer)
        tokens = [(await page(writer, limit=1))[1] for _ in range(2)]
        await page(writer, tokens[0], limit=1)
        tokens.append((await page(writer, limit=1))[1])
        with pytest.raises(PageExpired):
            await page(writer, tokens[1])
        for token in (tokens[0], tokens[2]):
            assert len((await page(writer, token))[0]) == 9


async def test_token_does_not_survive_a_restart() -> None:
    """The next writer of the same database does not know the view: PAGE_EXPIRED, begin again."""
    database = await Database.created()
    async with serving(database) as writer:
        await fill(writer)
        _, token = await page(writer, limit=1)
    async with serving(database) as writer:
        _, own = await page(writer, limit=1)
        with pytest.raises(PageExpired):
            await page(writer, token)
        assert len((await page(writer, own))[0]) == 9


async def test_scan_without_a_limit_keeps_no_view() -> None:
    """Only who may come back for a next page holds memory."""
    async with serving() as writer:
        await fill(writer)
        await writer.scan()
        await writer.scan(limit=10)
        await writer.scan(limit_bytes=10_000)
        assert len(writer.kv.scans.views) == 0


async def test_writer_that_ends_lets_go_of_its_views() -> None:
    """When a writer has run its course no view and no timer is left of it."""
    database = await Database.created()
    settings = ServeSettings(database=DatabaseSettings(url="memory://test"))
    writer = await Writer.open(database.store, settings=settings, runtime=database.runtime())
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(writer.run())
        for key in (b"a", b"b"):
            answer = writer.kv.put(kv_pb2.PutRequest(key=key), CALL)
            assert isinstance(answer, asyncio.Future)
            await answer
        await gathered(writer.kv.scan(kv_pb2.ScanRequest(limit=1), CALL))
        assert len(writer.kv.scans.views) == 1
        writer.close()
    assert len(writer.kv.scans.views) == 0
