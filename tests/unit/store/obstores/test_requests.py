"""Reads, lists, deletions and the clock on Google and Azure fail clearly, and ask once."""

from __future__ import annotations

import asyncio
import traceback
from collections.abc import Awaitable, Callable

import pytest

from shalekv.errors import ObjectNotFound, StoreError, StoreRefused, StoreUnavailable
from shalekv.store.api import ObjectStore
from shalekv.store.requests import RequestKind
from shalekv.store.url import Provider
from tests.contract.opening import names_in
from tests.unit.store.obstores.opened import AZURE_KEY, BOTH, open_at
from tests.unit.store.obstores.scripted_server import (
    DROPPED,
    SILENCE,
    Reply,
    refused,
    scripted,
)

pytestmark = pytest.mark.usefixtures("azure_account")

Ask = Callable[[ObjectStore], Awaitable[object]]
NAME = "wal/1.sst"
MUCH_LATER_S = 20.0
READS: dict[str, Ask] = {
    "get": lambda store: store.get(NAME),
    "get_range": lambda store: store.get_range(NAME, 0, 10),
    "head": lambda store: store.head(NAME),
}
OTHERS: dict[str, Ask] = {
    "list": lambda store: names_in(store, "wal/"),
    "delete": lambda store: store.delete([NAME]),
    "now": lambda store: store.now_ms(),
}
ALL = READS | OTHERS


async def failure(provider: Provider, ask: Ask, reply: Reply, timeout_ms: int = 30_000) -> object:
    """The error of a request that is answered so, which is sent once."""
    async with scripted(reply) as server:
        store = open_at(provider, server.endpoint, timeout_ms=timeout_ms)
        with pytest.raises(StoreError) as raised:
            await ask(store)
        assert len(server.asked) == 1
        await store.close()
    return raised.value


@BOTH
@pytest.mark.parametrize("operation", ALL)
@pytest.mark.parametrize(
    ("reply", "kind"),
    [
        (refused(403, "AccessDenied"), StoreRefused),
        (refused(401, "Expired"), StoreRefused),
        (refused(429, "SlowDown"), StoreUnavailable),
        (refused(500, "InternalError"), StoreUnavailable),
        (refused(503, "ServerBusy"), StoreUnavailable),
        (DROPPED, StoreUnavailable),
    ],
)
async def test_failures(
    provider: Provider, operation: str, reply: Reply, kind: type[StoreError]
) -> None:
    """An error names the store, the operation and the problem, and whether to repeat."""
    error = await failure(provider, ALL[operation], reply)
    assert type(error) is kind
    assert str(error).startswith(f"{provider}://bucket/database: {operation} ")


@BOTH
async def test_silence(provider: Provider) -> None:
    """A request that is not answered in its time is given up; all wait at the same time."""
    async with asyncio.timeout(MUCH_LATER_S):
        errors = await asyncio.gather(
            *(failure(provider, ask, SILENCE, timeout_ms=1_500) for ask in ALL.values())
        )
    kinds = {operation: type(error) for operation, error in zip(ALL, errors, strict=True)}
    assert kinds == dict.fromkeys(ALL, StoreUnavailable)


@BOTH
@pytest.mark.parametrize("operation", READS)
async def test_a_missing_object(provider: Provider, operation: str) -> None:
    """A name that no object has is not found."""
    error = await failure(provider, READS[operation], refused(404, "NoSuchKey"))
    assert isinstance(error, ObjectNotFound)


@pytest.mark.parametrize(
    ("provider", "code"),
    [(Provider.GOOGLE, "NoSuchBucket"), (Provider.AZURE, "ContainerNotFound")],
)
@pytest.mark.parametrize("operation", sorted(set(ALL) - {"head"}))  # its replies have no code
async def test_a_missing_bucket(provider: Provider, code: str, operation: str) -> None:
    """A bucket that is missing is no missing object."""
    error = await failure(provider, ALL[operation], refused(404, code))
    assert isinstance(error, StoreRefused)
    assert code in str(error)


def batch(*statuses: int) -> Reply:
    """What Azure answers to a batch of deletions."""
    parts = "".join(
        f"--part\r\nContent-Type: application/http\r\nContent-ID: {number}\r\n\r\n"
        f"HTTP/1.1 {status} Told\r\n\r\n"
        for number, status in enumerate(statuses)
    )
    headers = {"Content-Type": "multipart/mixed; boundary=part"}
    return Reply(202, f"{parts}--part--\r\n", headers)


