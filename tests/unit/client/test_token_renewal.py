"""Access tokens that are replaced while sessions go on, and functions for them that fail or hang.

The servers are real ones with a guard, which knows the tokens that the test names.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from shalekv_client import Client, SyncClient, Unauthenticated, request_id_of_calls
from shalekv_client.routing.access_token import FUNCTION_TIMEOUT_MS, THREADS_MAX
from tests.kit.constants import constants
from tests.kit.timeouts import until
from tests.unit.client.token_server import NEW, OLD, WRONG, Asked, guarded

SECURITY = "shalekv_client.routing.access_token:"
QUICK = {SECURITY + "FILE_INTERVAL_S": 0.02, SECURITY + "FUNCTION_PAUSE_S": 0.001}
# While a call of a function does not return: one that does may take longer on a busy machine.
GIVING_UP = {SECURITY + "FUNCTION_TIMEOUT_MS": 100}
PATIENT = {SECURITY + "FUNCTION_TIMEOUT_MS": FUNCTION_TIMEOUT_MS}


@pytest.fixture(autouse=True)
def asking_often() -> Iterator[None]:
    """Ask for tokens often, so that tests need not wait."""
    with constants(QUICK):
        yield


class Hanging:
    """A function for tokens, some calls of which don't return until the test ends."""

    def __init__(self, *tokens: str) -> None:
        self.tokens = tokens  # of each call in turn; empty: it does not return
        self.count = 0
        self.released = threading.Event()

    def next(self) -> str:
        self.count += 1
        return self.tokens[min(self.count, len(self.tokens)) - 1]

    def __call__(self) -> str:
        token = self.next()
        if not token:
            self.released.wait()
        return token

    async def later(self) -> str:
        """Do the same without a thread; it does not let itself be cancelled."""
        token = self.next()
        if not token:
            waiting = asyncio.ensure_future(asyncio.to_thread(self.released.wait))
            while not waiting.done():
                with suppress(asyncio.CancelledError):
                    await asyncio.shield(waiting)
        return token


async def until_known(client: Client) -> None:
    """Call until the caller is known."""
    while True:
        with suppress(Unauthenticated):
            await client.get(b"k")
            return
        await asyncio.sleep(0)


@pytest.fixture(params=["in a thread", "awaited"])
def is_awaited(request: pytest.FixtureRequest) -> bool:
    return bool(request.param == "awaited")


async def test_a_function_that_hangs_is_called_again(*, is_awaited: bool) -> None:
    """A call waits no longer than its own timeout, and its error says what it has waited for. All
    that wait share one call of the function; after its bound, the next one asks anew.
    """
    hanging = Hanging("", OLD)
    source = hanging.later if is_awaited else hanging
    loop = asyncio.get_running_loop()
    try:
        async with guarded() as server, Client(server.address, access_token=source) as client:
            with constants(GIVING_UP):
                began_s = loop.time()
                patient = asyncio.ensure_future(client.put(b"k", b"v"))
                calls = [client.put(b"k", b"v", timeout_ms=20) for _ in range(20)]
                failed = await asyncio.gather(*calls, return_exceptions=True)
                assert {type(error) for error in failed} == {Unauthenticated}
                assert "the function for it has not returned in time" in str(failed[0])
                assert loop.time() - began_s < 10
                assert hanging.count == 1
                with pytest.raises(Unauthenticated, match="not returned within 100 ms"):
                    await patient
            await until_known(client)
            assert hanging.count == 2
    finally:
        hanging.released.set()


async def test_a_renewal_that_hangs_ends(*, is_awaited: bool) -> None:
    """A refused call tells that there is no other token, and why; a later one gets it."""
    hanging = Hanging(OLD, "", NEW)
    source = hanging.later if is_awaited else hanging
    try:
        async with guarded() as server, Client(server.address, access_token=source) as client:
            assert await client.add(b"count") == 1
            await server.end(OLD)
            why = "there is no other access token: the func"
            with constants(GIVING_UP), pytest.raises(Unauthenticated, match=why):
                await client.get(b"count")
            assert hanging.count == 2
            await until_known(client)
            assert hanging.count == 3
            assert await client.add(b"count") == 2
    finally:
        hanging.released.set()


