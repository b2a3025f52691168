"""How a stream of gRPC ended, as the other side said it.

When a stream ends while a message is written to it, grpc.aio reports that the write has failed as
the status of the stream: INTERNAL, with a text of its own, in place of the status that has come.
What has come is seen by a callback at the moment when it comes, and only there.
"""

from __future__ import annotations

from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Any, TypeVar

import grpc

ValueT = TypeVar("ValueT")


@dataclass(frozen=True, slots=True)
class Ending:
    """The status of a call that has ended, with the methods that a failed call has."""

    status_code: grpc.StatusCode
    text: str | None
    metadata: Any

    def code(self) -> grpc.StatusCode:
        """The status code."""
        return self.status_code

    def details(self) -> str | None:
        """The message."""
        return self.text

    def trailing_metadata(self) -> Any:
        """The metadata with the details of the status."""
        return self.metadata

    @property
    def is_made_up(self) -> bool:
        """Whether it may be nobody's status: all that is known is that the stream is over."""
        return self.status_code is grpc.StatusCode.INTERNAL and not self.metadata


def ending_of(call: grpc.aio.Call) -> Ending:
    """The status of a call that is done."""
    return Ending(_now(call.code()), _now(call.details()), _now(call.trailing_metadata()))


def _now(coroutine: Coroutine[Any, Any, ValueT]) -> ValueT:
    """The result of a coroutine that does not wait, as those of a call that is done."""
    try:
        coroutine.send(None)
    except StopIteration as result:
        return result.value  # type: ignore[no-any-return] # StopIteration is not generic
    coroutine.close()
    raise RuntimeError("the call is not done")
