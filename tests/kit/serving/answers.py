"""Replies of services as messages: a service may answer with the bytes of one, at once or later."""

from __future__ import annotations

from collections.abc import Awaitable
from typing import Any, TypeVar

from google.protobuf.message import Message

from shalekv.server.service import Answer
from shalekv.v1 import kv_pb2

MessageT = TypeVar("MessageT", bound=Message)


def message_of(kind: type[MessageT], reply: MessageT | bytes) -> MessageT:
    """The reply, parsed if it is bytes."""
    return kind.FromString(reply) if isinstance(reply, bytes) else reply


async def answered(kind: type[MessageT], answer: Answer[MessageT | bytes]) -> MessageT:
    """The reply in an answer, which may come later."""
    return message_of(kind, await answer if isinstance(answer, Awaitable) else answer)


def parsed(request: Message, reply: Any) -> Any:
    """The reply to `request`, parsed if it is bytes."""
    kind = type(request).__name__.replace("Request", "Reply")
    return message_of(getattr(kv_pb2, kind), reply) if isinstance(reply, bytes) else reply
