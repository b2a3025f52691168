"""One client for a configuration: made when it is needed, shared, and closed with the last."""

from __future__ import annotations

import asyncio
import logging

import pytest

from shalekv.settings import StoreSettings
from shalekv.store.aws.discretion import keep_secrets_out_of_logs
from shalekv.store.s3.client import ClientOptions, give_back, lease
from tests.kit.inline_runtime import InlineWorkers
from tests.kit.s3.opening import new_store, opened
from tests.kit.s3.scripted_server import found, scripted


def options(**settings: object) -> ClientOptions:
    given = {"endpoint_url": "http://127.0.0.1:1", **settings}
    return ClientOptions.of(StoreSettings.model_validate(given))


async def test_stores_share_a_client() -> None:
    """The same configuration has one client, another has another; the last one closes it."""
    one, other = lease(options()), lease(options())
    third = lease(options(region="eu-north-1"))
    assert one is other
    assert one is not third
    client = await one.opened(InlineWorkers())
    assert await other.opened(InlineWorkers()) is client
    await give_back(one)
    assert lease(options()) is other
    await give_back(other)
    await give_back(other)
    await give_back(third)
    fresh = lease(options())
    assert fresh is not other
    await give_back(fresh)


async def test_it_is_opened_once() -> None:
    """However many ask at once, one client is made; one who is cancelled harms none."""
    shared = lease(options())
    first = asyncio.create_task(shared.opened(InlineWorkers()))
    others = [asyncio.create_task(shared.opened(InlineWorkers())) for _ in range(5)]
    await asyncio.sleep(0)
    first.cancel()
    clients = await asyncio.gather(*others)
    assert len({id(client) for client in clients}) == 1
    await asyncio.gather(first, return_exceptions=True)
    await give_back(shared)


async def test_closing() -> None:
    """A store goes on when one beside it is closed, though they share connections; it may be
    closed twice, and unused, and is not used afterwards.
    """
    async with scripted(lambda _: found(b"x")) as server:
        async with opened(server.endpoint) as stays:
            async with opened(server.endpoint) as leaves:
                await leaves.get("wal/1")
                await stays.get("wal/1")
            assert (await stays.get("wal/1")).data == b"x"
        assert server.connections == 1
        store = new_store(server.endpoint)
        assert store.sent.total == 0
        await store.close()
        await store.close()
        with pytest.raises(RuntimeError, match="after it was closed"):
            await store.get("wal/1")


@pytest.mark.parametrize(
    ("variables", "setting", "region"),
    [
        ({}, "", "us-east-1"),
        ({"AWS_DEFAULT_REGION": "eu-west-1"}, "", "eu-west-1"),
        ({"AWS_REGION": "auto", "AWS_DEFAULT_REGION": "eu-west-1"}, "", "auto"),
        ({"AWS_REGION": "eu-west-1"}, "eu-north-1", "eu-north-1"),
    ],
)
async def test_regions(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], setting: str, region: str
) -> None:
    """The region is the setting, else that of the environment, else the first of Amazon's."""
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    async with scripted(lambda _: found(b"x")) as server:
        async with opened(server.endpoint, region=setting) as store:
            await store.get("wal/1")
        assert f"/{region}/s3/aws4_request" in server.requests[0].headers["authorization"]


@pytest.mark.parametrize(
    ("settings", "url"),
    [
        ({}, "https://bucket.s3.amazonaws.com/key"),
        ({"path_style": True}, "https://s3.amazonaws.com/bucket/key"),
        ({"endpoint_url": "http://minio:9000"}, "http://minio:9000/bucket/key"),
        ({"endpoint_url": "https://t3.storage.dev"}, "https://bucket.t3.storage.dev/key"),
        (
            {"endpoint_url": "https://t3.storage.dev", "path_style": True},
            "https://t3.storage.dev/bucket/key",
        ),
    ],
)
async def test_where_requests_go(settings: dict[str, object], url: str) -> None:
    """The bucket is in the host at Amazon and Tigris, and in the path elsewhere or if asked."""
    shared = lease(options(**{"endpoint_url": "", **settings}))
    client = await shared.opened(InlineWorkers())
    signed = await client.generate_presigned_url("get_object", {"Bucket": "bucket", "Key": "key"})
    assert signed.partition("?")[0] == url
    await give_back(shared)


def test_logs_below_info_are_closed() -> None:
    """Logs of botocore, which hold signatures, are as quiet as they have to be and no quieter."""
    logger = logging.getLogger("botocore")
    before = logger.level
    try:
        logger.setLevel(logging.DEBUG)
        keep_secrets_out_of_logs()
        assert not logging.getLogger("botocore.auth").isEnabledFor(logging.DEBUG)
        logger.setLevel(logging.ERROR)
        keep_secrets_out_of_logs()
        assert logger.level == logging.ERROR
    finally:
        logger.setLevel(before)
