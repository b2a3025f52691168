"""Names in requests that try to leave the folder of the database."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from shalekv.v1 import admin_pb2, kv_pb2
from tests.kit.processes.processes import Processes

NAMES = (
    "..",
    "../../stolen",
    "/tmp/stolen",
    "a/../../stolen",
    "wal/00000000000000000000.sst",
    "..%2f..%2fstolen",
    "file:///tmp/stolen",
    "a\0b",
    "\\..\\stolen",
    "a\nb",
    "~root",
    "x" * 5_000,
)
DEPTH_MAX = 4  # of messages in messages
SERVICES = (
    kv_pb2.DESCRIPTOR.services_by_name["KV"],
    admin_pb2.DESCRIPTOR.services_by_name["Admin"],
)
FAULTS = {grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN, grpc.StatusCode.DATA_LOSS}
OBJECT = re.compile(
    r"clock|manifest/\d{20}\.manifest|wal/\d{20}\.sst|access/\d{20}\.policy|election/\d{20}\.lease"
    r"|levels/[0-9a-f]{8}-[0-9a-f]{4}-7[0-9a-f]{3}-[0-9a-f]{4}-[0-9a-f]{12}\.sst",
    re.ASCII,
)


def fill(message: Message, name: str, depth: int = DEPTH_MAX) -> None:
    """Put the name into every field of text or bytes; each `oneof` has its first field."""
    for field in first_of_each(message.DESCRIPTOR):
        is_list = field.is_repeated
        if field.type in (FieldDescriptor.TYPE_STRING, FieldDescriptor.TYPE_BYTES):
            value = name if field.type == FieldDescriptor.TYPE_STRING else name.encode()
            if is_list:
                getattr(message, field.name).append(value)
            else:
                setattr(message, field.name, value)
        elif field.message_type is not None and depth:
            inner = getattr(message, field.name)
            fill(inner.add() if is_list else inner, name, depth - 1)


def first_of_each(descriptor: Any) -> Iterator[FieldDescriptor]:
    met = set()
    for field in descriptor.fields:
        oneof = field.containing_oneof
        if oneof is None or oneof.name not in met:
            yield field
        if oneof is not None:
            met.add(oneof.name)


def variants(descriptor: Any, name: str) -> Iterator[Message]:
    """Requests with the name everywhere, and in one field alone, so that others do not hide it."""
    message = GetMessageClass(descriptor)()
    fill(message, name)
    yield message
    for field in descriptor.fields if name in NAMES[:4] else ():
        alone = GetMessageClass(descriptor)()
        fill(alone, name)
        for other in descriptor.fields:
            if other.name != field.name:
                alone.ClearField(other.name)
        yield alone


async def outcome(channel: grpc.aio.Channel, path: str, request: Message) -> grpc.StatusCode:
    method: Any = channel.unary_stream(path)
    call = method(request.SerializeToString(), timeout=20.0)
    try:
        async for _ in call:
            pass
    except grpc.aio.AioRpcError:
        pass  # the code says it
    code: grpc.StatusCode = await call.code()
    return code


def written_below(folder: Path, root: Path) -> tuple[set[str], set[str]]:
    """The files of the database at `root`, and all else in the folder that it is in."""
    found = [*folder.rglob("*")]
    files = {str(at.relative_to(root)) for at in found if root in at.parents and at.is_file()}
    return files, {str(at.relative_to(folder)) for at in found if root not in at.parents}


async def test_no_request_leaves_the_folder(processes: Processes, tmp_path: Path) -> None:
    """Whatever text or bytes a request has, only objects of the database are written, in its
    folder; and the server answers none of them with an internal error.
    """
    root = tmp_path / "folder" / "db"
    (tmp_path / "stolen").write_text("secret")
    server = await processes.serve(f"file://{root}")
    async with grpc.aio.insecure_channel(server.listen) as channel:
        for service in SERVICES:
            for method in service.methods:
                if method.client_streaming:
                    continue  # sessions and watches take the same messages
                for name in NAMES:
                    for request in variants(method.input_type, name):
                        path = f"/{service.full_name}/{method.name}"
                        code = await outcome(channel, path, request)
                        assert code not in FAULTS, (path, request)
    assert await server.stop() == 0, server.report()
    assert "secret" not in server.report()
    files, others = written_below(tmp_path, root)
    assert {name for name in files if not OBJECT.fullmatch(name)} == set()
    assert {"stolen", "folder", "folder/db"} <= others
    assert {name for name in others if "stolen" in name} == {"stolen"}
    assert (tmp_path / "stolen").read_text() == "secret"
