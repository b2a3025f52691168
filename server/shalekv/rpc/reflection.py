"""Server reflection under both of its names, so that tools work without proto files.

The packaged service answers as `grpc.reflection.v1alpha` alone, and current tools ask for
`grpc.reflection.v1` first. Both have the same messages on the wire, so one servicer serves both;
the descriptors of v1 are those of v1alpha under another package.

What is told of our services is read from a pool of its own: the descriptors in generated Python
code lack the JSON names of fields, without which tools print names that JSON does not use.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import grpc
from google.protobuf import descriptor_pool, text_format
from google.protobuf.descriptor import Descriptor, FileDescriptor
from google.protobuf.descriptor_pb2 import DescriptorProto, FileDescriptorProto
from google.rpc import error_details_pb2, status_pb2
from grpc_reflection.v1alpha import reflection_pb2
from grpc_reflection.v1alpha.reflection import aio as reflection_aio

V1_PACKAGE = "grpc.reflection.v1"
V1ALPHA_PACKAGE = "grpc.reflection.v1alpha"
_SERVICE = "ServerReflection"


def reflection_methods(services: Iterable[str]) -> list[grpc.GenericRpcHandler]:
    """The reflection services, which tell of `services` (full names) and of themselves."""
    services = list(services)
    own = [f"{package}.{_SERVICE}" for package in (V1_PACKAGE, V1ALPHA_PACKAGE)]
    servicer = reflection_aio.ReflectionServicer([*services, *own], _pool(services))
    method = grpc.stream_stream_rpc_method_handler(
        servicer.ServerReflectionInfo,
        request_deserializer=reflection_pb2.ServerReflectionRequest.FromString,
        response_serializer=reflection_pb2.ServerReflectionResponse.SerializeToString,
    )
    methods = {"ServerReflectionInfo": method}
    return [grpc.method_handlers_generic_handler(name, methods) for name in own]


def _pool(services: Iterable[str]) -> descriptor_pool.DescriptorPool:
    """The files of `services`, of reflection and of errors, and all that they import."""
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
    """The files that `file` imports, each before those that import it, and `file`."""
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
