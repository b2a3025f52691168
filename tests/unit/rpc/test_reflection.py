"""Server reflection under both of its names."""

from __future__ import annotations

from typing import Any

import pytest
from google.protobuf import descriptor_pb2
from grpc_reflection.v1alpha import reflection_pb2

from tests.kit.serving.rpc import Serving, serving

NAMES = ["grpc.reflection.v1", "grpc.reflection.v1alpha"]
SERVICES = [
    "grpc.health.v1.Health",
    "grpc.reflection.v1.ServerReflection",
    "grpc.reflection.v1alpha.ServerReflection",
    "shalekv.v1.Admin",
    "shalekv.v1.KV",
]
Request = reflection_pb2.ServerReflectionRequest
Response = reflection_pb2.ServerReflectionResponse


async def _ask(it: Serving[Any], package: str, *requests: Request) -> list[Response]:
    path = f"/{package}.ServerReflection/ServerReflectionInfo"
    call = it.raw.stream_stream(path, [request.SerializeToString() for request in requests])
    return [Response.FromString(reply) async for reply in call]


def _files(response: Response) -> list[descriptor_pb2.FileDescriptorProto]:
    files = response.file_descriptor_response.file_descriptor_proto
    return [descriptor_pb2.FileDescriptorProto.FromString(file) for file in files]


@pytest.mark.parametrize("package", NAMES)
async def test_all_services_are_listed(package: str) -> None:
    """Reflection lists our services, health, and reflection itself."""
    async with serving() as it:
        (listed,) = await _ask(it, package, Request(list_services="*"))
    assert [service.name for service in listed.list_services_response.service] == SERVICES


@pytest.mark.parametrize("package", NAMES)
@pytest.mark.parametrize("service", SERVICES)
async def test_every_listed_service_is_described(package: str, service: str) -> None:
    """The files of a service contain it and all that they import."""
    async with serving() as it:
        (found,) = await _ask(it, package, Request(file_containing_symbol=service))
    files = _files(found)
    assert service in {f"{file.package}.{it.name}" for file in files for it in file.service}
    assert {name for file in files for name in file.dependency} <= {file.name for file in files}


async def test_unknown_symbols_are_not_found() -> None:
    """An unknown symbol gets an error in the stream, which goes on."""
    async with serving() as it:
        unknown, listed = await _ask(
            it,
            NAMES[0],
            Request(file_containing_symbol="shalekv.v1.Nobody"),
            Request(list_services="*"),
        )
    assert unknown.error_response.error_code == 5
    assert len(listed.list_services_response.service) == len(SERVICES)
