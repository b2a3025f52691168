"""Access tokens: shown with every call, and replaced while calls, sessions and watches go on.

The servers are real ones with a guard, which knows the tokens that the test names.
"""

from __future__ import annotations

import asyncio
import logging
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from shalekv_client import (
    Client,
    ClientClosed,
    PermissionDenied,
    ShaleKVError,
    SyncClient,
    Unauthenticated,
    WatchCommit,
)
from tests.kit.constants import constants
from tests.kit.timeouts import until
from tests.unit.client.cluster import cluster
from tests.unit.client.token_server import NEW, OLD, WRONG, Asked, guarded

SECURITY = "shalekv_client.routing.access_token:"


@pytest.fixture(autouse=True)
def looking_often() -> Iterator[None]:
    """Look at files often, so that tests need not wait; ask once about refusals, however late they
    come.
    """
    with constants({SECURITY + "FILE_INTERVAL_S": 0.02, SECURITY + "FUNCTION_PAUSE_S": 1_000}):
        yield


async def every_call(client: Client) -> None:
    """Make one call of each kind."""
    await client.put(b"k", b"v")
    await client.get(b"k")
    assert [entry.key async for entry in client.scan()] == [b"k"]
    async with client.session() as session:
        writing = session.put(b"k", b"w")
    await writing
    async with client.watch(prefix=b"k") as watch:
        await client.delete(b"k")
        assert isinstance(await anext(watch), WatchCommit)
    await client.status()
    await client.stats()
    await client.create_snapshot("s", ttl_s=60)


@pytest.mark.parametrize("coalesce", [False, True])
async def test_a_token_goes_with_every_call(coalesce: bool) -> None:  # noqa: FBT001 (a case)
    """Calls of every kind show it; without one, each of them is refused."""
    async with guarded() as server:
        async with Client(server.address, access_token=OLD, coalesce=coalesce) as client:
            await every_call(client)
        assert server.refused == 0
        async with Client(server.address, coalesce=coalesce) as nobody:
            with pytest.raises(Unauthenticated):
                await nobody.put(b"k", b"v")
            with pytest.raises(Unauthenticated):
                await nobody.status()
            with pytest.raises(Unauthenticated):
                await anext(nobody.watch())
            with pytest.raises(Unauthenticated):
                await anext(nobody.scan())


async def test_a_denied_call_is_not_repeated() -> None:
    """The error says which verb was missing, and there is one attempt."""
    async with guarded() as server, Client(server.address, access_token="few") as client:
        await client.put(b"a", b"v")
        with pytest.raises(PermissionDenied) as denied:
            await client.put(b"b", b"v")
        assert denied.value.verb == "write"
        assert server.guard.refused.denied == 1


async def test_a_file_is_replaced_under_load(tmp_path: Path) -> None:
    """No call fails, and each is done once, while the token is replaced and the old one ends."""
    file = tmp_path / "token"
    file.write_text(f"{OLD}\n")
    async with (
        guarded() as server,
        Client(server.address, access_token_file=file) as client,
        Client(server.address, access_token_file=file, coalesce=False) as single,
    ):
        done, is_ending = 0, False

        async def load(of: Client) -> None:
            nonlocal done
            while not is_ending:
                await of.add(b"count")
                done += 1

        async with asyncio.TaskGroup() as tasks:
            for each in (client, single) * 8:
                tasks.create_task(load(each))
            await until(lambda: done > 100, "calls with the old token")
            (tmp_path / "next").write_text(NEW)
            (tmp_path / "next").replace(file)
            await until(lambda: client.fleet.token_number == 2, "the new token")
            await until(lambda: single.fleet.token_number == 2, "the new token")
            server.withdraw(OLD)
            before = done
            await until(lambda: done > before + 100, "calls with the new token")
            is_ending = True
        found = await client.get(b"count")
        assert found is not None
        assert int.from_bytes(found.value, "little") == done


@pytest.mark.parametrize("coalesce", [False, True])
async def test_a_refused_token_is_asked_for_again(coalesce: bool) -> None:  # noqa: FBT001 (a case)
    """Concurrent calls that are refused ask once, and are repeated once with another token."""
    ask = Asked(WRONG, NEW)
    async with (
        guarded() as server,
        Client(server.address, access_token=ask, coalesce=coalesce) as client,
    ):
        await asyncio.gather(*(client.add(b"count") for _ in range(50)))
        found = await client.get(b"count")
        assert found is not None
        assert int.from_bytes(found.value, "little") == 50
        assert ask.count == 2
        assert server.refused <= 50


