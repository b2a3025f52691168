"""botocore's client of S3, configured for stores and shared by all stores of a process.

There is one client for each configuration and event loop: its pool bounds the connections of the
process, and credentials are fetched once. It is opened by the first request and closed with the
last store that uses it.

Each request goes over the wire once, is counted, and fails after a bounded silence. aiohttp by
itself would repeat a request when a kept connection turns out to be dead, and follow redirections.
For a conditional PUT neither is harmless: the second copy would find the object of the first and
report a rival, and would not be counted among the requests that are charged for.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import socket
from collections.abc import Callable, Iterator, Mapping
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
from shalekv.store.retry import CONNECT_TIMEOUT_MS

if TYPE_CHECKING:
    from aiobotocore.credentials import AioCredentials
    from aiohttp import AddrInfoType, ClientResponse, ClientSession, ClientTimeout
    from aiohttp.abc import AbstractStreamWriter
    from botocore.credentials import ReadOnlyCredentials
    from types_aiobotocore_s3.client import S3Client
    from yarl import URL


TIGRIS_HOSTS = (".tigris.dev", ".storage.dev")
CLOCK_LEAP_MS = 60_000  # the most that a reply's time may be ahead of the replies before it
SLICE_BYTES = 256 * 1024  # bytes that are given to the transport at once
KEEPALIVE_S = 30  # silence after which the kernel probes whether the other end is still there
KEEPALIVE_PROBES = 4
IDLE_S = 12.0  # how long an idle connection is kept: Amazon closes it after some 20 seconds

Body = bytes | memoryview

# Stores that share the client count for themselves: the counts are those of the current task.
_counted: ContextVar[tuple[RequestCounts, RequestKind] | None] = ContextVar("counted", default=None)
_learning: ContextVar[Callable[[OneAttempt, Any], None] | None] = ContextVar(
    "learning", default=None
)


def is_tigris(url: str) -> bool:
    """Return whether the host of `url` is one of Tigris's, which needs the bucket in the host
    name.
    """
    return f".{urlsplit(url).hostname or ''}".endswith(TIGRIS_HOSTS)


def register_headers(client: S3Client) -> None:
    """Have `client` call the three functions below before it signs."""
    events = client.meta.events
    events.register("before-call.s3", _stay_in_region)
    events.register("before-call.s3", _be_consistent)
    events.register("before-call.s3.DeleteObjects", _add_md5)


def _stay_in_region(context: dict[str, Any], **_: Any) -> None:
    # For a bucket in another region, botocore would request its region and send the request again,
    # uncounted, in every process with the wrong configuration. Marked as redirected, it does not.
    context.setdefault("s3_redirect", {})["redirected"] = True


def _be_consistent(params: dict[str, Any], **_: Any) -> None:
    # Without this header, Tigris answers from the nearest copy, which may be behind.
    if is_tigris(params["url"]):
        params["headers"]["X-Tigris-Consistent"] = "true"


def _add_md5(params: dict[str, Any], **_: Any) -> None:
    # This is the only request that must have a checksum. All servers accept an MD5, as S3 once
    # demanded; many refuse botocore's CRC-32: "Missing required header: Content-MD5".
    digest = hashlib.md5(params["body"], usedforsecurity=False).digest()
    params["headers"]["Content-MD5"] = base64.b64encode(digest).decode()
    params["context"].get("checksum", {}).pop("request_algorithm", None)


@dataclass(frozen=True, slots=True)
class _Reading:
    """The time in a reply of the store, and when the reply came."""

    store_ms: int
    received_at_ms: float  # by the monotonic clock of this process

    def ahead_of_ms(self, earlier: _Reading) -> float:
        """Return by how much the store's clock has gained on ours since `earlier`."""
        passed_ms = self.received_at_ms - earlier.received_at_ms
        return self.store_ms - earlier.store_ms - passed_ms


class StoreClock:
    """The latest time in the replies of a store. It never goes back.

    Therefore it must not leap ahead either, when one server has a wrong clock: for the life of the
    process, this clock decides what is deleted and which leases have ended.
    """

    def __init__(self) -> None:
        """Start without a reading."""
        self._latest: _Reading | None = None
        self._doubted: _Reading | None = None

    def observe(self, store_ms: int, received_at_ms: float) -> int | None:
        """Return the store's time after a reply with `store_ms`; None if that is in doubt.

        A leap is accepted when the next reply agrees with it: the store's clock was set, or this
        machine was suspended, and its monotonic clock with it.
        """
        reading = _Reading(store_ms, received_at_ms)
        doubted, self._doubted = self._doubted, None
        if self._latest is None:
            self._latest = reading
        leaps = reading.ahead_of_ms(self._latest) > CLOCK_LEAP_MS
        if leaps and (doubted is None or abs(reading.ahead_of_ms(doubted)) > CLOCK_LEAP_MS):
            self._doubted = reading
            return None
        if store_ms >= self._latest.store_ms:
            self._latest = reading
        return self._latest.store_ms


