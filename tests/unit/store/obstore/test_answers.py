"""The meaning of each answer of Google and Azure for a create and for a read, which are
sent once.
"""

from __future__ import annotations

import asyncio
import socket
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest

from shalekv.errors import ObjectNotFound, StoreError, StoreRefused, StoreUnavailable
from shalekv.settings import StoreSettings
from shalekv.store.api import Created, CreateOutcome, Exists, ObjectStore, RequestKind, Unknown
from shalekv.store.obstore.opening import open_bucket
from shalekv.store.url import BucketUrl, Provider
from tests.contract.opening import names_in
from tests.kit.inline_runtime import inline_runtime
from tests.kit.s3.scripted_server import Answer, Broken, Reply, Request, refused, scripted
from tests.unit.store.obstore.conftest import AZURE_KEY

pytestmark = pytest.mark.usefixtures("azure_account")

NAME = "wal/1.sst"
HEADERS = {
    "ETag": '"1"',
    "Last-Modified": "Thu, 01 Jan 2026 00:00:00 GMT",
    "Content-Type": "text/plain",
}
BOTH = pytest.mark.parametrize("provider", [Provider.GOOGLE, Provider.AZURE])
READS: dict[str, Callable[[ObjectStore], Awaitable[object]]] = {
    "get": lambda store: store.get(NAME),
    "get_range": lambda store: store.get_range(NAME, 0, 10),
    "head": lambda store: store.head(NAME),
}
CALLS = READS | {
    "list": lambda store: names_in(store, "wal/"),
    "delete": lambda store: store.delete([NAME]),
    "now": lambda store: store.now_ms(),
}


def open_at(provider: Provider, endpoint: str, **settings: int) -> ObjectStore:
    """The store ``database`` in ``bucket``; without credentials on Google."""
    chosen = StoreSettings.model_validate(
        {"endpoint_url": endpoint, "anonymous": provider is Provider.GOOGLE, **settings}
    )
    return open_bucket(BucketUrl(provider, "bucket", "database"), inline_runtime(), chosen)


@asynccontextmanager
async def opened(
    provider: Provider, answer: Answer, **settings: int
) -> AsyncIterator[tuple[ObjectStore, list[Request]]]:
    """A store on a server with the given answers, and the requests that the server got."""
    async with scripted(answer) as server:
        store = open_at(provider, server.endpoint, **settings)
        try:
            yield store, server.requests
        finally:
            await store.close()


def said(status: int = 200, body: str = "", **headers: str) -> Reply:
    """A reply with the headers that every object has."""
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return Reply(status, body.encode(), HEADERS | named)


async def dropped(_: Request) -> Reply:
    raise Broken


async def silence(_: Request) -> Reply:
    await asyncio.Event().wait()
    raise AssertionError("nobody sets it")


async def create(provider: Provider, answer: Answer, **settings: int) -> CreateOutcome:
    """The outcome of a create with this answer; it is sent once."""
    async with opened(provider, answer, **settings) as (store, requests):
        try:
            return await store.create(NAME, b"data")
        finally:
            assert len(requests) == store.sent.by_kind[RequestKind.WRITE] == 1


async def failure(provider: Provider, call: str, answer: Answer, **settings: int) -> StoreError:
    """The error of a call with this answer; it is sent once."""
    async with opened(provider, answer, **settings) as (store, requests):
        with pytest.raises(StoreError) as raised:
            await CALLS[call](store)
        assert len(requests) == 1
    return raised.value


@pytest.mark.parametrize(
    ("provider", "reply", "expected"),
    [
        (Provider.GOOGLE, said(201, x_goog_generation="1"), Created()),
        (Provider.AZURE, said(201, ETag='"0x8DE"'), Created()),
        (Provider.GOOGLE, refused(412, "PreconditionFailed"), Exists()),
        (Provider.AZURE, refused(409, "BlobAlreadyExists"), Exists()),
        (Provider.AZURE, refused(412, "ConditionNotMet"), Exists()),
    ],
)
async def test_plain_outcomes(provider: Provider, reply: Reply, expected: CreateOutcome) -> None:
    """The answer of each provider for a free name is `Created`, for a taken one `Exists`."""
    assert await create(provider, lambda _: reply) == expected