async def test_the_threads_of_a_function_that_hangs_are_few() -> None:
    """With so many calls of it, it is not called again until one of them returns."""
    hanging = Hanging(*[""] * THREADS_MAX, OLD)
    short = {SECURITY + "FUNCTION_TIMEOUT_MS": 1, SECURITY + "FUNCTION_INTERVAL_S": 0.001}
    try:
        with constants(short):
            async with guarded() as server, Client(server.address, access_token=hanging) as client:
                refused = ""
                while "8 calls of the function for it have not returned" not in refused:
                    with pytest.raises(Unauthenticated) as error:
                        await client.get(b"k")
                    refused = str(error.value)
                await until(lambda: hanging.count == THREADS_MAX, "the calls in all threads")
                for _ in range(10):
                    with pytest.raises(Unauthenticated):
                        await client.get(b"k")
                assert hanging.count == THREADS_MAX
                hanging.released.set()
                with constants(PATIENT):
                    await until_known(client)
    finally:
        hanging.released.set()


async def test_a_refusal_of_a_file_that_is_read_at_present_is_plain(tmp_path: Path) -> None:
    """While it is read over and over, nothing is said of a failure that there was not."""
    file = tmp_path / "token"
    file.write_text(WRONG)
    with constants({SECURITY + "FILE_INTERVAL_S": 0.0}):
        async with (
            guarded() as server,
            # Between sessions that are refused there are pauses.
            Client(server.address, access_token_file=file, coalesce=False) as client,
        ):
            for _ in range(50):
                with pytest.raises(Unauthenticated) as refused:
                    await client.get(b"k")
                assert "no other access token" not in str(refused.value)


def test_a_function_that_hangs_does_not_keep_a_program() -> None:
    """Its thread ends with the process, and a client is closed without waiting for it."""
    hanging = Hanging("")
    try:
        with (
            SyncClient("127.0.0.1:1", access_token=hanging) as client,
            pytest.raises(Unauthenticated),
        ):
            client.put(b"k", b"v", timeout_ms=20)
        threads = [each for each in threading.enumerate() if each.name == "shalekv access token"]
        assert threads
        assert all(each.daemon for each in threads)
    finally:
        hanging.released.set()


async def test_a_session_moves_to_a_new_token(tmp_path: Path) -> None:
    """Before the old one ends: no operation is refused, and each is applied once, in its order."""
    file = tmp_path / "token"
    file.write_text(OLD)
    async with (
        guarded() as server,
        Client(server.address, access_token_file=file) as client,
        client.session() as session,
    ):
        adding = [session.add(b"count") for _ in range(500)]
        (tmp_path / "next").write_text(NEW)
        (tmp_path / "next").replace(file)
        while client.fleet.token_number == 1:
            adding += [session.add(b"count") for _ in range(10)]
            await adding[-10]
        adding.append(session.add(b"count"))
        await adding[-1]
        calls = {each.method: each.calls for each in (await client.status()).calls}
        assert calls["KV.Session"] == 1  # that with the old token has ended
        server.withdraw(OLD)
        adding += [session.add(b"count") for _ in range(500)]
        await session.drain()
        assert [future.result() for future in adding] == [*range(1, len(adding) + 1)]
        assert server.refused == 0


async def test_a_session_goes_on_with_another_token() -> None:
    """When the server ends it, what it has refused is sent again, in its order and once."""
    ask = Asked(OLD, NEW)
    async with (
        guarded() as server,
        Client(server.address, access_token=ask) as client,
        client.session() as session,
    ):
        adding = []
        for number in range(60):
            adding += [session.add(b"count") for _ in range(20)]
            if number == 20:
                server.withdraw(OLD)
            if len(adding) > 200:
                await adding[-200]
        await session.drain()
        assert [future.result() for future in adding] == [*range(1, len(adding) + 1)]
        assert ask.count == 2


async def test_an_idle_session_goes_on_with_another_token() -> None:
    """Its next operation gets the token: also if there was none when the old one has ended."""
    hanging = Hanging(OLD, NEW)
    async with (
        guarded() as server,
        Client(server.address, access_token=hanging) as client,
        client.session() as session,
    ):
        assert await session.add(b"count") == 1
        await server.end(OLD)
        assert await session.add(b"count") == 2


async def test_a_session_without_another_token_says_why() -> None:
    """Refused operations were not applied; the error names the function, and each its operation."""

    def failing() -> str:
        if ask.count:
            raise KeyError(OLD)
        return ask()

    ask = Asked(OLD)
    async with guarded() as server, Client(server.address, access_token=failing) as client:
        async with client.session() as session:
            assert await session.add(b"count") == 1
            await server.end(OLD)
            refused = {}
            for number in range(10):
                with request_id_of_calls(f"{number}"):
                    refused[f"{number}"] = session.add(b"count")
            await session.drain()
            with request_id_of_calls("late"):
                refused["late"] = session.add(b"count")
        for name, each in refused.items():
            with pytest.raises(Unauthenticated, match=r"no other .* raised KeyError") as failed:
                each.result()
            assert failed.value.details.request_id == name
