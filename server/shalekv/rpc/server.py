"""The gRPC server: it binds first, serves from `start` on, and is drained at its end.

    bound ---- start -----> serving ---- refuse, drain, stop ----> closed
      |                      |   ^
      |               stand_by   start
      |                      v   |
      +----- stand_by ---> standing by ---- stop ----> closed
                             each call is refused

The address is bound before the writer opens: the port is then known (it is advertised in the
manifest), and a port that is in use is noticed before another writer is fenced for nothing. Until
`start` or `stand_by`, connections wait in the backlog.

`Server` also has the access log, health checks (`grpc.health.v1`) and server reflection.
"""

from __future__ import annotations

import asyncio
import errno
import inspect
import logging
import socket
import time
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from contextlib import suppress
from typing import TYPE_CHECKING, Any, TypeAlias

import grpc
import structlog
from google.protobuf import descriptor_pool, text_format
from google.protobuf.descriptor import Descriptor, FileDescriptor
from google.protobuf.descriptor_pb2 import DescriptorProto, FileDescriptorProto
from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2
from grpc_health.v1 import health_pb2
from grpc_health.v1.health import aio as health_aio
from grpc_reflection.v1alpha import reflection_pb2
from grpc_reflection.v1alpha.reflection import aio as reflection_aio

from shalekv.errors import ShaleError
from shalekv.read.memory_budget import MemoryBudget, Stalls
from shalekv.rpc.adapter import Adapter, SwitchableHandler
from shalekv.runtime import Runtime
from shalekv.server.readiness import Readiness
from shalekv.server.service import AdminService, Call, KvService, WatchService
from shalekv.server.whole_status import add_calls
from shalekv.settings import KIB, EndpointSettings, LimitSettings, LogLevel
from shalekv.v1 import admin_pb2 as admin
from shalekv.v1 import kv_pb2 as kv
from shalekv.v1 import safekeeper_pb2 as wire
from shalekv.wording import READ, WRITE

if TYPE_CHECKING:
    from shalekv.server.safekeeper.service import SafekeeperService


KV_SERVICE = kv.DESCRIPTOR.services_by_name["KV"].full_name
ADMIN_SERVICE = admin.DESCRIPTOR.services_by_name["Admin"].full_name
SAFEKEEPER_SERVICE = wire.DESCRIPTOR.services_by_name["Safekeeper"].full_name


def kv_methods(
    service: KvService, watches: WatchService, adapter: Adapter, limits: LimitSettings
) -> grpc.GenericRpcHandler:
    """Return the methods of `shalekv.v1.KV`, the data API."""
    methods = {
        "Get": adapter.unary(service.get, kv.GetRequest),
        "BatchGet": adapter.unary(service.batch_get, kv.BatchGetRequest),
        "Put": adapter.unary(service.put, kv.PutRequest),
        "Delete": adapter.unary(service.delete, kv.DeleteRequest),
        "DeleteRange": adapter.unary(service.delete_range, kv.DeleteRangeRequest),
        "Write": adapter.unary(service.write, kv.WriteRequest),
        "Txn": adapter.unary(service.txn, kv.TxnRequest),
        "Scan": adapter.unary_stream(service.scan, kv.ScanRequest),
        "Session": adapter.session(service, limits),
        "Watch": adapter.watch(watches),
    }
    return grpc.method_handlers_generic_handler(KV_SERVICE, methods)


def admin_methods(service: AdminService, adapter: Adapter) -> grpc.GenericRpcHandler:
    """Return the methods of `shalekv.v1.Admin`, the operator's API."""

    async def status(request: admin.StatusRequest, call: Call) -> admin.StatusReply:
        """Add the counts of calls, which the role does not have, to its status."""
        answer = service.status(request, call)
        reply = answer if isinstance(answer, Message) else await answer
        add_calls(reply, adapter.counts.statuses())
        return reply

    snapshots = service.snapshots
    methods = {
        "Status": adapter.unary(status, admin.StatusRequest),
        "Stats": adapter.unary(service.stats, admin.StatsRequest),
        "CreateSnapshot": adapter.unary(snapshots.create, admin.CreateSnapshotRequest),
        "RenewSnapshot": adapter.unary(snapshots.renew, admin.RenewSnapshotRequest),
        "ListSnapshots": adapter.unary(snapshots.list, admin.ListSnapshotsRequest),
        "DeleteSnapshot": adapter.unary(snapshots.delete, admin.DeleteSnapshotRequest),
        "IngestSst": adapter.unary(service.ingest_sst, admin.IngestSstRequest),
    }
    return grpc.method_handlers_generic_handler(ADMIN_SERVICE, methods)


