"""The HTTP endpoint of a process: /metrics for Prometheus, /livez and /readyz for probes.

A connection carries one request and lives for `CONNECTION_S` at most; when there are too many, the
oldest gives way. So strangers that are slow or silent take little, and keep nobody out. TLS is that
of the gRPC port: each connection gets the newest files that are good.
"""

from __future__ import annotations

import asyncio
import socket
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from http import HTTPStatus
from typing import Protocol

import structlog
from aiohttp import hdrs, web

from shalekv.errors import (
    InvalidRequest,
    Overloaded,
    PolicyUnknown,
    ShaleError,
)
from shalekv.protocol.access import Need, Verb
from shalekv.rpc.exposition import Exposition
from shalekv.rpc.native_server import FOR_METRICS, Door, accepted, address_of, bind, listening
from shalekv.rpc.standard_services import WHOLE_SERVER
from shalekv.rpc.status import row_of
from shalekv.server.access.caller import Caller
from shalekv.server.access.guard import Guard
from shalekv.server.access.identity import Credentials
from shalekv.server.service import Call
from shalekv.settings import Wire
from shalekv.settings.security import TlsSettings
from shalekv.telemetry.metrics import Metrics
from shalekv.v1.admin_pb2 import StatusRequest
from shalekv.wording import READ, WRITE
from shalekv_wire.server import peer_name
from shalekv_wire.status import StatusCode

CONNECTION_S = 10.0  # of a connection, its handshake and its request included
CONNECTIONS_MAX = 64
RETRY_AFTER_MS = 1_000
SCRAPES_MAX = 4  # at once; each holds its text, of some hundred KB
HEADERS_MAX = 64
HEADER_BYTES_MAX = 12 << 10  # of one; a token may have 8 KiB
ALPN = "http/1.1"
METHODS = ("GET", "HEAD")
# What callers without the verb ADMIN are not shown: who calls, which keys and objects there are.
SECRET_LABELS = frozenset(("principal", "prefix", "object"))
SERVICES: Mapping[str, str] = {"": WHOLE_SERVER, "reader": READ, "writer": WRITE}  # by ?role=

_ADMIN = Need(Verb.ADMIN)
_STATUSES = {
    StatusCode.UNAUTHENTICATED: HTTPStatus.UNAUTHORIZED,
    StatusCode.PERMISSION_DENIED: HTTPStatus.FORBIDDEN,
    StatusCode.RESOURCE_EXHAUSTED: HTTPStatus.TOO_MANY_REQUESTS,
    StatusCode.INVALID_ARGUMENT: HTTPStatus.BAD_REQUEST,
}

_log = structlog.get_logger(__name__)

# Says why health checks of a service fail; None: they don't.
Problem = Callable[[str], str | None]


class Collects(Protocol):
    """Collects metrics: `MetricSources`, or something in its place."""

    async def collect(self) -> Metrics:
        """Return the samples of this moment. Raises `ShaleError` if they are not known."""
        ...


