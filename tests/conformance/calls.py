"""Calls by name with bytes: what a server answers, or how it fails."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import grpc
from google.protobuf.descriptor import MethodDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from google.rpc import error_details_pb2, status_pb2

from shalekv.v1 import admin_pb2, kv_pb2
from tests.conformance.matching import Disagreement, Failure
from tests.conformance.notation import BadCase

CALL_TIMEOUT_S = 30
DATABASE_ID_BYTES = 16
_DETAILS_KEY = "grpc-status-details-bin"
_SERVICES = {
    "KV": kv_pb2.DESCRIPTOR.services_by_name["KV"],
    "Admin": admin_pb2.DESCRIPTOR.services_by_name["Admin"],
}

_DetailT = TypeVar("_DetailT", bound=Message)


class CallFailed(Exception):
    """The server answered with an error."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(str(failure))
        self.failure = failure


def method_of(name: str) -> MethodDescriptor:
    """A method by its name: `Get` of KV, or `Admin.Status`."""
    service, _, method = name.rpartition(".")
    try:
        found: MethodDescriptor = _SERVICES[service or "KV"].methods_by_name[method]
    except KeyError:
        raise BadCase(f"there is no call {name}") from None
    return found


class Caller:
    """Calls over one channel, and checks what holds for every reply."""

    def __init__(
        self, channel: grpc.aio.Channel, *, timeout_s: float | None = CALL_TIMEOUT_S
    ) -> None:
        """The limits of `channel` are those of gRPC, as in any client."""
        self._channel = channel
        self._timeout_s = timeout_s
        self._database_id = b""

    async def unary(self, method: MethodDescriptor, request: bytes) -> Message:
        call: Any = self._channel.unary_unary(_path(method))
        with _reporting_failures():
            return self.reply_of(method, await call(request, timeout=self._timeout_s))

    async def unary_stream(self, method: MethodDescriptor, request: bytes) -> list[Message]:
        call: Any = self._channel.unary_stream(_path(method))
        with _reporting_failures():
            replies = call(request, timeout=self._timeout_s)
            return [self.reply_of(method, data) async for data in replies]

    def stream(self, method: MethodDescriptor) -> Stream:
        call: Any = self._channel.stream_stream(_path(method))
        return Stream(self, method, call(timeout=self._timeout_s))

    def reply_of(self, method: MethodDescriptor, data: bytes) -> Message:
        reply: Message = GetMessageClass(method.output_type).FromString(data)
        self._check(reply, method.output_type.name)
        return reply

    def _check(self, message: Message, path: str) -> None:
        if isinstance(message, kv_pb2.ReplyHeader):
            self._check_header(message, path)
            return
        for field, value in message.ListFields():
            if field.message_type is None or field.message_type.GetOptions().map_entry:
                continue
            for part in value if field.is_repeated else [value]:
                self._check(part, f"{path}.{field.name}")

    def _check_header(self, header: kv_pb2.ReplyHeader, path: str) -> None:
        # A further page of a scan is as old as the scan.
        is_stale = header.staleness_ms > 0 and path != "ScanReply.header"
        self._database_id = self._database_id or header.database_id
        problems = {
            "database_id has not 16 bytes": len(header.database_id) != DATABASE_ID_BYTES,
            "database_id is not that of other replies": header.database_id != self._database_id,
            "role is not known": header.role not in {kv_pb2.ROLE_WRITER, kv_pb2.ROLE_READER},
            "epoch is not set": not header.epoch,
            "the writer is stale": header.role == kv_pb2.ROLE_WRITER and is_stale,
        }
        for problem, is_so in problems.items():
            if is_so:
                raise Disagreement(path, f"{problem}: {header}")


@dataclass(frozen=True, slots=True)
class Stream:
    """Requests and replies of one call, each when the case wants it."""

    caller: Caller
    method: MethodDescriptor
    call: Any

    async def send(self, request: bytes) -> None:
        """Send one message; `read` raises the failure of the call."""
        try:
            await self.call.write(request)
        except (grpc.aio.AioRpcError, grpc.aio.BaseError, asyncio.InvalidStateError):
            return

    async def end(self) -> None:
        try:
            await self.call.done_writing()
        except (grpc.aio.AioRpcError, grpc.aio.BaseError, asyncio.InvalidStateError):
            return

    async def read(self) -> Message | None:
        """The next reply; None: the server has ended the call without an error."""
        with _reporting_failures():
            data = await self.call.read()
            if data is not grpc.aio.EOF:
                return self.caller.reply_of(self.method, data)
            if await self.call.code() is not grpc.StatusCode.OK:
                raise CallFailed(
                    _failure(
                        await self.call.code(),
                        await self.call.details(),
                        await self.call.trailing_metadata(),
                    )
                )
            return None

    def close(self) -> None:
        """Give the call up, if it has not ended."""
        self.call.cancel()


def _path(method: MethodDescriptor) -> str:
    return f"/{method.containing_service.full_name}/{method.name}"


@contextmanager
def _reporting_failures() -> Iterator[None]:
    try:
        yield
    except grpc.aio.AioRpcError as error:
        raise CallFailed(
            _failure(error.code(), error.details(), error.trailing_metadata())
        ) from None


def _failure(code: grpc.StatusCode, message: str | None, trailers: Any) -> Failure:
    status = status_pb2.Status()
    for key, value in trailers or ():
        if key == _DETAILS_KEY:
            status.ParseFromString(value)
    info = _detail(status, error_details_pb2.ErrorInfo())
    bad = _detail(status, error_details_pb2.BadRequest())
    retry = _detail(status, error_details_pb2.RetryInfo())
    if status.details and status.code != code.value[0]:
        raise Disagreement("error", f"{code.name}, and in its details code {status.code}")
    return Failure(
        code=code.name,
        message=message or "",
        domain=info.domain if info else None,
        reason=info.reason if info else "",
        metadata=dict(info.metadata) if info else {},
        bad_fields=tuple(v.field for v in bad.field_violations) if bad else (),
        retry_delay_ms=retry.retry_delay.ToMilliseconds() if retry else None,
    )


def _detail(status: status_pb2.Status, into: _DetailT) -> _DetailT | None:
    return next((into for detail in status.details if detail.Unpack(into)), None)
