"""botocore's client, set up the way stores need it and shared by all stores of a process.

One client for a configuration and event loop: its pool bounds the connections of the process, and
credentials are fetched once. It is made when the first request needs it and closed with the last
store that used it.
"""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit
from weakref import WeakKeyDictionary

from aiobotocore.config import AioConfig
from aiobotocore.session import AioSession
from botocore import UNSIGNED
from botocore.loaders import Loader, create_loader

from shalekv.errors import InvalidSetting
from shalekv.runtime import Workers
from shalekv.settings import StoreSettings
from shalekv.store.aws.discretion import keep_secrets_out_of_logs
from shalekv.store.aws.region import DEFAULT_REGION, REGION_VARIABLES
from shalekv.store.aws_credentials import find_credentials, renew_credentials
from shalekv.store.s3.clock import StoreClock
from shalekv.store.s3.headers import is_tigris, register_headers
from shalekv.store.s3.wire import OneAttempt, kept_alive_socket

if TYPE_CHECKING:
    from aiobotocore.credentials import AioCredentials
    from types_aiobotocore_s3.client import S3Client

IDLE_S = 12.0  # how long a connection is kept: Amazon closes what is idle for some 20 seconds


@dataclass(frozen=True, slots=True)
class ClientOptions:
    """What tells clients apart."""

    endpoint_url: str
    region: str
    path_style: bool
    anonymous: bool
    aws_profile: str
    connections_max: int
    connect_timeout_ms: int
    request_timeout_ms: int

    @classmethod
    def of(cls, settings: StoreSettings) -> ClientOptions:
        """Those in `settings`; raises `InvalidSetting`."""
        _check_endpoint(settings.endpoint_url)
        return cls(
            endpoint_url=settings.endpoint_url.rstrip("/"),
            region=settings.region,
            path_style=settings.path_style,
            anonymous=settings.anonymous,
            aws_profile=settings.aws_profile,
            connections_max=settings.connections_max,
            connect_timeout_ms=settings.connect_timeout_ms,
            request_timeout_ms=settings.request_timeout_ms,
        )


def _check_endpoint(endpoint_url: str) -> None:
    if not endpoint_url:
        return
    try:
        parts = urlsplit(endpoint_url)
        is_server = parts.scheme in {"http", "https"} and bool(parts.hostname) and parts.port != 0
    except ValueError:  # the port is no number
        raise InvalidSetting("endpoint_url is not a URL: write https://HOST:PORT") from None
    if "@" in parts.netloc:
        raise InvalidSetting(
            "endpoint_url has credentials in it, and it stands in logs: take them from the "
            "environment"
        )
    if not is_server or parts.query or parts.fragment:
        raise InvalidSetting(f"endpoint_url {endpoint_url!r}: write https://HOST:PORT")


class SharedClient:
    """A client, how many stores use it, and the time that its servers tell."""

    def __init__(self, options: ClientOptions) -> None:
        """Nothing is opened yet."""
        self.options = options
        self.users = 0
        self.clock = StoreClock()
        self._stack = AsyncExitStack()
        self._opening = asyncio.Lock()
        self._client: S3Client | None = None
        self._credentials: AioCredentials | None = None

    async def opened(self, workers: Workers) -> S3Client:
        """The client, ready to sign. Whoever comes first opens it, the others wait for that.

        Raises `CredentialsFailed` and the errors of botocore. Nothing was sent then.
        """
        if self._client is None:
            async with self._opening:
                if self._client is None:
                    self._client = await self._open(workers)
        if self._credentials is not None:
            await renew_credentials(self._credentials)
        return self._client

    async def close(self) -> None:
        """Close its connections."""
        await self._stack.aclose()

    async def _open(self, workers: Workers) -> S3Client:
        keep_secrets_out_of_logs()
        profile = self.options.aws_profile or None  # then the environment has no say
        session = AioSession(session_vars=REGION_VARIABLES, profile=profile)
        # A third of a second of reading JSON, which would hold up everything else here.
        await workers.run(_read_models, session)
        if not self.options.anonymous:  # a client that was made without any would never look again
            self._credentials = await find_credentials(session)
        region = self.options.region or session.get_config_variable("region") or DEFAULT_REGION
        client: S3Client = await self._stack.enter_async_context(
            session.create_client(
                "s3",
                region_name=region,
                endpoint_url=self.options.endpoint_url or None,
                config=_config(self.options),
            )
        )
        register_headers(client)
        return client


_shared: WeakKeyDictionary[asyncio.AbstractEventLoop, dict[ClientOptions, SharedClient]]
_shared = WeakKeyDictionary()


def lease(options: ClientOptions) -> SharedClient:
    """The client of this process for `options`; to be given back by `give_back`."""
    clients = _shared.setdefault(asyncio.get_running_loop(), {})
    client = clients.setdefault(options, SharedClient(options))
    client.users += 1
    return client


async def give_back(client: SharedClient) -> None:
    """The end of a lease, which closes the client if it was the last."""
    client.users -= 1
    if client.users == 0:
        del _shared[asyncio.get_running_loop()][client.options]
        await client.close()


@cache
def _models() -> Loader:
    """What botocore knows of Amazon's services: read once in a process."""
    return create_loader()


def _read_models(session: AioSession) -> None:
    session.register_component("data_loader", _models())
    session.warm_up_loader_caches("s3")  # type: ignore[attr-defined]  # the stubs lack it


def _config(options: ClientOptions) -> AioConfig:
    extra: dict[str, Any] = {"signature_version": UNSIGNED} if options.anonymous else {}
    # Otherwise as the profile says, or else by botocore's rule: the bucket is in the host at
    # Amazon, and in the path where an endpoint is given.
    if options.path_style:
        extra["s3"] = {"addressing_style": "path"}
    elif is_tigris(options.endpoint_url):
        extra["s3"] = {"addressing_style": "virtual"}
    return AioConfig(
        connect_timeout=options.connect_timeout_ms / 1000.0,
        read_timeout=options.request_timeout_ms / 1000.0,
        max_pool_connections=options.connections_max,
        # Repeating is decided above the store, where each attempt is signed and counted anew.
        retries={"mode": "standard", "total_max_attempts": 1},
        # By default botocore sends CRCs of its own choice, in trailers over TLS, and wants them
        # back. R2 knows some of them, older MinIO and SeaweedFS and Ceph none, and refuse. What
        # is sent is protected all the same: its SHA-256 is signed. What is read has checksums
        # inside. Tests of names and types are ours, and it takes no memoryview.
        request_checksum_calculation="when_required",
        response_checksum_validation="when_required",
        parameter_validation=False,
        http_session_cls=OneAttempt,
        connector_args={"keepalive_timeout": IDLE_S, "socket_factory": kept_alive_socket},
        user_agent_extra="shalekv",
        **extra,
    )
