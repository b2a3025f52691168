"""The S3 store on a real server when things go wrong: lost replies, refusals, throttling."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from datetime import UTC, datetime, timedelta
from random import Random
from typing import Any
from uuid import uuid4

import botocore.auth
import pytest

from shalekv.errors import ObjectNotFound, StoreError, StoreRefused, StoreUnavailable
from shalekv.runtime import Runtime
from shalekv.settings import StoreSettings
from shalekv.store.api import Created, Exists, ObjectStore, Unknown
from shalekv.store.claim import Claimed, Taken, claim
from shalekv.store.retry import RetryingStore
from shalekv.store.s3.calls import Calls
from shalekv.store.s3.stale_uploads import abort_stale_uploads
from shalekv.store.s3.store import S3Store
from shalekv.store.url import BucketUrl, Provider
from tests.contract.opening import names_in
from tests.kit.processes.in_process import real_runtime
from tests.servers.fixtures import BUCKET
from tests.servers.proxy import ACCESS_DENIED, INTERNAL_ERROR, SLOW_DOWN, Proxy, proxy_before
from tests.servers.s3 import S3Server

MIB = 1024 * 1024
PARTS: dict[str, Any] = {"multipart_bytes": 5 * MIB, "multipart_part_bytes": 5 * MIB}
WAL = "wal/00000000000000000000.sst"
SST = "levels/1.sst"
CALLS = ("create", "get", "get_range", "head", "list", "delete", "now")


@pytest.fixture
def server(s3_server: S3Server, monkeypatch: pytest.MonkeyPatch) -> S3Server:
    """A real server, which checks signatures and keeps its conditions."""
    for name, value in s3_server.environment.items():
        monkeypatch.setenv(name, value)
    return s3_server


@pytest.fixture
def runtime() -> Iterator[Runtime]:
    """Real time, and a thread."""
    with real_runtime(threads=1) as runtime:
        yield runtime


@pytest.fixture
async def proxy(server: S3Server) -> AsyncIterator[Proxy]:
    """What stands before the server, and loses, delays or answers."""
    async with proxy_before(server) as started:
        yield started


@pytest.fixture
def place() -> BucketUrl:
    """A new database."""
    return BucketUrl(Provider.S3, BUCKET, str(uuid4()))


@pytest.fixture
async def store(runtime: Runtime, place: BucketUrl, proxy: Proxy) -> AsyncIterator[S3Store]:
    """The store under test, behind the proxy."""
    opened = S3Store(place, runtime, StoreSettings(endpoint_url=proxy.server.endpoint, **PARTS))
    yield opened
    await opened.close()


@pytest.fixture
async def rival(runtime: Runtime, place: BucketUrl, server: S3Server) -> AsyncIterator[S3Store]:
    """Another one, which talks to the server itself."""
    opened = S3Store(place, runtime, StoreSettings(endpoint_url=server.endpoint, **PARTS))
    yield opened
    await opened.close()


async def call(store: ObjectStore, operation: str) -> object:
    calls: dict[str, Callable[[], Awaitable[object]]] = {
        "create": lambda: store.create(WAL, b"x"),
        "get": lambda: store.get(WAL),
        "get_range": lambda: store.get_range(WAL, 0, 1),
        "head": lambda: store.head(WAL),
        "list": lambda: names_in(store, "wal/"),
        "delete": lambda: store.delete([WAL]),
        "now": store.now_ms,
    }
    return await calls[operation]()


async def test_a_lost_reply_is_no_rival(
    store: S3Store, rival: S3Store, runtime: Runtime, proxy: Proxy
) -> None:
    """A create that succeeded, and whose reply was lost, is unknown; a claim finds it ours."""
    proxy.lose_reply(times=1)
    outcome = await store.create("wal/0.sst", b"ours, id 1")
    assert isinstance(outcome, Unknown)
    assert await rival.create("wal/0.sst", b"theirs, id 2") == Exists()
    assert proxy.seen == [f"PUT /{BUCKET}/{store.url.split('/', 3)[3]}/wal/0.sst"]

    proxy.lose_reply(times=1)
    assert await claim(store, WAL, b"ours, id 3", runtime=runtime) == Claimed()
    assert (await rival.get(WAL)).data == b"ours, id 3"


async def test_a_rival_is_no_lost_reply(
    store: S3Store, rival: S3Store, runtime: Runtime, proxy: Proxy
) -> None:
    """When a rival was first, a claim says so, and is certain unless a reply was lost."""
    assert await rival.create(WAL, b"theirs, id 2") == Created()
    assert await claim(store, WAL, b"ours, id 1", runtime=runtime) == Taken(b"theirs, id 2")
    rule = proxy.answer(INTERNAL_ERROR, when="^PUT ", times=1)
    taken = await claim(store, WAL, b"ours, id 1", runtime=runtime)
    assert taken == Taken(b"theirs, id 2", is_certain=False)
    assert rule.spent == 1


async def test_a_lost_reply_on_a_kept_connection(store: S3Store, proxy: Proxy) -> None:
    """Nothing below sends a PUT again on its own, though the connection had been used before."""
    await store.get_range(SST, 0, 1) if await store.create(SST, b"x") != Created() else None
    before = (len(proxy.seen), store.sent.total)
    proxy.lose_reply(times=1)
    assert isinstance(await store.create(WAL, b"x"), Unknown)
    assert (len(proxy.seen), store.sent.total) == (before[0] + 1, before[1] + 1)


async def test_a_500_in_the_middle_of_an_upload(
    store: S3Store, rival: S3Store, runtime: Runtime, proxy: Proxy, server: S3Server
) -> None:
    """A part that fails leaves no object and no parts; a claim goes on until it is whole."""
    data = Random(1).randbytes(16 * MIB)
    proxy.answer(INTERNAL_ERROR, when=r"partNumber=3", times=1)
    with pytest.raises(StoreUnavailable, match="500 InternalError"):
        await store.create(SST, data)
    with pytest.raises(ObjectNotFound):
        await rival.get(SST)
    uploads = f"/{BUCKET}?prefix={store.url.rpartition('/')[2]}&uploads="
    assert b"<UploadId>" not in server.request("GET", uploads)

    proxy.answer(INTERNAL_ERROR, when=r"partNumber=2", times=1)
    assert await claim(store, SST, data, runtime=runtime) == Claimed()
    assert (await rival.get(SST)).data == data


@pytest.mark.parametrize("answered", [True, False])
async def test_a_lost_reply_to_completing(
    store: S3Store, rival: S3Store, runtime: Runtime, proxy: Proxy, *, answered: bool
) -> None:
    """An upload whose completion was not answered, done or not, is unknown, and found out."""
    data = Random(2).randbytes(11 * MIB)
    if answered:
        proxy.answer(INTERNAL_ERROR, when=r"^POST .*uploadId=", times=1)
    else:
        proxy.lose_reply(r"^POST .*uploadId=", times=1)
    assert await claim(store, SST, data, runtime=runtime) == Claimed()
    assert (await rival.get(SST)).data == data


async def test_races_to_complete(store: S3Store, rival: S3Store) -> None:
    """Of uploads in parts that race, also with one that is whole, one wins, and is the object."""
    for number in range(3):
        name = f"levels/{number}.sst"
        bodies = [bytes([racer]) * (6 * MIB) for racer in range(3)] + [b"small"]
        outcomes = await asyncio.gather(
            *(
                at.create(name, body)
                for at, body in zip((store, rival, store, rival), bodies, strict=True)
            )
        )
        winners = [i for i, outcome in enumerate(outcomes) if outcome == Created()]
        assert len(winners) == 1, outcomes
        assert outcomes.count(Exists()) == 3, outcomes
        assert (await rival.get(name)).data == bodies[winners[0]]


async def test_throttling(store: S3Store, runtime: Runtime, proxy: Proxy) -> None:
    """503 SlowDown is repeated: reads by the store for reads, a create by the claim."""
    reads = RetryingStore(store, runtime)
    proxy.answer(SLOW_DOWN, times=2)
    assert await claim(store, WAL, b"x", runtime=runtime) == Claimed()
    proxy.answer(SLOW_DOWN, times=2)
    assert (await reads.get(WAL)).data == b"x"
    proxy.answer(SLOW_DOWN)
    for operation in CALLS[1:]:
        with pytest.raises(StoreUnavailable, match="503") as raised:
            await call(store, operation)
        assert_named(raised.value, store, operation)
    assert store.sent.total == len(proxy.seen)


async def test_no_permission(store: S3Store, proxy: Proxy) -> None:
    """Who may not is told what he may not, and which permission it takes."""
    proxy.answer(ACCESS_DENIED)
    for operation in CALLS:
        doing = "ask for the time" if operation == "now" else operation
        with pytest.raises(StoreRefused, match=f"may not {doing} in.*they need s3:") as raised:
            await call(store, operation)
        assert_named(raised.value, store, operation)
    assert store.sent.total == len(proxy.seen)


async def refusal(
    runtime: Runtime, operation: str, *, bucket: str = BUCKET, **settings: Any
) -> StoreError:
    """The error of a call by a store that is set up in a wrong way."""
    place = BucketUrl(Provider.S3, bucket, "wrong")
    store = S3Store(place, runtime, StoreSettings(**settings))
    try:
        with pytest.raises(StoreRefused) as raised:
            await call(store, operation)
    finally:
        await store.close()
    assert_named(raised.value, store, operation)
    return raised.value


def assert_named(error: StoreError, store: ObjectStore, operation: str) -> None:
    """The error says which store, and what was done with what."""
    assert (error.store, error.operation) == (store.url, operation)
    assert error.name
    assert str(error).startswith(f"{store.url}: {operation} ")


async def test_wrong_settings(
    runtime: Runtime, server: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A real server's refusal of a bucket, an unsigned request, a key, a region or a clock is told
    with what to do, and without secrets.
    """
    here = {"endpoint_url": server.endpoint}
    later = datetime.now(UTC) + timedelta(hours=2)
    for operation in ("create", "head"):
        error = await refusal(runtime, operation, bucket="missing", **here)
        assert f"there is no bucket missing at {server.endpoint}" in error.problem
        error = await refusal(runtime, operation, anonymous=True, **here)
        assert "may not" in error.problem
        error = await refusal(runtime, operation, region="eu-north-1", **here)
        assert "another region than eu-north-1" in error.problem
        for name, told in (("ACCESS_KEY_ID", "not know the access key"), ("SECRET", "secret key")):
            with monkeypatch.context() as wrong:
                variable = "AWS_SECRET_ACCESS_KEY" if name == "SECRET" else f"AWS_{name}"
                wrong.setenv(variable, "SENTINELKEY")
                error = await refusal(runtime, operation, **here)
            assert told in error.problem
            assert "SENTINEL" not in str(error)
        with monkeypatch.context() as wrong:
            wrong.setattr(botocore.auth, "get_current_datetime", lambda *_, **__: later)
            error = await refusal(runtime, operation, **here)
        assert "clock of this machine" in error.problem


async def test_an_abandoned_upload_is_aborted(
    runtime: Runtime, server: S3Server, place: BucketUrl
) -> None:
    """An upload in parts that nobody completes is aborted when it is old enough, not before."""
    for key in (
        f"{place.folder}/levels/1.sst",
        f"{place.folder}/levels/2.sst",
        f"{place.folder}2/1",
    ):
        server.request("POST", f"/{BUCKET}/{key}?uploads=")
    store = S3Store(place, runtime, StoreSettings(endpoint_url=server.endpoint))
    calls: Calls = store._calls  # noqa: SLF001 - its own rule is an hour at least
    now_ms = int(time.time() * 1_000)
    aborted = [
        await abort_stale_uploads(
            calls, BUCKET, f"{place.folder}/", before_ms=now_ms + shift_s * 1_000
        )
        for shift_s in (-60, 60, 60)
    ]
    await store.close()
    assert aborted == [0, 2, 0]
    uploads = f"/{BUCKET}?prefix={place.folder}&uploads="
    assert server.request("GET", uploads).count(b"<UploadId>") == 1