LIE = "\n\nDebug source:\nX {\n    status: 412,\n    kind: Connect,\n    source: TokenRequest {"


@BOTH
@pytest.mark.parametrize(
    ("reply", "message"),
    [
        (said(200), ""),  # a success that a proxy may have sent
        *((refused(code, "Whatever"), f"{code} Wh") for code in (408, 409, 500, 502, 503, 504)),
        # Text in the store's answer is not mistaken for a field of obstore's error.
        (refused(500, "Whatever", Detail=LIE), "500"),
        (None, ""),
    ],
)
async def test_a_doubtful_answer_is_unknown(
    provider: Provider, reply: Reply | None, message: str
) -> None:
    """An answer after which the object may exist is `Unknown`, and so is a lost one."""
    outcome = await create(provider, dropped if reply is None else lambda _: reply)
    assert isinstance(outcome, Unknown)
    assert message in outcome.cause


@BOTH
async def test_nothing_is_created_elsewhere(provider: Provider) -> None:
    """An upload that is answered with a redirection did not create the object at the other
    address.
    """
    replies = [said(303, Location="/elsewhere"), said(200)]
    async with opened(provider, lambda _: replies.pop(0)) as (store, _):
        assert isinstance(await store.create(NAME, b"data"), Unknown)


@BOTH
@pytest.mark.parametrize(
    ("status", "message"),
    [
        *((status, f"the answer was {status} Sorry") for status in (400, 401, 403, 404, 405)),
        *((status, f"{status}: it sends on to another address") for status in (301, 302, 307, 308)),
    ],
)
async def test_a_refusal_is_certain(provider: Provider, status: int, message: str) -> None:
    """After a refusal no object exists and a retry does not help; no request is sent to another
    address.
    """
    reply = refused(status, "Sorry") if status >= 400 else said(status, Location="/elsewhere")
    with pytest.raises(StoreRefused, match=rf"create wal/1.sst: .*{message}"):
        await create(provider, lambda _: reply)


@BOTH
async def test_what_was_not_applied(provider: Provider) -> None:
    """A request that was refused for its rate, or had no connection, may be retried."""
    with pytest.raises(StoreUnavailable, match="429"):
        await create(provider, lambda _: refused(429, "SlowDown"))
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))  # and does not listen
        store = open_at(provider, f"http://127.0.0.1:{silent.getsockname()[1]}")
        with pytest.raises(StoreUnavailable, match="no connection could be made"):
            await store.create(NAME, b"data")
    await store.close()


@BOTH
@pytest.mark.parametrize(
    ("reply", "kind"),
    [
        (refused(403, "AccessDenied"), StoreRefused),
        (refused(401, "Expired"), StoreRefused),
        (refused(429, "SlowDown"), StoreUnavailable),
        (refused(500, "InternalError"), StoreUnavailable),
        (refused(503, "ServerBusy"), StoreUnavailable),
        (None, StoreUnavailable),
    ],
)
async def test_failures(provider: Provider, reply: Reply | None, kind: type[StoreError]) -> None:
    """An error names the store, the operation and the problem, and whether to repeat."""
    for call in CALLS:
        error = await failure(provider, call, dropped if reply is None else lambda _: reply)
        assert type(error) is kind
        assert str(error).startswith(f"{provider}://bucket/database: {call} ")


@BOTH
async def test_silence(provider: Provider) -> None:
    """A request without an answer times out; many of them wait in parallel."""
    outcome, *errors = await asyncio.gather(
        create(provider, silence, request_timeout_ms=2_500),
        *(failure(provider, call, silence, request_timeout_ms=2_500) for call in CALLS),
    )
    assert {type(error) for error in errors} == {StoreUnavailable}
    assert outcome == Unknown("there was no answer in time")


@pytest.mark.parametrize(
    ("provider", "code"),
    [(Provider.GOOGLE, "NoSuchBucket"), (Provider.AZURE, "ContainerNotFound")],
)
async def test_missing_objects_and_missing_buckets(provider: Provider, code: str) -> None:
    """A missing object is reported as not found; a missing bucket is another error."""
    for call in READS:
        error = await failure(provider, call, lambda _: refused(404, "NoSuchKey"))
        assert isinstance(error, ObjectNotFound)
    for call in {*CALLS} - {"head"}:  # its replies have no code
        error = await failure(provider, call, lambda _: refused(404, code))
        assert isinstance(error, StoreRefused)
        assert code in str(error)