@pytest.mark.parametrize("coalesce", [False, True])
async def test_a_token_that_stays_refused_is_an_error(coalesce: bool) -> None:  # noqa: FBT001
    """There is one attempt for each call, and the function is asked once more for all."""
    ask = Asked(WRONG)
    async with (
        guarded() as server,
        Client(server.address, access_token=ask, coalesce=coalesce) as client,
    ):
        calls = [client.put(b"k", b"v") for _ in range(20)]
        failed = await asyncio.gather(*calls, return_exceptions=True)
        assert {type(error) for error in failed} == {Unauthenticated}
        assert ask.count == 2
        assert server.refused <= 20


async def test_the_search_for_the_writer_shows_the_token() -> None:
    """With several addresses, servers are asked for their roles; a refusal ends the search."""
    async with guarded() as server:
        addresses = [server.address, server.address.replace("127.0.0.1", "localhost")]
        ask = Asked(WRONG, NEW)
        async with Client(addresses, access_token=ask) as client:
            assert await client.add(b"count") == 1
            assert ask.count == 2
        before, ask = server.refused, Asked(WRONG)
        async with Client(addresses, access_token=ask) as client:
            for call in (client.add(b"count"), client.get(b"count")):
                with pytest.raises(Unauthenticated):
                    await call
            assert ask.count <= 3
            assert server.refused - before <= 12


async def test_functions_may_be_asynchronous_and_slow() -> None:
    """Calls wait for the first token within their timeout, or until the client is closed. An error
    does not repeat the words of a function.
    """

    async def token() -> str:
        await asyncio.sleep(0)
        return OLD

    def failing() -> str:
        raise KeyError(OLD)

    async def silent() -> str:
        await asyncio.Event().wait()
        return OLD

    async with guarded() as server:
        async with Client(server.address, access_token=token) as client:
            await client.put(b"k", b"v")
        async with Client(server.address, access_token=failing) as client:
            with pytest.raises(Unauthenticated, match="raised KeyError") as raised:
                await client.put(b"k", b"v")
            assert OLD not in str(raised.value)
        others = asyncio.all_tasks()
        async with Client(server.address, access_token=silent) as client:
            with pytest.raises(Unauthenticated, match="not returned in time"):
                await client.put(b"k", b"v", timeout_ms=50)
            waiting = asyncio.ensure_future(client.put(b"k", b"v"))
            await asyncio.sleep(0)
        with pytest.raises(ClientClosed):
            await waiting
        await until(lambda: asyncio.all_tasks() <= others, "the end of what the client has begun")


async def test_coalesced_writes_go_on_with_another_token() -> None:
    """A session that ends because its token has expired loses no write, and doubles none."""
    ask = Asked(OLD, NEW)
    async with guarded() as server, Client(server.address, access_token=ask) as client:
        await client.put(b"k", b"v")
        adding = [asyncio.ensure_future(client.add(b"count")) for _ in range(100)]
        await asyncio.sleep(0)
        server.withdraw(OLD)
        adding += [asyncio.ensure_future(client.add(b"count")) for _ in range(100)]
        await asyncio.gather(*adding)
        found = await client.get(b"count")
        assert found is not None
        assert int.from_bytes(found.value, "little") == 200
        assert ask.count == 2


async def test_a_session_begins_with_another_token() -> None:
    """Its operations are sent again in their order; later it ends with its token, and says so."""
    ask = Asked(WRONG, OLD)
    async with guarded() as server, Client(server.address, access_token=ask) as client:
        async with client.session() as session:
            adding = [session.add(b"count") for _ in range(100)]
        assert [future.result() for future in adding] == [*range(1, 101)]
        async with client.session() as session:
            assert await session.add(b"count") == 101
            server.withdraw(OLD)
            refused = session.add(b"count")
        with pytest.raises(Unauthenticated):
            refused.result()
    async with Client(server.address, access_token=Asked(WRONG)) as client:
        async with client.session() as session:
            refused = session.add(b"count")
        with pytest.raises(ShaleKVError):
            refused.result()


async def test_a_watch_goes_on_with_another_token() -> None:
    """Its commits come once, in order; with a token that is refused again it fails."""
    ask = Asked(OLD, NEW, WRONG)
    async with (
        guarded() as server,
        Client(server.address, access_token=ask) as client,
        Client(server.address, access_token=NEW) as writing,
        client.watch(prefix=b"k") as watch,
    ):
        seen: list[bytes] = []

        async def take(count: int) -> None:
            while len(seen) < count:
                event = await anext(watch)
                if isinstance(event, WatchCommit):
                    seen.extend(change.key for change in event.changes)

        for number in range(30):
            await writing.put(b"k%02d" % number, b"v")
            if number == 10:
                server.withdraw(OLD)
        await asyncio.wait_for(take(30), 30)
        assert seen == [b"k%02d" % number for number in range(30)]
        before = server.refused
        with constants({SECURITY + "FUNCTION_PAUSE_S": 0}):
            server.withdraw(NEW)
            with pytest.raises(Unauthenticated):
                await asyncio.wait_for(take(31), 30)
        assert server.refused - before <= 2