class HttpEndpoint:
    """One address, bound when it is made; it answers while `run` runs."""

    def __init__(
        self,
        listen: str | Door,
        sources: Collects,
        *,
        tls: TlsSettings | None = None,
        guard: Guard | None = None,
        open_services: bool = True,
    ) -> None:
        """Bind HOST:PORT, unless connections come through a door.

        `guard` is asked about each request for metrics, and unless `open_services`, about probes as
        well. Without one every request is allowed.

        Raises `InvalidSetting` if the files of `tls` cannot be used, and `OSError` as `bind`.
        """
        self._tls = listening(tls, Wire.NATIVE)
        self._sources = sources
        self._exposition = Exposition()
        self._guard = guard
        self._open_services = open_services
        self._problem: Problem = lambda _: None
        self._scrapes = 0
        self._refusals = Counter[str]()  # by the reason of their error
        self._connections: dict[asyncio.Task[None], None] = {}  # the oldest is the first
        self._door = listen if isinstance(listen, Door) else None
        self._sockets = [] if isinstance(listen, Door) else bind(listen)
        self.listen = "" if isinstance(listen, Door) else address_of(listen, self._sockets)

    @property
    def url(self) -> str:
        """The URL of the metrics."""
        return f"{'http' if self._tls is None else 'https'}://{self.listen}/metrics"

    async def run(self, problem: Problem) -> None:
        """Answer until cancelled; `problem` says whether this process is ready."""
        self._problem = problem
        server = web.Server(self._answer)
        async with asyncio.TaskGroup() as tasks:
            for listener in self._sockets:
                tasks.create_task(self._accept(listener, server, tasks))
            if self._door is None:
                return
            self._door.open_for(FOR_METRICS, partial(self._adopt, server, tasks))
            try:
                await asyncio.get_running_loop().create_future()
            finally:
                self._door.open_for(FOR_METRICS, socket.socket.close)

    def collect(self, metrics: Metrics) -> None:
        """Add the requests that were refused."""
        for reason, refusals in self._refusals.items():
            metrics.add("refusals", refusals, reason)

    def close(self) -> None:
        """Give up the port. REQUIRES: `run` has ended, or never began."""
        for each in self._sockets:
            each.close()

    async def _accept(
        self, listener: socket.socket, server: web.Server, tasks: asyncio.TaskGroup
    ) -> None:
        while True:
            self._adopt(server, tasks, await accepted(listener))

    def _adopt(
        self, server: web.Server, tasks: asyncio.TaskGroup, connection: socket.socket
    ) -> None:
        if len(self._connections) >= CONNECTIONS_MAX:
            oldest = next(iter(self._connections))
            del self._connections[oldest]
            oldest.cancel()
        task = tasks.create_task(self._carry(connection, server))
        self._connections[task] = None
        task.add_done_callback(lambda ended: self._connections.pop(ended, None))

    async def _carry(self, accepted: socket.socket, server: web.Server) -> None:
        """Serve a connection to its end."""
        loop, connection = asyncio.get_running_loop(), _Connection(server)
        tls = None
        if self._tls is not None:
            tls = self._tls.current()
            tls.set_alpn_protocols([ALPN])  # made for gRPC, which is of HTTP/2
        try:
            async with asyncio.timeout(CONNECTION_S):
                transport, _ = await loop.connect_accepted_socket(
                    lambda: connection, accepted, ssl=tls
                )
                try:
                    await connection.ended.wait()
                finally:
                    transport.abort()
        except (OSError, TimeoutError):
            pass  # a client that breaks off, fails in its handshake, or is slow: its own affair
        except Exception:  # noqa: BLE001 - a bug here must not end what the process is for
            _log.exception("unexpected error of a connection for metrics")

    async def _answer(self, request: web.BaseRequest) -> web.StreamResponse:
        answers: Mapping[str, Callable[[web.BaseRequest], Awaitable[web.Response]]] = {
            "/metrics": self._metrics,
            "/readyz": self._readyz,
            "/livez": self._livez,
        }
        answer = answers.get(request.path)
        if answer is None:
            response = _text(HTTPStatus.NOT_FOUND, f"there are {', '.join(answers)}, and no more")
        elif request.method not in METHODS:
            response = _text(HTTPStatus.METHOD_NOT_ALLOWED, "this port answers GET and HEAD alone")
            response.headers[hdrs.ALLOW] = ", ".join(METHODS)
        else:
            try:
                response = await answer(request)
            except ShaleError as error:
                self._refusals[error.reason] += 1
                response = _refusal(error)
        response.headers[hdrs.CACHE_CONTROL] = "no-store"
        return _last(response)

    async def _metrics(self, request: web.BaseRequest) -> web.Response:
        caller = await self._allowed(request)
        if self._scrapes >= SCRAPES_MAX:
            raise Overloaded(
                f"{SCRAPES_MAX} scrapes are in progress, and no more are allowed at once",
                retry_after_ms=RETRY_AFTER_MS,
            )
        self._scrapes += 1
        try:
            metrics = await self._sources.collect()
            if caller is not None and not caller.permissions.allow(_ADMIN):
                metrics.leave_out(SECRET_LABELS)
            accept = ",".join(request.headers.getall(hdrs.ACCEPT, ()))
            text, content_type = await self._exposition.text(metrics, accept)
        finally:
            self._scrapes -= 1
        return web.Response(body=text, headers={hdrs.CONTENT_TYPE: content_type})

    async def _livez(self, request: web.BaseRequest) -> web.Response:
        if self._guard is None or self._guard.policies.is_known:
            await self._probed(request)  # before, a restart would not help
        return _text(HTTPStatus.OK, "ok")

    async def _readyz(self, request: web.BaseRequest) -> web.Response:
        await self._probed(request)
        role = request.query.get("role", "")
        if role not in SERVICES:
            raise InvalidRequest("role", "is `reader`, `writer`, or left out")
        problem = self._problem(SERVICES[role])
        if problem is None:
            return _text(HTTPStatus.OK, "ok")
        return _text(HTTPStatus.SERVICE_UNAVAILABLE, problem)

    async def _probed(self, request: web.BaseRequest) -> None:
        if not self._open_services:
            await self._allowed(request)

    async def _allowed(self, request: web.BaseRequest) -> Caller | None:
        """Return who asks, if that may ask for a status; None: there is no guard.

        Raises as `Guard.begin`, and `PolicyUnknown` as long as no policy was read.
        """
        guard = self._guard
        if guard is None:
            return None
        if not guard.policies.is_known:
            raise PolicyUnknown("the access policy of the database is not known yet")
        assert request.transport is not None
        peer = peer_name(request.transport)
        tls = request.transport.get_extra_info("ssl_object")
        certificate = (tls and tls.getpeercert(binary_form=True)) or b""
        authorization: Sequence[str] = request.headers.getall(hdrs.AUTHORIZATION, ("",))
        found = guard.caller_of(Credentials(peer, certificate, authorization[-1]))
        caller = found if isinstance(found, Caller) else await found
        permit = guard.begin(Call(peer, caller=caller), StatusRequest(), 0)
        if permit is not None:
            permit.end(None)
        return caller


