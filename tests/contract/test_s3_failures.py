"""The S3 store on a real server when things go wrong: lost replies, refusals, throttling."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from datetime import UTC, datetime, timedelta
from random import Random, SystemRandom
from typing import Any
from uuid import uuid4

import botocore.auth
import pytest

from shalekv.clock import LoopClock
from shalekv.errors import ObjectNotFound, StoreError, StoreRefused, StoreUnavailable
from shalekv.runtime import Runtime, ThreadWorkers
from shalekv.settings import StoreSettings
from shalekv.store.api import Created, Exists, ObjectStore, Unknown
from shalekv.store.claim import Claimed, Taken, claim
from shalekv.store.retry import RetryingStore
from shalekv.store.s3.store import S3Store
from shalekv.store.url import BucketUrl, Provider
from tests.contract.opening import names_in
from tests.servers.proxy import ACCESS_DENIED, INTERNAL_ERROR, SLOW_DOWN, Proxy, proxy_before
from tests.servers.s3 import S3Server
from tests.servers.versitygw import versitygw

BUCKET = "failures"
MIB = 1024 * 1024
PARTS: dict[str, Any] = {"multipart_bytes": 5 * MIB, "multipart_part_bytes": 5 * MIB}
WAL = "wal/00000000000000000000.sst"
SST = "levels/1.sst"
CALLS = ("create", "get", "get_range", "head", "list", "delete", "now")


@pytest.fixture(scope="module")
def server() -> Iterator[S3Server]:
    """A real server, which checks signatures and keeps its conditions."""
    with versitygw() as started:
        started.create_bucket(BUCKET)
        yield started


@pytest.fixture
def runtime(server: S3Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[Runtime]:
    """A real one; the credentials of the server are in the environment."""
    for name, value in server.environment.items():
        monkeypatch.setenv(name, value)
    workers = ThreadWorkers(1)
    yield Runtime(LoopClock(), SystemRandom(), workers)
    workers.close()


@pytest.fixture
async def proxy(server: S3Server) -> AsyncIterator[Proxy]:
    """What stands before the server, and loses, delays or answers."""
    async with proxy_before(server) as started:
        yield started


@pytest.fixture
def place() -> BucketUrl:
    """A new database."""
    return BucketUrl(Provider.S3, BUCKET, f"new/{uuid4()}")


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
    """Do it."""
    match operation:
        case "create":
            return await store.create(WAL, b"x")
        case "get":
            return await store.get(WAL)
        case "get_range":
            return await store.get_range(WAL, 0, 1)
        case "head":
            return await store.head(WAL)
        case "list":
            return await names_in(store, "wal/")
        case "delete":
            await store.delete([WAL])
            return None
        case _:
            return await store.now_ms()


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
    assert b"<UploadId>" not in server.request("GET", f"/{BUCKET}?uploads=")

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
    for number in range(6):
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


@pytest.mark.parametrize("operation", CALLS)
class TestRefusals:
    async def test_no_bucket(self, runtime: Runtime, server: S3Server, operation: str) -> None:
        """A bucket that does not exist is told by its name, whatever is asked."""
        error = await refusal(runtime, operation, bucket="missing", endpoint_url=server.endpoint)
        assert f"there is no bucket missing at {server.endpoint}" in error.problem

    async def test_no_credentials(self, runtime: Runtime, server: S3Server, operation: str) -> None:
        """A store that wants to know who asks refuses strangers."""
        error = await refusal(runtime, operation, endpoint_url=server.endpoint, anonymous=True)
        assert "may not" in error.problem

    async def test_an_unknown_key(
        self,
        runtime: Runtime,
        server: S3Server,
        operation: str,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        """An access key that the store does not know is told so, and not shown."""
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "SENTINELACCESSKEY")
        error = await refusal(runtime, operation, endpoint_url=server.endpoint)
        assert "does not know the access key" in error.problem
        assert "SENTINEL" not in str(error)

    async def test_a_wrong_secret(
        self,
        runtime: Runtime,
        server: S3Server,
        operation: str,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        """So is a secret key that is wrong."""
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "SENTINELSECRETKEY")
        error = await refusal(runtime, operation, endpoint_url=server.endpoint)
        assert "secret key" in error.problem
        assert "SENTINEL" not in str(error)

    async def test_a_wrong_region(self, runtime: Runtime, server: S3Server, operation: str) -> None:
        """A region that is not the bucket's is told, and not looked for."""
        error = await refusal(runtime, operation, endpoint_url=server.endpoint, region="eu-north-1")
        assert "another region than eu-north-1" in error.problem

    async def test_a_wrong_clock(
        self,
        runtime: Runtime,
        server: S3Server,
        operation: str,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        """Requests that are signed for another time are refused for the clock."""
        later = datetime.now(UTC) + timedelta(hours=2)
        monkeypatch.setattr(botocore.auth, "get_current_datetime", lambda *_, **__: later)
        error = await refusal(runtime, operation, endpoint_url=server.endpoint)
        assert "clock of this machine" in error.problem