@contextmanager
def learning(learn: Callable[[OneAttempt, Any], None]) -> Iterator[None]:
    """Call `learn` with each request that botocore sends for this task inside the context."""
    token = _learning.set(learn)
    try:
        yield
    finally:
        _learning.reset(token)


@contextmanager
def counted_as(counts: RequestCounts, kind: RequestKind) -> Iterator[None]:
    """Count requests that this task sends inside the context as `kind` in `counts`."""
    token = _counted.set((counts, kind))
    try:
        yield
    finally:
        _counted.reset(token)


def kept_alive_socket(address: AddrInfoType) -> socket.socket:
    """Create a socket that detects a dead peer, well before the default of two hours."""
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
    """The HTTP session of botocore: sends each request once, and counts it."""

    _timeout: ClientTimeout
    _proxy_config: Any

    async def send(self, request: Any) -> Any:
        """Send a request and return the reply. Raises botocore's `HTTPClientError`."""
        counted = _counted.get()
        if counted is not None:
            counts, kind = counted
            counts.add(kind)
        learn = _learning.get()
        if learn is not None:
            learn(self, request)
        return await super().send(request)

    async def get_signed(
        self, url: URL, headers: Mapping[str, str]
    ) -> tuple[int, Mapping[str, str], bytes]:
        """Send a GET that is signed already; return status, headers and body of the reply.

        Raises the errors of aiohttp, which `send` wraps.
        """
        # Only the scheme counts; to parse the same text again costs nothing.
        proxy_url = self._proxy_config.proxy_url_for(f"{url.scheme}://")
        session = await self._get_session(proxy_url)
        options: dict[str, Any] = {}
        if proxy_url is not None:
            proxy_headers = self._proxy_config.proxy_headers_for(str(url))
            options = {"proxy": proxy_url, "proxy_headers": proxy_headers}
        response = await session.request("GET", data=None, url=url, headers=headers, **options)
        async with response:
            data = await response.read()
            return response.status, response.headers, data

    async def _get_session(self, proxy_url: str | None) -> ClientSession:
        session: ClientSession = await super()._get_session(proxy_url)  # type: ignore[misc]  # not in the stubs
        session._retry_connection = False  # noqa: SLF001 - aiohttp has no public way to say it
        return cast("ClientSession", _Sender(session, self._timeout.sock_read))


class _Sender:
    """The one method of aiohttp's session that botocore needs, without redirections."""

    def __init__(self, session: ClientSession, silence_s: float | None) -> None:
        self._session = session
        self._silence_s = silence_s

    async def request(self, method: str, *, data: Any, **options: Any) -> ClientResponse:
        body = _SlicedBody(data, self._silence_s) if isinstance(data, Body) else data
        return await self._session.request(method, data=body, allow_redirects=False, **options)


