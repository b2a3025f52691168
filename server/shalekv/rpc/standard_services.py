"""The services that tools expect of any gRPC server: health checks, and reflection.

Reflection lets tools work without proto files. It exists under two names, of which current tools
ask for `grpc.reflection.v1` first. Both have the same messages on the wire, so both are served with
those of v1alpha; the descriptors of v1 are the same under another package.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping
from functools import cached_property
from typing import cast

from google.protobuf import descriptor_pool, text_format
from google.protobuf.descriptor import Descriptor, FileDescriptor
from google.protobuf.descriptor_pb2 import DescriptorProto, FileDescriptorProto
from google.protobuf.message import DecodeError, Message
from google.rpc import error_details_pb2, status_pb2
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2

from shalekv.rpc.adapter import Adapter
from shalekv.rpc.calls import Method, StreamCall
from shalekv.rpc.methods import with_paths
from shalekv.server.service import Call
from shalekv_wire.status import CallFailed, StatusCode

HEALTH_SERVICE = health_pb2.DESCRIPTOR.services_by_name["Health"].full_name
WHOLE_SERVER = ""  # name of the whole server in health checks
NO_SUCH_CALLS = "this process answers no such calls"  # why another service is not ready
V1_PACKAGE = "grpc.reflection.v1"
V1ALPHA_PACKAGE = "grpc.reflection.v1alpha"

NO_REASONS: Mapping[str, str] = {}

_Check = health_pb2.HealthCheckRequest
_Health = health_pb2.HealthCheckResponse
# The stubs of the package leave them out.
_ListRequest = cast("type[Message]", vars(health_pb2)["HealthListRequest"])
_ListResponse = cast("type[Message]", vars(health_pb2)["HealthListResponse"])
_Ask = reflection_pb2.ServerReflectionRequest
_Answer = reflection_pb2.ServerReflectionResponse


class HealthService:
    """Implementation of `grpc.health.v1`: whether this process serves, as a whole and by service.

    Besides the gRPC services there are two names for readiness: `shalekv.read` and `shalekv.write`.
    The whole server, and `shalekv.v1.KV`, are SERVING while both are; at a reader, while
    `shalekv.read` is.
    """

    def __init__(self) -> None:
        """Begin with nothing reported."""
        self._serves: dict[str, bool | None] = {WHOLE_SERVER: None}  # None: not yet
        self._why: Mapping[str, str] = {}  # the reasons of those that don't
        self._changed = asyncio.Event()  # replaced at each change

    def methods(self, adapter: Adapter, streams: Adapter) -> Mapping[str, Method]:
        """Return the methods of the health service by path.

        Those that stay open are of `streams`, so that no number of them keeps others from asking.
        """
        methods: dict[str, Method] = {
            "Check": adapter.unary(self._check, _Check),
            "List": adapter.unary(self._list, _ListRequest),
            "Watch": streams.unary_stream(self._watch, _Check),
        }
        return with_paths(HEALTH_SERVICE, methods)

    def report(self, serves: Mapping[str, bool], why: Mapping[str, str] = NO_REASONS) -> None:
        """Report these services (full names) as SERVING or NOT_SERVING, to watches as well.

        `why` has the reasons of the latter, for `problem`.
        """
        self._why = why
        if any(self._serves.get(service) is not value for service, value in serves.items()):
            self._serves |= serves
            changed, self._changed = self._changed, asyncio.Event()
            changed.set()

    def stop(self, why: str, services: Iterable[str] = ()) -> None:
        """Report everything, `services` too, as NOT_SERVING, whatever was reported before."""
        stopped = [*self._serves, *services]
        self.report(dict.fromkeys(stopped, False), dict.fromkeys(stopped, why))

    def problem(self, service: str) -> str | None:
        """Say why a check of a service does not succeed, without names of places; None: it does."""
        if self._serves.get(service):
            return None
        if self._serves[WHOLE_SERVER] is None:
            return "this process does not serve yet: it opens its database, or its logs"
        return self._why.get(service, NO_SUCH_CALLS)

    def _check(self, request: _Check, _call: Call) -> _Health:
        status = self._status(request.service)
        if status == _Health.SERVICE_UNKNOWN:
            raise CallFailed(StatusCode.NOT_FOUND, "the server has no such service")
        return _Health(status=status)

    def _list(self, _request: Message, _call: Call) -> Message:
        known = [service for service, serves in self._serves.items() if serves is not None]
        statuses = {service: _Health(status=self._status(service)) for service in known}
        return _ListResponse(statuses=statuses)

    async def _watch(self, request: _Check, _call: Call) -> AsyncIterator[_Health]:
        """Yield the status now and after each change; a slow client gets the latest alone."""
        sent = None
        while True:
            changed, status = self._changed, self._status(request.service)
            if status != sent:
                sent = status
                yield _Health(status=status)
            else:
                await changed.wait()

    def _status(self, service: str) -> int:
        serves = self._serves.get(service)
        if serves is None:
            return _Health.SERVICE_UNKNOWN
        return _Health.SERVING if serves else _Health.NOT_SERVING


class ReflectionService:
    """Implementation of both reflection services.

    The descriptors come from a pool of their own: those in generated Python code lack the JSON
    names of fields, without which tools print names that JSON does not use.
    """

    def __init__(self, services: Iterable[str]) -> None:
        """Describe `services` (full names) and reflection itself."""
        self._services = sorted(services)
        self._own = [f"{package}.ServerReflection" for package in (V1_PACKAGE, V1ALPHA_PACKAGE)]

    def methods(self, adapter: Adapter) -> Mapping[str, Method]:
        """Return the methods of both services by path."""
        methods = {"ServerReflectionInfo": adapter.conversation(self._serve, _Ask)}
        return {
            path: method for own in self._own for path, method in with_paths(own, methods).items()
        }

    async def _serve(self, call: StreamCall) -> None:
        """Answer each request with one message, in their order."""
        while (data := await call.read()) is not None:
            try:
                request = _Ask.FromString(data)
            except DecodeError:
                raise CallFailed(StatusCode.INVALID_ARGUMENT, "the bytes are no request") from None
            await call.write(self._answer(request).SerializeToString())

    def _answer(self, request: _Ask) -> _Answer:
        answer = _Answer(valid_host=request.host, original_request=request)
        try:
            self._fill(answer, request)
        except KeyError:
            answer.error_response.error_code = int(StatusCode.NOT_FOUND)
            answer.error_response.error_message = "there is nothing with this name"
        return answer

    def _fill(self, answer: _Answer, request: _Ask) -> None:
        """Add what was asked for. Raises `KeyError` for unknown names."""
        kind = request.WhichOneof("message_request") or ""
        pool = self._pool
        find_file: Mapping[str, Callable[[], FileDescriptor]] = {
            "file_by_filename": lambda: pool.FindFileByName(request.file_by_filename),
            "file_containing_symbol": lambda: pool.FindFileContainingSymbol(
                request.file_containing_symbol
            ),
        }
        if kind == "list_services":
            names = sorted([*self._services, *self._own])
            answer.list_services_response.service.extend(
                reflection_pb2.ServiceResponse(name=name) for name in names
            )
        elif kind == "all_extension_numbers_of_type":  # proto3 has no extensions of ours
            pool.FindMessageTypeByName(request.all_extension_numbers_of_type)
            numbers = answer.all_extension_numbers_response
            numbers.base_type_name = request.all_extension_numbers_of_type
        elif kind in find_file:
            files = {file.name: file.serialized_pb for file in _with_imports(find_file[kind]())}
            # Some clients take the first one for the file that they asked for.
            answer.file_descriptor_response.file_descriptor_proto.extend(reversed(files.values()))
        else:
            raise KeyError(kind)

    @cached_property
    def _pool(self) -> descriptor_pool.DescriptorPool:
        return _pool(self._services)


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
