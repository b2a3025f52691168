"""Base classes of objects that `async with` and `with` close, and errors of closed objects."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from typing import Self

from shalekv_client.errors import Abandoned, ClientClosed, ErrorDetails


class AsyncCloseable(ABC):
    """An object that `async with` closes, however the block ends."""

    @abstractmethod
    async def aclose(self) -> None:
        """Release all resources. A second call does nothing."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()


class Closeable(ABC):
    """An object that `with` closes, however the block ends."""

    @abstractmethod
    def close(self) -> None:
        """Release all resources. A second call does nothing."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def is_task_cancelled() -> bool:
    """Return whether the running task is being cancelled.

    Distinguishes that from a call that was cancelled below the task: gRPC raises CancelledError for
    both. When this client closes the connection, the caller of a call must get an error that says
    so, and not seem cancelled.
    """
    task = asyncio.current_task()
    return task is None or task.cancelling() > 0


def abandoned(address: str, what: str) -> Abandoned:
    """Return the error for calls that were under way when `what` (say, the client) was closed."""
    return Abandoned(ErrorDetails(address, "CANCELLED", f"{what} was closed"))


def client_closed(address: str) -> ClientClosed:
    """Return the error for a call of a closed client."""
    return ClientClosed(ErrorDetails(address, "CANCELLED", "the client is closed"))