class _Connection(web.RequestHandler):
    """The protocol of a connection for one request."""

    def __init__(self, server: web.Server) -> None:
        super().__init__(
            server,
            loop=asyncio.get_running_loop(),
            access_log=None,  # type: ignore[arg-type] # none
            max_headers=HEADERS_MAX,
            max_line_size=HEADER_BYTES_MAX,
            max_field_size=HEADER_BYTES_MAX,
            lingering_time=0.0,  # what else it sends is not read
        )
        self.ended = asyncio.Event()

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = HTTPStatus.INTERNAL_SERVER_ERROR,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """Answer what is no HTTP, of which the log has no line: anybody can send that."""
        del request, message  # which repeats what was sent
        if status >= HTTPStatus.INTERNAL_SERVER_ERROR:
            _log.error("unexpected error of a request for metrics", exc_info=exc)
            return _last(_text(HTTPStatus(status), "unexpected error: the log has it"))
        return _last(_text(HTTPStatus(status), "this port answers GET and HEAD of HTTP/1.1"))

    def connection_lost(self, exc: BaseException | None) -> None:
        """Note the end."""
        super().connection_lost(exc)
        self.ended.set()


def _refusal(error: ShaleError) -> web.Response:
    code = StatusCode(row_of(type(error)).code)
    response = _text(_STATUSES.get(code, HTTPStatus.SERVICE_UNAVAILABLE), str(error))
    if code is StatusCode.UNAUTHENTICATED:
        response.headers[hdrs.WWW_AUTHENTICATE] = "Bearer"
    return response


def _last(response: web.StreamResponse) -> web.StreamResponse:
    """Make a response the last of its connection, and do not tell what this server is made of."""
    response.headers[hdrs.SERVER] = "shalekv"
    response.force_close()
    return response


def _text(status: HTTPStatus, text: str) -> web.Response:
    return web.Response(status=status, text=text + "\n")
