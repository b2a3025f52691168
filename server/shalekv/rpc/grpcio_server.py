"""The transport of grpcio (`grpc.aio`), which `--wire grpcio` chooses.

Handlers are coroutine functions, since grpc.aio runs others in threads, and streams are written
with `context.write`, since grpc.aio leaves the generator of a cancelled stream open until it is
garbage collected.

grpc.aio cannot reset a stream: it does so when nothing refers to the call any more, which its own
task for the call prevents; see `_drop`.
"""

from __future__ import annotations

import asyncio
import errno
import gc
import logging
import ssl
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any, NamedTuple, TypeAlias, cast

import grpc

from shalekv.rpc.calls import Find, Streaming, Unary
from shalekv.rpc.native_server import (
    CONCURRENT_STREAMS_MAX,
    CONNECTION_AGE_GRACE_MS,
    CONNECTION_IDLE_MS,
    HANDSHAKE_TIMEOUT_MS,
    METADATA_BYTES_MAX,
    bind_error,
)
from shalekv.rpc.running_stream import forget_frames
from shalekv.settings import UNIX, EndpointSettings
from shalekv_wire.connection import PING_INTERVAL_S
from shalekv_wire.status import DETAILS_KEY, CallFailed, StatusCode
from shalekv_wire.tls import TlsContexts
from shalekv_wire.trace_context import REQUEST_ID, TRACE_ID, TRACEPARENT, call_names

_Context: TypeAlias = grpc.aio.ServicerContext[Any, Any]
_Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"

# grpc.aio lets through this multiple of `concurrent_calls_max` calls of any kind, health checks and
# reflection included. The adapter limits the calls of our own services, with an error that says
# more.
CALLS_OF_ANY_KIND = 2
# Name of the coroutine that grpc.aio runs beside the handler of a call, until its client has gone.
WATCHING = "_schedule_rpc_coro"
CHANNELZ = "/grpc.channelz.v1.Channelz/"
GRPC_LOGGER = "grpc._cython.cygrpc"

_CODES = {code.value[0]: code for code in grpc.StatusCode}


class GrpcioServer:
    """Server of grpc.aio on one address."""

    def __init__(
        self,
        settings: EndpointSettings,
        find: Find,
        tls: TlsContexts | None = None,
        is_enforcing: Callable[[], bool] = lambda: False,
    ) -> None:
        """Bind the address. `find` returns the methods. Raises `OSError`.

        While `is_enforcing`, debug services are refused: who calls them is not known.
        """
        self._find = find
        self._tls = None if settings.listen.startswith(UNIX) else tls
        self._has_debug_services = settings.debug_services
        self._server = grpc.aio.server(
            options=channel_options(settings),
            maximum_concurrent_rpcs=CALLS_OF_ANY_KIND * settings.concurrent_calls_max,
            interceptors=[_DebugRefusal(is_enforcing)] if settings.debug_services else [],
        )
        self.listen = self._bind(settings.listen)

    @property
    def connection_count(self) -> int | None:
        """None: grpc.aio does not tell."""
        return None

    @property
    def services(self) -> Sequence[str]:
        """The full names of the services that this transport has itself: channelz, or none."""
        if not self._has_debug_services:
            return ()
        from grpc_channelz.v1 import channelz_pb2  # noqa: PLC0415 - for debugging alone

        return [channelz_pb2.DESCRIPTOR.services_by_name["Channelz"].full_name]

    async def start(self) -> None:
        """Serve from now on."""
        if self._has_debug_services:
            from grpc_channelz.v1 import channelz  # noqa: PLC0415 - for debugging alone

            channelz.add_channelz_servicer(self._server)
        self._server.add_generic_rpc_handlers([_Handlers(self._find)])
        logging.getLogger(GRPC_LOGGER).addFilter(_is_worth_logging)
        await self._server.start()

    async def stop(self, grace_s: float) -> None:
        """Close the port; cancel the calls that are in progress after `grace_s`."""
        await self._server.stop(grace_s)

    def _bind(self, listen: str) -> str:
        # Checked first: of a name with several addresses grpc is content to bind one, so that two
        # servers could share a port.
        refusal = bind_error(listen)
        if refusal is not None:
            raise refusal
        try:
            if self._tls is None:
                port = self._server.add_insecure_port(listen)
            else:
                port = self._server.add_secure_port(listen, _credentials(self._tls))
        except RuntimeError as refused:
            free = f"{listen} was refused, and may be free by now"
            raise bind_error(listen) or OSError(errno.EADDRNOTAVAIL, free) from refused
        if listen.startswith(UNIX):
            return listen
        return f"{listen.rpartition(':')[0]}:{port}"