async def test_a_batch_with_a_missing_name_is_sent_one_by_one() -> None:
    """Where one name of a batch is gone, the others are deleted for certain, or it is an error."""
    async with scripted(batch(404, 403), batch(404), batch(202)) as server:
        store = open_at(Provider.AZURE, server.endpoint)
        await store.delete(["wal/1", "wal/2"])
        assert len(server.asked) == store.sent.by_kind[RequestKind.DELETE] == 3
        await store.close()
    async with scripted(batch(404, 403), batch(404), batch(403)) as server:
        store = open_at(Provider.AZURE, server.endpoint)
        with pytest.raises(StoreRefused, match="delete wal/2: the answer was 403"):
            await store.delete(["wal/1", "wal/2"])
        await store.close()


async def test_secrets_are_not_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """No part of an error, and of what is printed of it, shows credentials or what was signed."""
    monkeypatch.delenv("AZURE_STORAGE_ACCOUNT_KEY")
    monkeypatch.setenv("AZURE_STORAGE_SAS_TOKEN", "?sv=2021-12-02&sig=S1GNATURE")
    detail = "<AuthenticationErrorDetail>signed S1GNATURE with TH1S</AuthenticationErrorDetail>"
    for ask in ALL.values():
        error = await failure(Provider.AZURE, ask, refused(403, "AuthenticationFailed", detail))
        assert isinstance(error, StoreError)
        told = "".join(traceback.format_exception(error))
        for secret in ("S1GNATURE", "TH1S", AZURE_KEY):
            assert secret not in told


async def test_the_clock_never_goes_back() -> None:
    """When the store's clock is set back, that of the process stands still."""
    times = [Reply(), Reply(), Reply(), Reply(headers={"Last-Modified": HOUR_BEFORE})]
    async with scripted(*times) as server:
        store = open_at(Provider.GOOGLE, server.endpoint)
        assert await store.now_ms() == await store.now_ms()
        assert [line.split()[0] for line in server.asked] == ["PUT", "HEAD", "PUT", "HEAD"]
        await store.close()


HOUR_BEFORE = "Wed, 31 Dec 2025 23:00:00 GMT"


async def test_connections_are_bounded() -> None:
    """No more requests than connections are under way at once, and all are answered."""
    async with scripted(Reply(body="x")) as server:
        store = open_at(Provider.GOOGLE, server.endpoint, connections_max=3)
        server.gate.clear()
        async with asyncio.TaskGroup() as tasks:
            for _ in range(10):
                tasks.create_task(store.get(NAME))
            for _ in range(3):
                await server.arrivals.acquire()
            server.gate.set()
        assert server.at_once_max == 3
        assert len(server.asked) == 10
        await store.close()


def listed(*keys: str) -> Reply:
    """A page of Google's that shows these keys."""
    contents = "".join(
        f"<Contents><Key>{key}</Key><Size>1</Size><ETag>x</ETag>"
        "<LastModified>2026-01-01T00:00:00.123Z</LastModified></Contents>"
        for key in keys
    )
    return Reply(body=f"<ListBucketResult>{contents}</ListBucketResult>")


async def test_folders_of_consoles_are_left_out() -> None:
    """What stands for a folder is no object, nor is what a server shows from before the start."""
    page = listed("database/wal/", "database/wal/1", "database/wal/2", "database/wal/3")
    async with scripted(page) as server:
        store = open_at(Provider.GOOGLE, server.endpoint)
        assert await names_in(store, "wal/") == ["wal/1", "wal/2", "wal/3"]
        assert await names_in(store, "wal/", "wal/2") == ["wal/3"]
        assert (await anext(aiter(store.list("wal/")))).modified_ms % 1000 == 0
        await store.close()


async def test_names_that_obstore_does_not_take() -> None:
    """A list with a name that nobody can ask for is refused, and says why."""
    error = await failure(Provider.GOOGLE, OTHERS["list"], listed("database/wal//1"))
    assert isinstance(error, StoreRefused)
    assert "another program" in str(error)
