"""`async with` and `with`, for what is closed when it is left."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Self


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