async def test_a_scan_of_a_snapshot_goes_on_with_another_token() -> None:
    """It continues behind what was received, as when its server has failed."""
    ask = Asked(OLD, NEW)
    async with guarded() as server, Client(server.address, access_token=ask) as client:
        for number in range(64):
            await client.put(b"%03d" % number, b"v" * 100_000)
        snapshot = await client.create_snapshot("s", ttl_s=60)
        keys = []
        async for entry in client.scan(at=snapshot):
            keys.append(entry.key)
            if len(keys) == 1:
                server.withdraw(OLD)
        assert keys == [b"%03d" % number for number in range(64)]
        assert ask.count == 2


async def test_a_token_is_in_no_text(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Not in objects as they are printed, not in errors and their traces, not in logs."""
    file = tmp_path / "token"
    file.write_text(WRONG)
    texts: list[str] = []
    with caplog.at_level(logging.DEBUG):
        async with guarded() as server:
            for client in (
                Client(server.address, access_token=WRONG),
                Client(server.address, access_token_file=file),
            ):
                async with client:
                    texts += [repr(client), repr(client.fleet), repr(vars(client.fleet))]
                    with pytest.raises(Unauthenticated) as refused:
                        await client.put(b"k", b"v")
                    texts += traceback.format_exception(refused.value)
                    texts += [repr(refused.value)]
            file.write_text(WRONG)
            async with Client(server.address, access_token_file=file):
                file.write_text(f"{WRONG} {WRONG}")
                await until(lambda: "stays in use" in caplog.text, "the warning")
        with pytest.raises(ValueError, match="visible ASCII") as malformed:
            Client(server.address, access_token=f"{WRONG}\n")
        texts += traceback.format_exception(malformed.value)
    assert not [text for text in (*texts, caplog.text) if WRONG in text]


def test_a_token_is_not_sent_over_a_network_in_clear(tmp_path: Path) -> None:
    """Without TLS it stays within the machine, unless the client is told otherwise."""

    async def client(*addresses: str, insecure_token: bool = False) -> None:
        async with Client(addresses, access_token=OLD, insecure_token=insecure_token):
            pass

    for address in ("127.0.0.1:1", "localhost:1", "[::1]:1", f"unix:{tmp_path}/socket"):
        asyncio.run(client(address))
    for address in ("192.0.2.1:1", "db.example.org:1", "[2001:db8::1]:1", "localhost.example:1"):
        with pytest.raises(ValueError, match="not sent without TLS"):
            asyncio.run(client("127.0.0.1:1", address))
        asyncio.run(client(address, insecure_token=True))
    with pytest.raises(ValueError, match="not both"):
        SyncClient("127.0.0.1:1", access_token=OLD, access_token_file=tmp_path)
    with pytest.raises(FileNotFoundError):
        SyncClient("127.0.0.1:1", access_token_file=tmp_path / "none")


async def test_a_reported_address_gets_no_token_in_clear() -> None:
    """A writer elsewhere, which a reader reports, is not called, and the error says why."""
    async with cluster(readers=1) as members:
        (reader,) = members.readers
        reader.state.writer_address = "192.0.2.1:7654"
        async with Client(reader.address, access_token=OLD) as client:
            with pytest.raises(Unauthenticated, match=r"192\.0\.2\.1:7654: .*without TLS"):
                await client.put(b"k", b"v", timeout_ms=5_000)


async def test_blocking_clients_show_a_token() -> None:
    """The client without an event loop takes the same arguments."""

    def call(address: str, source: Callable[[], str]) -> int:
        with SyncClient(address, access_token=source) as client:
            return client.add(b"count")

    async with guarded() as server:
        assert await asyncio.to_thread(call, server.address, Asked(WRONG, NEW)) == 1


async def test_the_fallback_shows_a_token() -> None:
    """Both transports send it, and replace it."""
    ask = Asked(OLD, NEW)
    async with guarded() as server, Client(server.address, access_token=ask) as client:
        await every_call(client)
        server.withdraw(OLD)
        await client.put(b"k", b"v")
        assert ask.count == 2
