"""Base classes of objects that `async with` and `with` close, and errors of closed objects."""

from __future__ import annotations

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


def abandoned(address: str, what: str) -> Abandoned:
    """Return the error for calls that were under way when `what` (say, the client) was closed."""
    return Abandoned(ErrorDetails(address, "CANCELLED", f"{what} was closed"))


def client_closed(address: str) -> ClientClosed:
    """Return the error for a call of a closed client."""
    return ClientClosed(ErrorDetails(address, "CANCELLED", "the client is closed"))
