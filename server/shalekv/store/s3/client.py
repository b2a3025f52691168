"""botocore's client, set up the way stores need it and shared by all stores of a process.

One client for a configuration and event loop: its pool bounds the connections of the process, and
credentials are fetched once. It is made when the first request needs it and closed with the last
store that used it.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import socket
from collections.abc import Iterator
from contextlib import AsyncExitStack, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, cast
from urllib.parse import urlsplit
from weakref import WeakKeyDictionary

from aiobotocore.config import AioConfig
from aiobotocore.httpsession import AIOHTTPSession
from aiobotocore.session import AioSession
from aiohttp.payload import Payload
from botocore import UNSIGNED
from botocore.loaders import Loader, create_loader

from shalekv.errors import InvalidSetting
from shalekv.runtime import Workers
from shalekv.settings import StoreSettings
from shalekv.store.api import RequestCounts, RequestKind
from shalekv.store.aws_credentials import (
    DEFAULT_REGION,
    REGION_VARIABLES,
    find_credentials,
    keep_secrets_out_of_logs,
    renew_credentials,
)

if TYPE_CHECKING:
    from aiobotocore.credentials import AioCredentials
    from aiohttp import AddrInfoType, ClientResponse, ClientSession, ClientTimeout
    from aiohttp.abc import AbstractStreamWriter
    from types_aiobotocore_s3.client import S3Client


# --- headers
# What requests say beyond what botocore makes them say, and what it must not do to them.


TIGRIS_HOSTS = (".tigris.dev", ".storage.dev")


def is_tigris(url: str) -> bool:
    """Whether the host of `url` is one of Tigris's, which wants the bucket in it."""
    return f".{urlsplit(url).hostname or ''}".endswith(TIGRIS_HOSTS)


def register_headers(client: S3Client) -> None:
    """Have `client` call the functions below before it signs."""
    events = client.meta.events
    events.register("before-call.s3", _stay_in_region)
    events.register("before-call.s3", _be_consistent)
    events.register("before-call.s3.DeleteObjects", _add_md5)


def _stay_in_region(context: dict[str, Any], **_: Any) -> None:
    # A bucket in another region: botocore would ask where it is and send the request again, for
    # every process that was configured wrongly, uncounted. So: it was redirected already.
    context.setdefault("s3_redirect", {})["redirected"] = True


def _be_consistent(params: dict[str, Any], **_: Any) -> None:
    # Tigris answers from the nearest copy, which may be behind, unless it is asked not to.
    if is_tigris(params["url"]):
        params["headers"]["X-Tigris-Consistent"] = "true"


def _add_md5(params: dict[str, Any], **_: Any) -> None:
    # The one request that must have a checksum. All servers take an MD5, as S3 once demanded;
    # botocore's CRC-32 instead is refused by many: "Missing required header: Content-MD5".
    digest = hashlib.md5(params["body"], usedforsecurity=False).digest()
    params["headers"]["Content-MD5"] = base64.b64encode(digest).decode()
    params["context"].get("checksum", {}).pop("request_algorithm", None)


# --- clock
# The time of a store by the headers of its replies, which one server's wrong clock cannot move.


# What a reply may be ahead of the replies before it.
LEAP_MS = 60_000


@dataclass(frozen=True, slots=True)
class _Reading:
    told_ms: int
    heard_at_ms: float  # by the monotonic clock of this process

    def ahead_of_ms(self, earlier: _Reading) -> float:
        """How much more time has passed for the store than here since `earlier`."""
        passed_ms = self.heard_at_ms - earlier.heard_at_ms
        return self.told_ms - earlier.told_ms - passed_ms


