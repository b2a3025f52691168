"""Scans with several servers: which one is asked, and how scans continue after a broken call."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

import pytest

from shalekv import errors as server_errors
from shalekv_client import Client, ConnectionLost, PageExpired, RetryPolicy, StreamTooSlow
from tests.kit.serving.dict_server import refusing
from tests.unit.client.cluster import Cluster, Member, cluster

QUICK = RetryPolicy(backoff_initial_ms=1, backoff_max_ms=20)
SNAPSHOT = b"0123456789abcdef"
KEYS = [b"k%02d" % number for number in range(9)]  # five messages


@dataclass(frozen=True, slots=True)
class Pin:
    """A snapshot as another call returns it."""

    id: bytes


async def fill(running: Cluster) -> None:
    """Put the keys, pin them with a snapshot, and then delete half of them."""
    async with Client(running.writer.address) as client:
        for key in KEYS:
            await client.put(key, b"v")
        running.snapshots[SNAPSHOT] = dict(running.writer.state.data)
        await client.delete_range(start=KEYS[4])


def break_all(running: Cluster, after: int) -> None:
    """Let the next scan at each server break off after so many messages."""
    for member in (*running.readers, running.writer):
        member.state.scan_breaks_after = after


def scanned(running: Cluster) -> list[Member]:
    return [m for m in (*running.readers, running.writer) if m.state.scan_headers]


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("after", [0, 1, 2, 4])
async def test_scan_at_a_snapshot_goes_on_at_another_server(after: int, *, reverse: bool) -> None:
    """A call that breaks off at any message loses no entry, and repeats none."""
    async with cluster() as running:
        await fill(running)
        break_all(running, after)
        async with Client(running.addresses, retry=QUICK) as client:
            scan = client.scan(at=SNAPSHOT, reverse=reverse)
            found = [entry.key async for entry in scan]
        assert found == sorted(KEYS, reverse=reverse)
        assert (scan.more, scan.page_token) == (False, b"")
        assert len(scanned(running)) > 1
        assert all(header.min_seq == 0 for m in scanned(running) for header in m.state.scan_headers)


async def test_snapshot_is_read_by_any_server() -> None:
    """`at` is sent in gets and batch gets, to readers, without a `min_seq`."""
    async with cluster() as running:
        await fill(running)
        async with Client(running.addresses) as client:
            await client.put(b"other", b"")
            await client.get(b"k00", at=SNAPSHOT)
            await client.batch_get([b"k00"], at=Pin(SNAPSHOT))
            with pytest.raises(ValueError, match="snapshot"):
                await client.get(b"k00", at=b"")
        headers = [r.header for reader in running.readers for r in reader.state.requests]
        assert [(h.snapshot_id, h.min_seq) for h in headers] == [(SNAPSHOT, 0)] * 2


async def test_scan_of_the_newest_state_breaks_off() -> None:
    """Without a snapshot the error is raised, since another server has another state."""
    async with cluster() as running:
        await fill(running)
        break_all(running, 1)
        async with Client(running.addresses, retry=QUICK) as client:
            scan = client.scan()
            with pytest.raises(ConnectionLost):
                [entry async for entry in scan]
            assert [entry async for entry in scan] == []
        assert len(scanned(running)) == 1


async def test_resumable_scan_stays_at_its_server() -> None:
    """A resumable scan of the newest state continues at the server with its view, and only
    there.
    """
    async with cluster() as running:
        await fill(running)
        async with Client(running.addresses, retry=QUICK) as client:
            break_all(running, 1)
            assert [entry.key async for entry in client.scan(resumable=True)] == KEYS[:4]
            assert len(scanned(running)) == 1
            break_all(running, 1)
            scan = client.scan(resumable=True)
            assert (await anext(scan)).key == KEYS[0]
            for member in (*running.readers, running.writer):
                member.state.views.clear()
            with pytest.raises(PageExpired):
                [entry async for entry in scan]


async def test_scan_that_was_not_read_goes_on_if_it_may() -> None:
    """When a server has ended a scan that was not read, a resumable scan continues there
    once it is read, and any other raises the error.
    """
    async with cluster() as running:
        await fill(running)
        for member in (*running.readers, running.writer):
            member.state.scan_breaks_with = refusing(server_errors.StreamTooSlow("not taken"))
        async with Client(running.addresses, retry=QUICK) as client:
            break_all(running, 1)
            assert [entry.key async for entry in client.scan(resumable=True)] == KEYS[:4]
            break_all(running, 1)
            with pytest.raises(StreamTooSlow, match="not taken"):
                [entry async for entry in client.scan()]


async def test_pages_stay_at_their_server() -> None:
    """The pages of one scan come from one view with several servers, also by page tokens."""
    async with cluster(readers=3) as running:
        await fill(running)
        async with Client(running.addresses) as client:
            pages = [page async for page in client.scan(limit=1).pages()]
            assert [entry.key for page in pages for entry in page] == KEYS[:4]
            assert len(scanned(running)) == 1
            first = client.scan(limit=2)
            assert len([entry async for entry in first]) == 2
        async with Client(running.addresses) as other:
            second = other.scan(limit=2, page_token=first.page_token)
            assert [entry.key async for entry in second] == KEYS[2:4]
        async with Client(scanned(running)[0].address) as stranger:
            with pytest.raises(PageExpired, match="does not know"):
                await anext(stranger.scan(page_token=first.page_token.replace(b"127.", b"128.")))


async def test_scan_that_is_left_ends_its_call() -> None:
    """Leaving a scan early, or being cancelled in it, ends its call."""
    async with cluster() as running:
        await fill(running)
        async with Client(running.addresses) as client:
            async with client.scan(at=SNAPSHOT) as scan:
                assert (await anext(scan)).key == KEYS[0]
            assert [entry async for entry in scan] == []
            task = asyncio.create_task(anext(client.scan()))
            await asyncio.sleep(0)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            assert [entry.key async for entry in client.scan(limit=1)] == KEYS[:1]