class _SlicedBody(Payload):
    """Bytes that are sent slice by slice, without a copy, so that other tasks run in between.

    aiohttp has a timeout only while it waits for the reply: a server that stops reading the body
    would block the request forever. So each slice has a timeout.
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


@dataclass(frozen=True, slots=True)
class ClientOptions:
    """Configuration of a client; stores with equal options share one."""

    endpoint_url: str
    region: str
    path_style: bool
    anonymous: bool
    aws_profile: str
    connections_max: int
    request_timeout_ms: int

    @classmethod
    def of(cls, settings: StoreSettings) -> ClientOptions:
        """Return the options in `settings`. Raises `InvalidSetting`."""
        _check_endpoint(settings.endpoint_url)
        return cls(
            endpoint_url=settings.endpoint_url.rstrip("/"),
            region=settings.region,
            path_style=settings.path_style,
            anonymous=settings.anonymous,
            aws_profile=settings.aws_profile,
            connections_max=settings.connections_max,
            request_timeout_ms=settings.request_timeout_ms,
        )


def _check_endpoint(endpoint_url: str) -> None:
    if not endpoint_url:
        return
    try:
        parts = urlsplit(endpoint_url)
        is_server = parts.scheme in {"http", "https"} and bool(parts.hostname) and parts.port != 0
    except ValueError:  # the port is not a number
        raise InvalidSetting("endpoint_url is not a URL: write https://HOST:PORT") from None
    if "@" in parts.netloc:
        raise InvalidSetting(
            "endpoint_url has credentials in it, and it appears in logs: take them from the "
            "environment"
        )
    if not is_server or parts.query or parts.fragment:
        raise InvalidSetting(f"endpoint_url {endpoint_url!r}: write https://HOST:PORT")


class SharedClient:
    """A client, the number of stores that use it, and the clock of its servers."""

    def __init__(self, options: ClientOptions) -> None:
        """Open nothing yet."""
        self.options = options
        self.users = 0
        self.clock = StoreClock()
        self._stack = AsyncExitStack()
        self._open_lock = asyncio.Lock()
        self._client: S3Client | None = None
        self._credentials: AioCredentials | None = None

    async def opened(self, workers: Workers) -> S3Client:
        """Return the client, with valid credentials; the first call opens it.

        Raises `CredentialsFailed` and the errors of botocore; nothing was sent then.
        """
        if self._client is None:
            async with self._open_lock:
                if self._client is None:
                    self._client = await self._open(workers)
        if self._credentials is not None:
            await renew_credentials(self._credentials)
        return self._client

    async def frozen_credentials(self) -> ReadOnlyCredentials | None:
        """Return valid credentials; None: requests are not signed. REQUIRES: it is opened.

        Raises `CredentialsFailed`; nothing was sent then.
        """
        if self._credentials is None:
            return None
        return await renew_credentials(self._credentials)

    async def close(self) -> None:
        """Close its connections."""
        await self._stack.aclose()

    async def _open(self, workers: Workers) -> S3Client:
        keep_secrets_out_of_logs()
        profile = self.options.aws_profile or None  # if set, it overrides the environment
        session = AioSession(session_vars=REGION_VARIABLES, profile=profile)
        # Parsing the JSON takes a third of a second, which would block the event loop.
        await workers.run(_read_models, session)
        if not self.options.anonymous:
            # A client that is created without credentials would never look for them again.
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


def acquire_client(options: ClientOptions) -> SharedClient:
    """Return the client of this event loop for `options`; the caller must `release_client` it."""
    clients = _shared.setdefault(asyncio.get_running_loop(), {})
    client = clients.setdefault(options, SharedClient(options))
    client.users += 1
    return client


async def release_client(client: SharedClient) -> None:
    """Give up the use of a client; the last user closes it."""
    client.users -= 1
    if client.users == 0:
        del _shared[asyncio.get_running_loop()][client.options]
        await client.close()


@cache
def _models() -> Loader:
    """Return the loader of botocore's service models, which are read once in a process."""
    return create_loader()


def _read_models(session: AioSession) -> None:
    session.register_component("data_loader", _models())
    session.warm_up_loader_caches("s3")  # type: ignore[attr-defined]  # the stubs lack it


def _config(options: ClientOptions) -> AioConfig:
    extra: dict[str, Any] = {"signature_version": UNSIGNED} if options.anonymous else {}
    # Without either of the two options, the profile decides, or else botocore's rule: the bucket is
    # in the host name at Amazon, and in the path where an endpoint is given.
    if options.path_style:
        extra["s3"] = {"addressing_style": "path"}
    elif is_tigris(options.endpoint_url):
        extra["s3"] = {"addressing_style": "virtual"}
    return AioConfig(
        connect_timeout=CONNECT_TIMEOUT_MS / 1_000,
        read_timeout=options.request_timeout_ms / 1000.0,
        max_pool_connections=options.connections_max,
        # Retries are made above the store, where each attempt is signed and counted.
        retries={"mode": "standard", "total_max_attempts": 1},
        # By default botocore sends CRCs of its own choice, in trailers over TLS, and expects them
        # in replies. R2 knows some of them; older MinIO, SeaweedFS and Ceph know none and refuse.
        # Requests are protected without them, since the SHA-256 of the body is signed. Objects
        # that are read have checksums inside.
        request_checksum_calculation="when_required",
        response_checksum_validation="when_required",
        # Names and types are checked here; botocore's validation accepts no memoryview.
        parameter_validation=False,
        http_session_cls=OneAttempt,
        connector_args={"keepalive_timeout": IDLE_S, "socket_factory": kept_alive_socket},
        user_agent_extra="shalekv",
        **extra,
    )