class StoreClock:
    """The latest time that a store told. It never goes back, so it must not leap ahead either.

    What is deleted, and which leases are over, is decided by it for the life of the process.
    """

    def __init__(self) -> None:
        """Nothing was told yet."""
        self._latest: _Reading | None = None
        self._doubted: _Reading | None = None

    def heard(self, told_ms: int, heard_at_ms: float) -> int | None:
        """The store's time after a reply that told `told_ms`; None if that is not believed yet.

        A leap is believed when the next reply agrees with it: the store's clock was set, or this
        machine slept, and its monotonic clock with it.
        """
        told = _Reading(told_ms, heard_at_ms)
        doubted, self._doubted = self._doubted, None
        if self._latest is None:
            self._latest = told
        leaps = told.ahead_of_ms(self._latest) > LEAP_MS
        if leaps and (doubted is None or abs(told.ahead_of_ms(doubted)) > LEAP_MS):
            self._doubted = told
            return None
        if told_ms >= self._latest.told_ms:
            self._latest = told
        return self._latest.told_ms


# --- wire
# How a request of botocore goes over the wire: once, counted, and never silent for long.
#
# aiohttp repeats what it takes for harmless when a kept connection turns out to be dead, and it
# follows redirections. Here a conditional PUT is neither: its second copy would meet the first
# one's object and report a rival, or bypass the count of what is paid for.


SLICE_BYTES = 256 * 1024  # what is handed to the transport at once
KEEPALIVE_S = 30  # of silence, after which the kernel asks whether the other end is still there
KEEPALIVE_PROBES = 4

Body = bytes | memoryview

# The client is shared by stores that count for themselves: a request belongs to whose task it is.
_counted: ContextVar[tuple[RequestCounts, RequestKind] | None] = ContextVar("counted", default=None)


@contextmanager
def counted_as(counts: RequestCounts, kind: RequestKind) -> Iterator[None]:
    """Count what this task sends to the store inside as `kind` in `counts`."""
    token = _counted.set((counts, kind))
    try:
        yield
    finally:
        _counted.reset(token)


def kept_alive_socket(address: AddrInfoType) -> socket.socket:
    """A socket that notices when the other end is gone, long before two hours have passed."""
    family, kind, protocol, _, _ = address
    made = socket.socket(family, kind, protocol)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (
        ("TCP_KEEPIDLE", KEEPALIVE_S),
        ("TCP_KEEPINTVL", KEEPALIVE_S // 2),
        ("TCP_KEEPCNT", KEEPALIVE_PROBES),
    ):
        if hasattr(socket, option):  # not on every system
            made.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
    return made


class OneAttempt(AIOHTTPSession):
    """What carries botocore's requests: each is sent once, and counted."""

    _timeout: ClientTimeout

    async def send(self, request: Any) -> Any:
        """The reply; raises botocore's `HTTPClientError`."""
        counted = _counted.get()
        if counted is not None:
            counts, kind = counted
            counts.add(kind)
        return await super().send(request)

    async def _get_session(self, proxy_url: str | None) -> ClientSession:
        session: ClientSession = await super()._get_session(proxy_url)  # type: ignore[misc]  # not in the stubs
        session._retry_connection = False  # noqa: SLF001 - aiohttp has no public way to say it
        return cast("ClientSession", _Sender(session, self._timeout.sock_read))


class _Sender:
    """The one method of a session of aiohttp that botocore's requests need."""

    def __init__(self, session: ClientSession, silence_s: float | None) -> None:
        self._session = session
        self._silence_s = silence_s

    async def request(self, method: str, *, data: Any, **options: Any) -> ClientResponse:
        body = _SlicedBody(data, self._silence_s) if isinstance(data, Body) else data
        return await self._session.request(method, data=body, allow_redirects=False, **options)


class _SlicedBody(Payload):
    """Bytes that are sent slice by slice, so that others run between, without being copied.

    aiohttp watches over silence only while it waits for the reply; whoever stops reading what it
    is sent would hold the request for ever.
    """

    def __init__(self, data: Body, silence_s: float | None) -> None:
        super().__init__(data)
        self._view = memoryview(data)
        self._size = self._view.nbytes
        self._silence_s = silence_s

    def decode(self, encoding: str = "utf-8", errors: str = "strict") -> str:
        return str(self._view, encoding, errors)

    async def write(self, writer: AbstractStreamWriter) -> None:
        for first in range(0, self._view.nbytes, SLICE_BYTES):
            async with asyncio.timeout(self._silence_s):
                await writer.write(self._view[first : first + SLICE_BYTES])


# --- client


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
