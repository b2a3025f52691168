"""Cost of an S3 store, and of what is built on it, compared with a bare loop of aiobotocore.

All on versitygw, which runs on the same processors. Nothing is asserted about time.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import uvloop
from aiobotocore.config import AioConfig
from aiobotocore.session import get_session

from shalekv.runtime import Runtime
from shalekv.settings import KIB, MIB, CasChoice, StoreSettings
from shalekv.store.api import Created, ObjectStore
from shalekv.store.opening import open_store
from shalekv.store.s3.store import PART_BYTES, PART_UPLOADS_MAX, S3Store
from shalekv.store.two_phase.store import TwoPhaseStore
from shalekv.store.url import BucketUrl, Provider
from tests.bench.interleaved import Costs, Way, at_once, load, measured
from tests.bench.sizes import sized
from tests.kit.memory_records import MemoryRecords
from tests.kit.processes.in_process import real_runtime
from tests.servers.fixtures import BUCKET
from tests.servers.s3 import S3Server

pytestmark = pytest.mark.timeout(900)

AGAIN = "bare again"  # the ratio of two equal runs is the noise of other ratios
FOLDER = "bench-stores"
MULTIPART_BYTES = sized(32, 8) * MIB
CONNECTIONS = 32
CONCURRENCY = sized([1, 8], [2])
# Objects that one run takes when it is eight at a time (else half of them), and rounds.
COUNTS = sized({4 * KIB: 40, MIB: 16, 64 * MIB: 8}, {4 * KIB: 2, 12 * MIB: 2})
ROUNDS = sized({4 * KIB: 21, MIB: 21, 64 * MIB: 5}, {4 * KIB: 2, 12 * MIB: 2})


@pytest.fixture(autouse=True)
def _credentials(s3_server: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in s3_server.environment.items():
        monkeypatch.setenv(name, value)


def settings_for(server: S3Server) -> StoreSettings:
    """The default ones, but for a size above which 64 MiB are uploaded in parts."""
    return StoreSettings(
        endpoint_url=server.endpoint,
        multipart_bytes=MULTIPART_BYTES,
        connections_max=CONNECTIONS,
    )


@asynccontextmanager
async def opened(server: S3Server) -> AsyncIterator[tuple[S3Store, Runtime]]:
    with real_runtime(threads=2) as runtime:
        store = S3Store(BucketUrl(Provider.S3, BUCKET, FOLDER), runtime, settings_for(server))
        yield store, runtime
        await store.close()


@dataclass(frozen=True, slots=True)
class Load:
    """`count` objects of `size` bytes, `parallel` at a time."""

    size: int
    count: int
    concurrency: int

    def way(self, work: Callable[[int], Awaitable[object]]) -> Way:
        return partial(at_once, self.count, self.concurrency, work)

    def tell(self, what: str, costs: Costs) -> None:
        size = f"{self.size // MIB} MiB" if self.size >= MIB else f"{self.size // KIB} KiB"
        each_ms = costs.wall_s("store") / self.count * 1000
        cpu_ms, bare_cpu_ms = (costs.cpu_s(way) / self.count * 1000 for way in ("store", "bare"))
        print(
            f"{what:9} {size:6} x{self.concurrency} {each_ms:8.2f} ms each"
            f"   speed {costs.speed('store', 'bare')} of bare"
            f", bare {costs.speed(AGAIN, 'bare')} of itself"
            f"   CPU {cpu_ms:7.2f} ms, bare {bare_cpu_ms:7.2f}, {costs.cpu('store', 'bare')} x"
        )


@pytest.mark.parametrize("concurrency", CONCURRENCY)
@pytest.mark.parametrize("size", COUNTS, ids=lambda size: f"{size // KIB} KiB")
def test_s3_beside_bare(s3_server: S3Server, size: int, concurrency: int) -> None:
    """Prints the speed of creates, gets and gets of a range in units of a bare loop's."""

    async def campaign() -> None:
        at = Load(size, COUNTS[size] if concurrency > 1 else COUNTS[size] // 2, concurrency)
        print(f"\n{load()}")
        async with opened(s3_server) as (store, _), bare_s3(s3_server, BUCKET, CONNECTIONS) as bare:
            await compare_creates(at, store, bare)
            await compare_gets(at, store, bare)

    uvloop.run(campaign())


async def compare_creates(at: Load, store: ObjectStore, bare: BareS3) -> None:
    data, numbers, made = os.urandom(at.size), itertools.count(), list[str]()
    is_large = at.size > MULTIPART_BYTES

    def new_name() -> str:
        made.append(f"levels/{at.concurrency}-{next(numbers)}")
        return made[-1]

    async def create(_: int) -> None:
        assert await store.create(new_name(), data) == Created()

    async def create_bare(_: int) -> None:
        key = f"{FOLDER}/{new_name()}"
        if is_large:
            await bare.create_in_parts(key, data, PART_BYTES, PART_UPLOADS_MAX)
        else:
            await bare.create(key, data)

    async def delete() -> None:
        await store.delete(made)
        made.clear()

    ways = {"store": at.way(create), "bare": at.way(create_bare), AGAIN: at.way(create_bare)}
    at.tell("create", await measured(ways, ROUNDS[at.size], delete))


async def compare_gets(at: Load, store: ObjectStore, bare: BareS3) -> None:
    name, first, length = "levels/read", at.size // 4, at.size // 2
    await store.create(name, os.urandom(at.size))
    key, wanted = f"{FOLDER}/{name}", f"bytes={first}-{first + length - 1}"
    get_bare = at.way(lambda _: bare.get(key))
    whole = {"store": at.way(lambda _: store.get(name)), "bare": get_bare, AGAIN: get_bare}
    at.tell("get", await measured(whole, ROUNDS[at.size]))
    get_half = at.way(lambda _: store.get_range(name, first, length))
    get_bare = at.way(lambda _: bare.get(key, wanted))
    half = {"store": get_half, "bare": get_bare, AGAIN: get_bare}
    at.tell("get_range", await measured(half, ROUNDS[at.size]))
    await store.delete([name])


@pytest.mark.parametrize("concurrency", CONCURRENCY)
def test_two_phase_beside_native(s3_server: S3Server, tmp_path: Path, concurrency: int) -> None:
    """Prints what a create of 4 KiB takes in two phases, in units of a conditional one."""

    async def campaign() -> None:
        at = Load(4 * KIB, 5 * concurrency, concurrency)
        data, numbers = os.urandom(at.size), itertools.count()

        def creating(store: ObjectStore) -> Way:
            async def create(_: int) -> None:
                assert await store.create(f"wal/{concurrency}-{next(numbers)}", data) == Created()

            return at.way(create)

        async with opened(s3_server) as (native, runtime), opened(s3_server) as (plain, _):
            in_memory = TwoPhaseStore(plain, MemoryRecords(), runtime)
            choice = {"cas": CasChoice.TWO_PHASE, "records_url": f"sqlite://{tmp_path}/records"}
            settings = settings_for(s3_server).model_copy(update=choice)
            in_sqlite = open_store(native.url, runtime, settings)
            stores = {"native": native, "memory": in_memory, "sqlite": in_sqlite}
            ways = {name: creating(store) for name, store in stores.items()}
            costs = await measured(ways, ROUNDS[at.size])
            await in_sqlite.close()
        print(f"\n{load()}")
        for name in stores:
            each_ms = costs.wall_s(name) / at.count * concurrency * 1000
            text = f"create, {name:6} x{concurrency} {each_ms:8.2f} ms"
            print(f"{text}   {costs.latency(name, 'native')} native creates")

    uvloop.run(campaign())


if TYPE_CHECKING:
    from types_aiobotocore_s3.client import S3Client
    from types_aiobotocore_s3.type_defs import CompletedPartTypeDef


@asynccontextmanager
async def bare_s3(server: S3Server, bucket: str, connections: int) -> AsyncIterator[BareS3]:
    config = AioConfig(
        max_pool_connections=connections,
        retries={"mode": "standard", "total_max_attempts": 1},
        s3={"addressing_style": "path"},
        request_checksum_calculation="when_required",
        response_checksum_validation="when_required",
        parameter_validation=False,
    )
    async with get_session().create_client(
        "s3",
        endpoint_url=server.endpoint,
        region_name=server.region,
        aws_access_key_id=server.access_key,
        aws_secret_access_key=server.secret_key,
        config=config,
    ) as client:
        yield BareS3(client, bucket)


class BareS3:
    """Reference for the comparison with the store."""

    def __init__(self, client: S3Client, bucket: str) -> None:
        self._client = client
        self._bucket = bucket

    async def create(self, key: str, data: bytes) -> None:
        await self._client.put_object(Bucket=self._bucket, Key=key, Body=data, IfNoneMatch="*")

    async def create_in_parts(self, key: str, data: bytes, part_bytes: int, together: int) -> None:
        """A conditional upload in parts, `parallel` of them at a time."""
        target: dict[str, Any] = {"Bucket": self._bucket, "Key": key}
        upload_id = (await self._client.create_multipart_upload(**target))["UploadId"]
        done: list[CompletedPartTypeDef] = []

        async def send(number: int) -> None:
            part = data[number * part_bytes : (number + 1) * part_bytes]
            reply = await self._client.upload_part(
                **target, UploadId=upload_id, PartNumber=number + 1, Body=part
            )
            done.append({"PartNumber": number + 1, "ETag": reply["ETag"]})

        await at_once(-(-len(data) // part_bytes), together, send)
        done.sort(key=lambda part: part["PartNumber"])
        await self._client.complete_multipart_upload(
            **target, UploadId=upload_id, MultipartUpload={"Parts": done}, IfNoneMatch="*"
        )

    async def get(self, key: str, wanted: str = "") -> bytes:
        options: dict[str, Any] = {"Range": wanted} if wanted else {}
        reply = await self._client.get_object(Bucket=self._bucket, Key=key, **options)
        async with reply["Body"] as body:
            return await body.read()
