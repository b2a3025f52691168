"""`async with` and `with`, for what is closed when it is left."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from typing import Self

from shalekv_client.errors import Abandoned, ClientClosed, ErrorDetails


class AsyncClosing(ABC):
    """Closed at the end of `async with`, however the block ends."""

    @abstractmethod
    async def aclose(self) -> None:
        """Let go of what is held. Again, it does nothing."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()


class Closing(ABC):
    """Closed at the end of `with`, however the block ends."""

    @abstractmethod
    def close(self) -> None:
        """Let go of what is held. Again, it does nothing."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


# --- cancellation
# Telling a task that is cancelled from a call that was cancelled under it.
#
# gRPC raises CancelledError for both; when the connection is closed on this side, whoever waits
# for a call must get an error that says so, and not look cancelled.


def is_task_cancelled() -> bool:
    """Whether the running task is being cancelled."""
    task = asyncio.current_task()
    return task is None or task.cancelling() > 0


def abandoned(address: str, what: str) -> Abandoned:
    """The error for what was under way when `what`, the client or a session, was closed."""
    return Abandoned(ErrorDetails(address, "CANCELLED", f"{what} was closed"))


def client_closed(address: str) -> ClientClosed:
    """The error for what is asked of a client that is closed."""
    return ClientClosed(ErrorDetails(address, "CANCELLED", "the client is closed"))