def safekeeper_methods(service: SafekeeperService, adapter: Adapter) -> grpc.GenericRpcHandler:
    """Return the methods of `shalekv.v1.Safekeeper`."""
    methods = {
        "Admit": adapter.unary(service.admit, wire.AdmitRequest),
        "Propose": adapter.duplex(service.propose, wire.ProposeRequest),
        "Relay": adapter.duplex(service.relay, wire.RelayRequest),
        "Fetch": adapter.unary_stream(service.fetch, wire.FetchRequest),
        "Tail": adapter.unary_stream(service.tail, wire.TailRequest),
        "GetSafekeeperStatus": adapter.unary(service.status, wire.GetSafekeeperStatusRequest),
        "Retire": adapter.unary(service.retire, wire.RetireRequest),
    }
    return grpc.method_handlers_generic_handler(SAFEKEEPER_SERVICE, methods)


HEALTH_SERVICE = health_pb2.DESCRIPTOR.services_by_name["Health"].full_name
WHOLE_SERVER = ""  # name of the whole server in health checks
WATCHERS_S = 1.0  # timeout for sending a new health status to those who watch it

V1_PACKAGE = "grpc.reflection.v1"
V1ALPHA_PACKAGE = "grpc.reflection.v1alpha"
_REFLECTION_SERVICE = "ServerReflection"

# grpc.aio lets through this multiple of `concurrent_calls_max` calls of any kind, health checks and
# reflection included. The adapter limits the calls of our own services, with an error that says
# more.
CALLS_OF_ANY_KIND = 2
# Time for replies at the end: one that was made may not be on the wire yet. Health watches never
# end by themselves.
LAST_REPLIES_S = 0.25
# Time in which new calls are still refused with a reason, because their senders could not know yet
# that the server ends. After it the port closes; then grpc cancels such calls, and their outcome is
# unknown.
LAST_CALLS_S = 0.1
# Time for the ends of watches, which update the leases of their consumers with some requests to the
# store.
LAST_EDITS_S = 1.0
# Calls of one connection at once: a client that starts more waits for others of its own.
CONCURRENT_STREAMS_MAX = 256
METADATA_BYTES_MAX = 16 * KIB  # of a call; ours are under 1 KiB, so this leaves space for proxies
# A connection that has not sent HTTP/2 by then is of no client of gRPC.
HANDSHAKE_TIMEOUT_MS = 10_000
CONNECTION_IDLE_MS = 300_000  # clients connect again at their next call, which takes one round trip
# Calls may run so long after their connection was asked to reconnect: longer than any but watches
# and scans, which clients continue elsewhere.
CONNECTION_AGE_GRACE_MS = 30_000
# A client that pings more often while it sends no data is disconnected. Clients of gRPC ping every
# 30 seconds or less often.
PING_INTERVAL_MIN_MS = 20_000
GRPC_LOGGER = "grpc._cython.cygrpc"
OWN_SERVICES = (KV_SERVICE, ADMIN_SERVICE)
READY = Readiness()

_Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"
_Context: TypeAlias = grpc.aio.ServicerContext[Any, Any]
_Behaviour: TypeAlias = Callable[..., Any]  # (request or requests, context)

_log = structlog.get_logger(__name__)