def _credentials(tls: TlsContexts) -> grpc.ServerCredentials:
    """Return credentials of the newest files that are good; grpc asks for them for each handshake.

    It does so in threads of its own, with the interpreter locked.
    """
    used = tls.contents

    def configuration() -> grpc.ServerCertificateConfiguration:
        pair = (used.key, used.certificate)
        return grpc.ssl_server_certificate_configuration([pair], used.authority or None)

    def changed() -> grpc.ServerCertificateConfiguration | None:
        nonlocal used
        tls.current()
        if tls.contents is used:
            return None
        used = tls.contents
        return configuration()

    return grpc.dynamic_ssl_server_credentials(
        configuration(),
        cast("Any", changed),  # the stubs leave out that there may be no change
        require_client_authentication=bool(tls.files.authority),
    )


class _DebugRefusal(grpc.aio.ServerInterceptor):
    """Refuses channelz, which has no callers, while an access policy is enforced."""

    def __init__(self, is_enforcing: Callable[[], bool]) -> None:
        self._is_enforcing = is_enforcing

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[_Handler | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> _Handler | None:
        """Implement `ServerInterceptor`."""
        is_debug = handler_call_details.method.startswith(CHANNELZ)
        if is_debug and self._is_enforcing():
            return grpc.unary_unary_rpc_method_handler(cast("Any", _refuse))
        return await continuation(handler_call_details)


async def _refuse(_request: object, context: _Context) -> None:
    message = "debug services answer nobody while an access policy is enforced"
    await context.abort(grpc.StatusCode.PERMISSION_DENIED, message)


class _Handlers(grpc.GenericRpcHandler):
    """The handlers of grpc for methods, which may change; a call that has begun keeps its own."""

    def __init__(self, find: Find) -> None:
        self._find = find

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> _Handler | None:
        match self._find(handler_call_details.method):
            case Unary(answer):

                async def handle(data: bytes, context: _Context) -> bytes | None:
                    call = _GrpcioCall(context)
                    answer(cast("Any", call), data)  # has what the adapter uses of one
                    return await call.sent()

                # The stubs of grpc know the handlers of threads alone.
                return grpc.unary_unary_rpc_method_handler(cast("Any", handle))
            case Streaming(serve):

                async def handle_stream(_: object, context: _Context) -> None:
                    call = _GrpcioCall(context)
                    await serve(cast("Any", call))
                    await call.sent()

                # A handler of bidirectional streams is accepted for a method of any shape.
                return grpc.stream_stream_rpc_method_handler(cast("Any", handle_stream))
            case None:
                return None


class _Status(NamedTuple):
    """Status of a call in the form that grpc takes."""

    code: grpc.StatusCode
    details: str
    trailing_metadata: tuple[tuple[str, str | bytes], ...]


class _GrpcioCall:
    """One call of grpc.aio, made by the task of its handler, which has to await `sent`."""

    def __init__(self, context: _Context) -> None:
        self.on_cancel: Callable[[], None] | None = None
        self.is_admitted = True  # nobody asks: grpc closes no connection for another one
        self.peer: str = context.peer()
        self._context = context
        # The last value of a key counts, as in our own transport.
        metadata = {key: str(value) for key, value in context.invocation_metadata() or ()}
        self.authorization = metadata.get("authorization", "")
        self.names = call_names(metadata.get(REQUEST_ID, ""), metadata.get(TRACEPARENT, ""))
        self._header: Sequence[tuple[str, str]] = self.names.echo()  # to be sent
        self._status: _Status | None = None  # None: not ended, or with OK
        self._reply: bytes | None = None
        self._is_over = False
        self._ended: asyncio.Future[None] | None = None  # somebody waits for the end
        # None: the task has ended. Its error refers to frames, and those refer to this call.
        self._task = asyncio.current_task()

    @property
    def deadline_s(self) -> float | None:
        """Implement `ServerCall`."""
        # The stubs leave out that there may be no deadline.
        remaining_s: float | None = self._context.time_remaining()
        return None if remaining_s is None else time.monotonic() + remaining_s

    @property
    def certificate(self) -> bytes:
        """Implement `ServerCall`."""
        for pem in self._context.auth_context().get("x509_pem_cert", ()):
            return ssl.PEM_cert_to_DER_cert(pem.decode("ascii"))
        return b""

    def name_trace(self, trace_id: str) -> None:
        """Implement `ServerCall`."""
        self._header = (*self._header, (TRACE_ID, trace_id))

    def reply(self, message: bytes) -> None:
        """Implement `ServerCall`."""
        self._reply = message
        self.end()

    def end(
        self, code: StatusCode = StatusCode.OK, message: str = "", details: bytes = b""
    ) -> None:
        """Implement `ServerCall`: `sent` does it."""
        if self._is_over:
            return
        self._is_over = True
        if code is not StatusCode.OK:
            described = ((DETAILS_KEY, details),) if details else ()
            metadata: tuple[tuple[str, str | bytes], ...] = (*self._header, *described)
            self._status = _Status(_CODES[code], message, metadata)
        if self._ended is not None and not self._ended.done():
            self._ended.set_result(None)

    def reset(self) -> None:
        """Implement `ServerCall`."""
        if self._task is not None:
            self._is_over = True
            _drop(self._task)
            self._task.cancel()

    async def write(self, message: bytes) -> None:
        """Implement `ServerCall`."""
        try:
            if self._header:
                await self._send_header()
            await self._context.write(message)
        except grpc.aio.BaseError as gone:
            forget_frames(gone)
            raise CallFailed(StatusCode.CANCELLED, "the client has gone") from None

    async def read(self) -> bytes | None:
        """Implement `ServerCall`."""
        # The iterator of messages would keep the call alive: it is a cycle of references.
        message: Any = await self._context.read()
        return None if message is grpc.aio.EOF else message

    async def sent(self) -> bytes | None:
        """Wait until the call is ended; return its reply, or send its status.

        grpc.aio refuses a status behind a first message that was not sent yet; then the stream is
        reset. It keeps the error of `abort` in the context, and raises it again when the handler
        has returned. It must not refer to frames, since those refer to the context.
        """
        try:
            if not self._is_over:
                await self._wait()
            if self._status is not None:
                await self._context.abort_with_status(cast("Any", self._status))
            elif self._header:
                await self._send_header()
        except grpc.aio.AbortError as aborted:
            forget_frames(aborted)
        except grpc.aio.BaseError as gone:  # the deadline has passed, or the connection is lost
            _drop(asyncio.current_task())
            raise asyncio.CancelledError from gone
        finally:
            self._task = None
        return self._reply

    async def _send_header(self) -> None:
        header, self._header = self._header, ()
        await self._context.send_initial_metadata(cast("Any", header))

    async def _wait(self) -> None:
        self._ended = asyncio.get_running_loop().create_future()
        try:
            await self._ended
        except asyncio.CancelledError as cancelled:
            self._is_over = True
            if self.on_cancel is not None:
                self.on_cancel()
            forget_frames(cancelled)
            raise


def _drop(handler: asyncio.Task[Any] | None) -> None:
    """Reset the stream of a handler, by cancelling the task of grpc.aio that holds its call.

    Nothing happens if this version of grpc.aio has no task with this name.
    """
    for task in asyncio.all_tasks():
        running = cast("Coroutine[Any, Any, Any]", task.get_coro())
        if getattr(running, "__name__", "") == WATCHING and any(
            any(each is handler for each in gc.get_referents(scope))
            for scope in gc.get_referents(running)
        ):
            task.cancel()


def channel_options(settings: EndpointSettings) -> Sequence[tuple[str, int]]:
    """Return the options of grpc for connections, messages and metadata."""
    return [
        ("grpc.so_reuseport", 0),  # else two servers could share a port unnoticed
        ("grpc.server_handshake_timeout_ms", HANDSHAKE_TIMEOUT_MS),
        ("grpc.max_connection_idle_ms", CONNECTION_IDLE_MS),
        ("grpc.max_connection_age_ms", settings.connection_age_ms),
        ("grpc.max_connection_age_grace_ms", CONNECTION_AGE_GRACE_MS),
        ("grpc.max_concurrent_streams", CONCURRENT_STREAMS_MAX),
        # Clients keep to that limit by queueing. Overload protection would also count calls that
        # have just ended, and end new ones of a client at its limit with a bare UNAVAILABLE.
        ("grpc.http.overload_protection", 0),
        ("grpc.max_receive_message_length", settings.message_bytes_max),
        ("grpc.max_send_message_length", -1),  # the services cut their replies
        # Below the absolute limit grpc refuses at random, so both are the same.
        ("grpc.max_metadata_size", METADATA_BYTES_MAX),
        ("grpc.absolute_max_metadata_size", METADATA_BYTES_MAX),
        # By default grpc closes the connections of clients that send pings without calls.
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.min_ping_interval_without_data_ms", round(1_000 * PING_INTERVAL_S)),
        # By default grpc collects the statistics for channelz even if no service shows them.
        ("grpc.enable_channelz", int(settings.debug_services)),
    ]


def _is_worth_logging(record: logging.LogRecord) -> bool:
    """Return False for a log record of grpc that a caller was gone before the reply.

    A deadline that passes while a reply is sent is not an error.
    """
    error = record.exc_info[1] if record.exc_info else None
    # By its text, because its class is not public.
    return not (isinstance(error, grpc.aio.BaseError) and "execute_batch" in str(error))