def batch(*statuses: int) -> Reply:
    parts = "".join(
        f"--part\r\nContent-Type: application/http\r\nContent-ID: {number}\r\n\r\n"
        f"HTTP/1.1 {status} Told\r\n\r\n"
        for number, status in enumerate(statuses)
    )
    return said(202, f"{parts}--part--\r\n", Content_Type="multipart/mixed; boundary=part")


async def test_a_batch_with_a_missing_name_is_sent_one_by_one() -> None:
    """If one name of a batch is missing, the others are certainly deleted, or it is an error."""
    replies = [batch(404, 403), batch(404), batch(202), batch(404, 403), batch(404), batch(403)]
    async with opened(Provider.AZURE, lambda _: replies.pop(0)) as (store, requests):
        await store.delete(["wal/1", "wal/2"])
        assert len(requests) == store.sent.by_kind[RequestKind.DELETE] == 3
        with pytest.raises(StoreRefused, match="delete wal/2: the answer was 403"):
            await store.delete(["wal/1", "wal/2"])


async def test_secrets_are_not_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """No error, and no output of it, shows credentials or signatures."""
    monkeypatch.delenv("AZURE_STORAGE_ACCOUNT_KEY")
    monkeypatch.setenv("AZURE_STORAGE_SAS_TOKEN", "?sv=2021-12-02&sig=S1GNATURE")
    detail = {"AuthenticationErrorDetail": "signed S1GNATURE with TH1S"}
    for call in CALLS:
        reply = refused(403, "AuthenticationFailed", **detail)
        error = await failure(Provider.AZURE, call, lambda _, reply=reply: reply)  # type: ignore[misc]
        message = "".join(traceback.format_exception(error))
        for secret in ("S1GNATURE", "TH1S", AZURE_KEY):
            assert secret not in message


async def test_the_clock_never_goes_back() -> None:
    """When the store's clock is set back, the clock that the process reads stays where it was."""
    earlier = said(Last_Modified="Wed, 31 Dec 2025 23:00:00 GMT")
    replies = [said(), said(), said(), earlier]
    async with opened(Provider.GOOGLE, lambda _: replies.pop(0)) as (store, requests):
        assert await store.now_ms() == await store.now_ms()
        assert [request.method for request in requests] == ["PUT", "HEAD", "PUT", "HEAD"]


async def test_connections_are_bounded() -> None:
    """At most as many requests as connections are in flight at once, and all are answered."""
    at_once, most, gate = 0, 0, asyncio.Event()

    async def answer(_: Request) -> Reply:
        nonlocal at_once, most
        at_once += 1
        most = max(most, at_once)
        if at_once == 3:
            gate.set()
        await gate.wait()
        at_once -= 1
        return said(body="x")

    async with opened(Provider.GOOGLE, answer, connections_max=3) as (store, requests):
        await asyncio.gather(*(store.get(NAME) for _ in range(10)))
        assert most == 3
        assert len(requests) == 10


def listed(*keys: str) -> Reply:
    contents = "".join(
        f"<Contents><Key>{key}</Key><Size>1</Size><ETag>x</ETag>"
        "<LastModified>2026-01-01T00:00:00.123Z</LastModified></Contents>"
        for key in keys
    )
    return said(body=f"<ListBucketResult>{contents}</ListBucketResult>")


async def test_what_is_not_listed() -> None:
    """A placeholder of a folder is not listed, nor are names before the start of the list that a
    server shows. A name that obstore cannot request makes the list an error.
    """
    page = listed("database/wal/", "database/wal/1", "database/wal/2", "database/wal/3")
    async with opened(Provider.GOOGLE, lambda _: page) as (store, _):
        assert await names_in(store, "wal/") == ["wal/1", "wal/2", "wal/3"]
        assert await names_in(store, "wal/", "wal/2") == ["wal/3"]
        assert (await anext(aiter(store.list("wal/")))).modified_ms % 1000 == 0
    error = await failure(Provider.GOOGLE, "list", lambda _: listed("database/wal//1"))
    assert isinstance(error, StoreRefused)
    assert "another program" in str(error)