class AccessLog(grpc.aio.ServerInterceptor):
    """Logs each call at its end, in a debug line with peer, code and duration.

    It is installed only when debug lines are shown, since it costs each call some microseconds.
    """

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[_Handler | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> _Handler | None:
        """Wrap the handler of the method to log its end; log unknown methods here."""
        method = handler_call_details.method
        handler = await continuation(handler_call_details)
        if handler is None:
            _log.debug("unknown method", method=method)
            return None
        return _with_behaviour(handler, lambda behaviour: _logged(behaviour, method))


def _with_behaviour(handler: _Handler, change: Callable[[_Behaviour], _Behaviour]) -> _Handler:
    """Copy `handler`, with its behaviour passed through `change`."""
    parsing = (handler.request_deserializer, handler.response_serializer)
    if handler.unary_unary is not None:
        return grpc.unary_unary_rpc_method_handler(change(handler.unary_unary), *parsing)
    if handler.unary_stream is not None:
        return grpc.unary_stream_rpc_method_handler(change(handler.unary_stream), *parsing)
    if handler.stream_unary is not None:
        return grpc.stream_unary_rpc_method_handler(change(handler.stream_unary), *parsing)
    if handler.stream_stream is not None:
        return grpc.stream_stream_rpc_method_handler(change(handler.stream_stream), *parsing)
    return handler


def _logged(behaviour: _Behaviour, method: str) -> _Behaviour:
    def watch(context: _Context) -> None:
        began_s = time.monotonic()
        peer = context.peer()

        def log(ended: _Context) -> None:
            duration_ms = round((time.monotonic() - began_s) * 1000.0, 3)
            _log.debug("call", method=method, peer=peer, code=_code(ended), duration_ms=duration_ms)

        # The stubs want an instance of a class that exists in the stubs alone.
        context.add_done_callback(log)  # type: ignore[arg-type]

    # By the kind of the function grpc.aio knows whether a stream yields or writes its replies.
    if inspect.isasyncgenfunction(behaviour):

        async def generate(request: Any, context: _Context) -> AsyncIterator[Any]:
            watch(context)
            async for reply in behaviour(request, context):
                yield reply

        return generate

    async def answer(request: Any, context: _Context) -> Any:
        watch(context)
        return await behaviour(request, context)

    return answer


def _code(context: _Context) -> str:
    code: grpc.StatusCode | None = context.code()
    if code is not None:
        return code.name
    return grpc.StatusCode.OK.name if context.done() else grpc.StatusCode.CANCELLED.name


class HealthService:
    """Implementation of `grpc.health.v1`: whether this process serves, as a whole and by service.

    Besides the gRPC services there are two names for readiness: `shalekv.read` and `shalekv.write`.
    The whole server, and `shalekv.v1.KV`, are SERVING while both are; at a reader, while
    `shalekv.read` is.
    """

    def __init__(self) -> None:
        """Begin with nothing reported."""
        self._servicer = health_aio.HealthServicer()
        self._reported: dict[str, bool | None] = {WHOLE_SERVER: None}  # None: not yet

    def methods(self) -> grpc.GenericRpcHandler:
        """Return the methods of the health service.

        `List` is left out: the packaged servicer does not implement it.
        """
        methods = {
            "Check": grpc.unary_unary_rpc_method_handler(
                self._servicer.Check,
                request_deserializer=health_pb2.HealthCheckRequest.FromString,
                response_serializer=health_pb2.HealthCheckResponse.SerializeToString,
            ),
            "Watch": grpc.unary_stream_rpc_method_handler(
                self._servicer.Watch,
                request_deserializer=health_pb2.HealthCheckRequest.FromString,
                response_serializer=health_pb2.HealthCheckResponse.SerializeToString,
            ),
        }
        return grpc.method_handlers_generic_handler(HEALTH_SERVICE, methods)

    async def report(self, serves: Mapping[str, bool]) -> None:
        """Report these services (full names) as SERVING or NOT_SERVING, to watches as well."""
        for service, is_serving in serves.items():
            if self._reported.get(service) is is_serving:
                continue
            await self._set(service, is_serving=is_serving)
            self._reported[service] = is_serving

    async def stop(self, services: Iterable[str] = ()) -> None:
        """Report everything, `services` too, as NOT_SERVING, whatever was reported before."""
        self._reported |= dict.fromkeys(services)
        for service in self._reported:
            await self._set(service, is_serving=False)
            self._reported[service] = False

    async def _set(self, service: str, *, is_serving: bool) -> None:
        """Set a status, and send it to those who watch it (`Health.Watch`), within `WATCHERS_S`.

        A watch whose client reads nothing delays the other watches, but not the caller.
        """
        status = health_pb2.HealthCheckResponse
        with suppress(TimeoutError):
            async with asyncio.timeout(WATCHERS_S):
                await self._servicer.set(
                    service, status.SERVING if is_serving else status.NOT_SERVING
                )


def reflection_methods(services: Iterable[str]) -> list[grpc.GenericRpcHandler]:
    """Return reflection services that describe `services` (full names) and themselves.

    With reflection, tools work without proto files. The packaged service answers as
    `grpc.reflection.v1alpha` alone, and current tools ask for `grpc.reflection.v1` first. Both have
    the same messages on the wire, so one servicer serves both; the descriptors of v1 are those of
    v1alpha under another package.

    The descriptors come from a pool of their own: those in generated Python code lack the JSON
    names of fields, without which tools print names that JSON does not use.
    """
    services = list(services)
    own = [f"{package}.{_REFLECTION_SERVICE}" for package in (V1_PACKAGE, V1ALPHA_PACKAGE)]
    servicer = reflection_aio.ReflectionServicer([*services, *own], _pool(services))
    method = grpc.stream_stream_rpc_method_handler(
        servicer.ServerReflectionInfo,
        request_deserializer=reflection_pb2.ServerReflectionRequest.FromString,
        response_serializer=reflection_pb2.ServerReflectionResponse.SerializeToString,
    )
    methods = {"ServerReflectionInfo": method}
    return [grpc.method_handlers_generic_handler(name, methods) for name in own]


def _pool(services: Iterable[str]) -> descriptor_pool.DescriptorPool:
    """Collect the files of `services`, of reflection and of errors, and all that they import."""
    known = descriptor_pool.Default()
    roots: list[FileDescriptor] = [known.FindServiceByName(service).file for service in services]
    details = (reflection_pb2, status_pb2, error_details_pb2)  # the last two: what errors carry
    roots += [known.FindFileByName(module.DESCRIPTOR.name) for module in details]
    files: dict[str, FileDescriptorProto] = {}
    for root in roots:
        for file in _with_imports(root):
            if file.name not in files:
                files[file.name] = _with_json_names(file)
    alpha = text_format.MessageToString(files[reflection_pb2.DESCRIPTOR.name])
    renamed = alpha.replace("v1alpha", "v1")
    v1 = text_format.Parse(renamed, FileDescriptorProto())
    pool = descriptor_pool.DescriptorPool()
    for proto in [*files.values(), v1]:
        pool.AddSerializedFile(proto.SerializeToString())
    return pool


def _with_imports(file: FileDescriptor) -> Iterator[FileDescriptor]:
    """Yield `file` after the files that it imports, each after its own imports."""
    for imported in file.dependencies:
        yield from _with_imports(imported)
    yield file


def _with_json_names(file: FileDescriptor) -> FileDescriptorProto:
    proto = FileDescriptorProto()
    file.CopyToProto(proto)
    for message in proto.message_type:
        _add_json_names(message, file.message_types_by_name[message.name])
    return proto


def _add_json_names(proto: DescriptorProto, message: Descriptor) -> None:
    for field in proto.field:
        field.json_name = message.fields_by_name[field.name].json_name
    for nested in proto.nested_type:
        _add_json_names(nested, message.nested_types_by_name[nested.name])


class Server:
    """One listening address and the services behind it."""

    def __init__(
        self, settings: EndpointSettings, runtime: Runtime, *, limits: LimitSettings | None = None
    ) -> None:
        """Bind the address; needs a running loop.

        Raises:
            OSError: the address cannot be bound; EADDRINUSE when another process has it.
        """
        self._server = grpc.aio.server(
            options=channel_options(settings),
            interceptors=[AccessLog()] if settings.log_level is LogLevel.DEBUG else [],
            maximum_concurrent_rpcs=CALLS_OF_ANY_KIND * settings.concurrent_calls_max,
        )
        self._limits = limits or LimitSettings()
        self._runtime = runtime
        stalls = Stalls(runtime.clock, self._limits.result_stalled_ms)
        self.session_budget = MemoryBudget(self._limits.sessions_bytes_max, stalls)
        self._calls_max = settings.concurrent_calls_max
        self._adapter = self._new_adapter()
        self._methods = SwitchableHandler()
        self._health = HealthService()
        self._has_debug_services = settings.debug_services
        self._is_started = self._is_refusing = False
        host, _, port = settings.listen.rpartition(":")
        # Checked first: of a name with several addresses grpc is content to bind one, so that two
        # servers could share a port.
        refusal = _bind_error(host, int(port)) if int(port) else None
        if refusal is not None:
            raise refusal
        try:
            bound = self._server.add_insecure_port(settings.listen)
        except RuntimeError as refused:
            free = f"{host}:{port} was refused, and may be free by now"
            raise _bind_error(host, int(port)) or OSError(errno.EADDRNOTAVAIL, free) from refused
        self.listen = f"{host}:{bound}"

    async def start(
        self,
        kv_service: KvService,
        admin_service: AdminService,
        watches: WatchService,
        readiness: Readiness = READY,
    ) -> None:
        """Serve from now on, beginning with `readiness`."""
        self._adapter = self._new_adapter()  # after `stand_by` the old one refuses all calls
        self._methods.switch_to(
            kv_methods(kv_service, watches, self._adapter, self._limits),
            admin_methods(admin_service, self._adapter),
        )
        self._is_refusing = False
        await self.report(readiness)
        await self._listen(OWN_SERVICES)

    async def report(self, readiness: Readiness) -> None:
        """Report `readiness` to health checks, unless new calls are refused."""
        if self._is_refusing:
            return
        await self._health.report(
            {
                WHOLE_SERVER: readiness.is_ready,
                KV_SERVICE: readiness.is_ready,
                ADMIN_SERVICE: True,
                READ: readiness.reads is None,
                WRITE: readiness.is_ready_for_writes,
            }
        )

    async def start_safekeeper(self, service: SafekeeperService) -> None:
        """Serve as a safekeeper from now on."""
        self._methods.switch_to(safekeeper_methods(service, self._adapter))
        await self._health.report({WHOLE_SERVER: True, SAFEKEEPER_SERVICE: True})
        await self._listen([SAFEKEEPER_SERVICE])

    async def stand_by(self, error: ShaleError) -> None:
        """Report NOT_SERVING, and refuse each call with `error` until the next `start`.

        Calls in progress are cut off, so call `refuse` and `drain` before.
        """
        self._is_refusing = True
        before, self._adapter = self._adapter, self._new_adapter()
        self._adapter.refuse(error)
        self._methods.switch_to(self._adapter.refusing_handler(OWN_SERVICES))
        await self._health.stop((*OWN_SERVICES, READ, WRITE))
        await self._listen(OWN_SERVICES)
        before.refuse(error)
        before.cut_off()
        await before.wait_for_cleanups(LAST_EDITS_S)

    def calls(self) -> Iterator[admin.CallStatus]:
        """Return the counts of the calls that were answered, by method."""
        return self._adapter.counts.statuses()

    def set_refusal(self, error: ShaleError) -> None:
        """Refuse each call with `error` from now on. REQUIRES: `stand_by`, and no `start` since."""
        self._adapter.refuse(error)

    async def refuse(self, error: ShaleError) -> None:
        """Report NOT_SERVING, and refuse each new call with `error`; calls in progress go on."""
        self._is_refusing = True
        self._adapter.refuse(error)
        await self._health.stop()

    async def drain(self, grace_ms: float) -> bool:
        """Wait for at most `grace_ms` until no call is in progress; returns False if some are."""
        try:
            async with asyncio.timeout(grace_ms / 1000.0):
                await self._adapter.idle()
        except TimeoutError:
            return False
        return True

    async def stop(self) -> None:
        """Close the port and cancel the calls that are still in progress."""
        if self._is_refusing:
            await asyncio.sleep(LAST_CALLS_S)
        await self._server.stop(LAST_REPLIES_S)
        await self._adapter.wait_for_cleanups(LAST_EDITS_S)

    def _new_adapter(self) -> Adapter:
        return Adapter(
            self._runtime,
            calls_max=self._calls_max,
            limits=self._limits,
            session_budget=self.session_budget,
        )

    async def _listen(self, services: Sequence[str]) -> None:
        if self._is_started:
            return
        self._is_started = True
        listed = [*services, HEALTH_SERVICE]
        if self._has_debug_services:
            listed.append(_add_channelz(self._server))
        self._server.add_generic_rpc_handlers(
            [self._methods, self._health.methods(), *reflection_methods(listed)]
        )
        logging.getLogger(GRPC_LOGGER).addFilter(_is_worth_logging)
        await self._server.start()


def _add_channelz(server: grpc.aio.Server) -> str:
    """Add channelz, the service with the statistics of grpc; returns its full name."""
    from grpc_channelz.v1 import channelz, channelz_pb2  # noqa: PLC0415 - for debugging alone

    channelz.add_channelz_servicer(server)
    return channelz_pb2.DESCRIPTOR.services_by_name["Channelz"].full_name


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
        ("grpc.http2.min_ping_interval_without_data_ms", PING_INTERVAL_MIN_MS),
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


def _bind_error(host: str, port: int) -> OSError | None:
    """Return the error of the operating system, which grpc hides; None: the address is free."""
    try:
        for family, kind, protocol, _, address in socket.getaddrinfo(
            host.strip("[]"), port, type=socket.SOCK_STREAM
        ):
            with socket.socket(family, kind, protocol) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind(address)
                probe.listen()
    except OSError as refused:
        return OSError(refused.errno, f"{host}:{port}: {refused.strerror}")
    return None
