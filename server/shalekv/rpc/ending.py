"""How a call ends with an error: as a status, or at last by a reset of its stream.

A status follows what was written before. Where the client does not take that, gRPC holds both until
the client reads, cancels the call, or its connection ends. grpc.aio has no way to reset a stream:
it does so when nothing refers to a call any more, which its own task for the call prevents.
"""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Coroutine
from typing import Any, TypeAlias, cast

import grpc
from google.rpc import status_pb2
from grpc_status import rpc_status

Context: TypeAlias = grpc.aio.ServicerContext[Any, Any]

# What grpc.aio runs beside the handler of a call, until its client has gone.
WATCHING = "_schedule_rpc_coro"


async def end(
    context: Context, status: status_pb2.Status, *, within_ms: float | None = None
) -> None:
    """End the call with `status`, if there is still somebody to tell. To be called last.

    A client that has not taken it `within_ms` gets a bare CANCELLED: the stream is reset, and gRPC
    lets go of what was not sent. None: it has all the time it wants. grpc.aio refuses a status
    behind a first message that waits: then the stream is reset at once.

    grpc keeps what `abort` raises in the context, and raises it again itself when the handler has
    returned. It must not hold frames, since those hold the context.
    """
    try:
        async with asyncio.timeout(None if within_ms is None else within_ms / 1_000):
            await context.abort_with_status(rpc_status.to_status(status))
    except grpc.aio.AbortError as aborted:
        forget_frames(aborted)
    except grpc.aio.BaseError as gone:  # the deadline has passed, or the connection is lost
        if within_ms is not None:
            _reset()
        raise asyncio.CancelledError from gone
    except TimeoutError:
        _reset()
        raise asyncio.CancelledError from None  # and grpc adds nothing


def forget_frames(error: BaseException) -> None:
    """Let go of the frames that an error, and each error behind it, came through.

    A frame that waited for a future holds the future, which holds its error, which holds the frame:
    a cycle, which only a garbage collection would free. grpc, and groups of tasks, make others.
    """
    errors = [error]
    for each in errors:
        each.__traceback__ = None
        behind = (each.__cause__, each.__context__)
        errors += [other for other in behind if other is not None and other not in errors]


def _reset() -> None:
    """Let go of the call of the handler that runs now, as far as this grpc.aio allows it."""
    handler = asyncio.current_task()
    for task in asyncio.all_tasks():
        running = cast("Coroutine[Any, Any, Any]", task.get_coro())
        if getattr(running, "__name__", "") == WATCHING and any(
            any(each is handler for each in gc.get_referents(scope))
            for scope in gc.get_referents(running)
        ):
            task.cancel()
