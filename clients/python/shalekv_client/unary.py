"""Operations that travel alone: one gRPC call each."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, Protocol, TypeAlias, TypeVar

import grpc

from shalekv.v1 import kv_pb2_grpc
from shalekv_client.cancellation import abandoned, is_task_cancelled
from shalekv_client.error_table import error_of, not_an_answer
from shalekv_client.operations import Operation

ResultT = TypeVar("ResultT")
RequestT_contra = TypeVar("RequestT_contra", contravariant=True)
ReplyT_co = TypeVar("ReplyT_co", covariant=True)


Note: TypeAlias = Callable[[Operation[Any], Any], None]  # called with each reply; may raise


def note_nothing(_operation: Operation[Any], _reply: Any) -> None:
    """For whoever wants the results alone."""


class Method(Protocol[RequestT_contra, ReplyT_co]):
    """A method of a gRPC stub with one request and one reply."""

    def __call__(
        self, request: RequestT_contra, /, *, timeout: float | None = None
    ) -> Awaitable[ReplyT_co]: ...


class UnaryCalls:
    """Sends each operation in a call of its own."""

    def __init__(
        self, stub: kv_pb2_grpc.KVStub, *, address: str, note: Note = note_nothing
    ) -> None:
        """`stub` calls the server at `address`."""
        self._stub = stub
        self._address = address
        self._note = note

    async def call(self, operation: Operation[ResultT], timeout_ms: float) -> ResultT:
        """The result of `operation`; raises the errors of `shalekv_client.errors`."""
        method = getattr(self._stub, operation.method)
        reply = await attempt(self._address, method, operation.request, timeout_ms)
        self._note(operation, reply)
        try:
            return operation.decode(reply)
        except ValueError:
            raise not_an_answer(self._address, operation.method) from None


async def attempt(
    address: str,
    method: Method[RequestT_contra, ReplyT_co],
    request: RequestT_contra,
    timeout_ms: float,
) -> ReplyT_co:
    """The reply of one call; raises the errors of `shalekv_client.errors`."""
    try:
        return await method(request, timeout=timeout_ms / 1000.0)
    except grpc.aio.AioRpcError as error:
        raise error_of(address, error, timeout_ms=timeout_ms) from error
    except asyncio.CancelledError:
        if is_task_cancelled():
            raise
        raise abandoned(address, "the client") from None
