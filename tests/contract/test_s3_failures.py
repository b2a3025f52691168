"""The S3 store on real servers: uploads in parts that fail or race, and wrong settings."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from datetime import UTC, datetime, timedelta
from random import Random
from typing import Any
from uuid import uuid4

import botocore.auth
import pytest

from shalekv.errors import ObjectNotFound, StoreError, StoreRefused, StoreUnavailable
from shalekv.runtime import Runtime
from shalekv.settings import StoreSettings
from shalekv.store.api import Created, Exists
from shalekv.store.cas import Claimed
from shalekv.store.s3.requests import Calls
from shalekv.store.s3.store import S3Store
from shalekv.store.s3.uploads import abort_stale_uploads
from shalekv.store.url import BucketUrl, Provider
from tests.kit.constants import constants
from tests.kit.processes.in_process import real_runtime
from tests.kit.store import claim
from tests.servers.fixtures import BUCKET
from tests.servers.proxy import INTERNAL_ERROR, Proxy, proxy_before
from tests.servers.s3 import S3Server

MIB = 1024 * 1024
PARTS: dict[str, Any] = {"multipart_bytes": 5 * MIB}
SMALL_PARTS = {"shalekv.store.s3.store:PART_BYTES": 5 * MIB}
SST = "levels/1.sst"


@pytest.fixture(params=["s3_server", pytest.param("minio_server", marks=pytest.mark.soak)])
def server(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> S3Server:
    """A real server, which checks signatures and keeps its conditions."""
    found: S3Server = request.getfixturevalue(request.param)
    for name, value in found.environment.items():
        monkeypatch.setenv(name, value)
    return found


@pytest.fixture
def runtime() -> Iterator[Runtime]:
    """Real time, and a thread."""
    with real_runtime(threads=1) as runtime:
        yield runtime


@pytest.fixture
async def proxy(server: S3Server) -> AsyncIterator[Proxy]:
    """A proxy before the server, which loses replies or answers itself."""
    async with proxy_before(server) as started:
        yield started


@pytest.fixture
def place() -> BucketUrl:
    """A new database."""
    return BucketUrl(Provider.S3, BUCKET, str(uuid4()))


@pytest.fixture
async def store(runtime: Runtime, place: BucketUrl, proxy: Proxy) -> AsyncIterator[S3Store]:
    """The store under test, behind the proxy."""
    with constants(SMALL_PARTS):
        opened = S3Store(place, runtime, StoreSettings(endpoint_url=proxy.server.endpoint, **PARTS))
    yield opened
    await opened.close()


@pytest.fixture
async def rival(runtime: Runtime, place: BucketUrl, server: S3Server) -> AsyncIterator[S3Store]:
    """Another one, which talks to the server itself."""
    opened = S3Store(place, runtime, StoreSettings(endpoint_url=server.endpoint, **PARTS))
    yield opened
    await opened.close()


async def test_a_part_that_fails(
    store: S3Store, rival: S3Store, proxy: Proxy, server: S3Server
) -> None:
    """A part that fails leaves no object and no parts."""
    proxy.answer(INTERNAL_ERROR, when=r"partNumber=3", times=1)
    with pytest.raises(StoreUnavailable, match="500 InternalError"):
        await store.create(SST, Random(1).randbytes(16 * MIB))
    with pytest.raises(ObjectNotFound):
        await rival.get(SST)
    uploads = f"/{BUCKET}?prefix={store.url.rpartition('/')[2]}&uploads="
    assert b"<UploadId>" not in server.request("GET", uploads)


@pytest.mark.parametrize("failing", ["a part", "completing", "the reply to completing"])
async def test_a_claim_goes_on_until_it_is_whole(
    store: S3Store, rival: S3Store, runtime: Runtime, proxy: Proxy, failing: str
) -> None:
    """An upload that failed is repeated, and one that may be complete is found out."""
    data = Random(2).randbytes(11 * MIB)
    if failing == "the reply to completing":
        proxy.lose_reply(r"^POST .*uploadId=", times=1)
    else:
        when = r"partNumber=2" if failing == "a part" else r"^POST .*uploadId="
        proxy.answer(INTERNAL_ERROR, when=when, times=1)
    assert await claim(store, SST, data, runtime=runtime) == Claimed()
    assert (await rival.get(SST)).data == data


async def test_races_to_complete(store: S3Store, rival: S3Store) -> None:
    """One of several racing uploads in parts wins, also against one that is whole, and is the
    object.
    """
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


async def refusal(
    runtime: Runtime, operation: str, *, bucket: str = BUCKET, **settings: Any
) -> StoreError:
    """The error of a call by a store that is set up in a wrong way."""
    store = S3Store(BucketUrl(Provider.S3, bucket, "wrong"), runtime, StoreSettings(**settings))
    try:
        with pytest.raises(StoreRefused) as raised:
            await (store.create(SST, b"x") if operation == "create" else store.head(SST))
    finally:
        await store.close()
    return raised.value


async def test_wrong_settings(
    runtime: Runtime, server: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error for a refused bucket, unsigned request, key, region or clock says what to do, and
    has no secrets.
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
        for name, reported in (
            ("ACCESS_KEY_ID", "not know the access key"),
            ("SECRET", "secret key"),
        ):
            with monkeypatch.context() as wrong:
                variable = "AWS_SECRET_ACCESS_KEY" if name == "SECRET" else f"AWS_{name}"
                wrong.setenv(variable, "SENTINELKEY")
                error = await refusal(runtime, operation, **here)
            assert reported in error.problem
            assert "SENTINEL" not in str(error)
        with monkeypatch.context() as wrong:
            wrong.setattr(botocore.auth, "get_current_datetime", lambda *_, **__: later)
            error = await refusal(runtime, operation, **here)
        assert "clock of this machine" in error.problem


@pytest.mark.parametrize("server", ["s3_server"], indirect=True)
async def test_an_abandoned_upload_is_aborted(
    runtime: Runtime, server: S3Server, place: BucketUrl
) -> None:
    """An incomplete upload in parts is aborted when it is old enough, not before.

    MinIO lists uploads of one object only, never of a folder, and deletes old ones itself.
    """
    for key in ("/levels/1.sst", "/levels/2.sst", "2/1"):
        server.request("POST", f"/{BUCKET}/{place.folder}{key}?uploads=")
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
