"""The client for threads: the same methods, values and errors, without an event loop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import chain

import pytest

from shalekv_client import (
    Abandoned,
    ClientClosed,
    InvalidRequest,
    NotSent,
    Put,
    SyncClient,
    SyncSession,
)
from tests.kit.serving.dict_server import DictServer, received, silent


async def in_thread(work: Callable[[], None]) -> None:
    """Run `work` in a thread, beside the loop in which the server runs."""
    await asyncio.to_thread(work)


async def test_scan_is_an_ordinary_iterator(server: DictServer) -> None:
    """A scan can be iterated over, paged, and left early."""

    def work() -> None:
        with SyncClient(server.address) as client:
            keys = [b"%02d" % n for n in range(20)]
            client.write([Put(key, key) for key in keys])
            assert [entry.key for entry in client.scan()] == keys
            assert [entry.key for entry in client.scan(prefix=b"1", reverse=True)] == keys[:9:-1]
            assert [len(page) for page in client.scan(limit=8).pages()] == [8, 8, 4]
            with client.scan(limit=5) as scan:
                assert next(scan).key == b"00"
            assert list(scan) == []
            first = client.scan(limit=15)
            assert len(list(first)) == 15
            assert first.more
            assert first.view is not None
            again = client.scan(page_token=first.page_token)
            assert [entry.key for entry in again] == keys[15:]
            last = first.next_page()
            assert [entry.key for entry in last] == keys[15:]
            with pytest.raises(ValueError, match="no next page"):
                last.next_page()

    await in_thread(work)


async def test_threads_share_a_client(server: DictServer) -> None:
    """Operations of many threads use one session, and each gets its own result."""

    def work() -> None:
        with SyncClient(server.address) as client, ThreadPoolExecutor(16) as threads:

            def count(_: int) -> list[int]:
                return [client.add(b"n") for _ in range(25)]

            results = list(threads.map(count, range(16)))
        assert all(result == sorted(result) for result in results)
        assert sorted(chain.from_iterable(results)) == list(range(1, 401))

    await in_thread(work)
    assert server.state.sessions_begun == 1


async def test_session_has_futures_for_threads(server: DictServer) -> None:
    """A session returns futures for threads, and keeps the order of each thread."""

    def work() -> None:
        with SyncClient(server.address) as client:
            with client.session(bytes_max=2_000) as session:
                puts: list[Future[int]] = []
                for _ in range(200):
                    puts.append(session.add(b"n"))
                    session.ready()
                assert puts[0].result() == 1
                bad = session.put(b"", b"")
                session.drain()
                assert puts[-1].done()
            assert [put.result() for put in puts] == list(range(1, 201))
            assert isinstance(bad.exception(), InvalidRequest)
            with pytest.raises(NotSent, match="the session is closed"):
                session.put(b"k", b"v")
            session.close()

    await in_thread(work)
    assert server.state.unanswered_bytes_most <= 2_000


def client_threads() -> set[threading.Thread]:
    """All threads but those that `to_thread` keeps."""
    return {each for each in threading.enumerate() if not each.name.startswith("asyncio_")}


async def test_closing_ends_everything(server: DictServer) -> None:
    """After closing, calls raise `ClientClosed`, futures are done, and no thread is left."""
    server.state.failures.append(silent())
    threads = client_threads()

    def begin() -> tuple[SyncClient, SyncSession, Future[object]]:
        client = SyncClient(server.address)
        session = client.session()
        future: Future[object] = Future()
        put = session.put(b"k", b"v")
        put.add_done_callback(lambda done: future.set_exception(done.exception()))
        return client, session, future

    client, session, future = await asyncio.to_thread(begin)
    await received(server, 1)

    def end() -> None:
        client.close()
        client.close()
        assert isinstance(future.exception(timeout=0), Abandoned)
        with pytest.raises(ClientClosed, match="the client is closed"):
            client.get(b"k")
        with pytest.raises(ClientClosed):
            session.put(b"k", b"v")
        with pytest.raises(ClientClosed):
            client.session()
        with pytest.raises(ClientClosed):
            next(client.scan())

    await in_thread(end)
    assert client_threads() <= threads
