"""Replies of services as messages: a service may answer with the bytes of one, at once or later."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Awaitable
from contextlib import aclosing
from typing import Any, TypeVar, cast

from google.protobuf.message import Message

from shalekv.server.service import Answer, Call, KvService
from shalekv.v1 import kv_pb2

T = TypeVar("T")
MessageT = TypeVar("MessageT", bound=Message)


def message_of(kind: type[MessageT], reply: MessageT | bytes) -> MessageT:
    """The reply, parsed if it is bytes."""
    return kind.FromString(reply) if isinstance(reply, bytes) else reply


async def replied(answer: Answer[T]) -> T:
    """The reply in an answer, which may come later."""
    return await answer if isinstance(answer, Awaitable) else answer


async def answered(kind: type[MessageT], answer: Answer[MessageT | bytes]) -> MessageT:
    """The reply in an answer, parsed."""
    return message_of(kind, await replied(answer))


def scan_of(
    kv: KvService, request: kv_pb2.ScanRequest, call: Call
) -> AsyncGenerator[kv_pb2.ScanReply, None]:
    """The messages of a scan, which begins now, and is closed with the result."""
    return _parsed_each(kv.scan(request, call))


async def _parsed_each(
    replies: AsyncIterator[kv_pb2.ScanReply | bytes],
) -> AsyncGenerator[kv_pb2.ScanReply, None]:
    async with aclosing(cast("AsyncGenerator[Any, None]", replies)) as open_replies:
        async for reply in open_replies:
            yield message_of(kv_pb2.ScanReply, reply)


def parsed(request: Message, reply: Any) -> Any:
    """The reply to `request`, parsed if it is bytes."""
    kind = type(request).__name__.replace("Request", "Reply")
    return message_of(getattr(kv_pb2, kind), reply) if isinstance(reply, bytes) else reply
