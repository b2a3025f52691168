"""A scan that goes on: it can be ended from outside, to free what its view keeps in memory."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Self

from shalekv.engine.view import OpenView
from shalekv.errors import PageExpired
from shalekv.protocol.entry import Entry


class OpenScan:
    """The slices of a scan. Nobody else may refer to them, or to the view."""

    def __init__(self, opened: OpenView, slices: AsyncGenerator[list[Entry], None]) -> None:
        """Nothing is read yet."""
        self._opened: OpenView | None = opened
        self._slices: AsyncGenerator[list[Entry], None] | None = slices
        self._is_running = False

    @property
    def opened(self) -> OpenView:
        """The view. Raises `PageExpired` when it was let go."""
        if self._opened is None:
            raise PageExpired(
                "this scan was ended: its view kept memory that writes need, and it was not soon "
                "taken to its end. Begin again behind the last key that has come"
            )
        return self._opened

    @property
    def is_let_go(self) -> bool:
        """Whether the view is gone."""
        return self._opened is None

    async def let_go(self) -> None:
        """End the scan: who asks for more gets `PageExpired`, never a short answer (I7)."""
        self._opened = None
        if not self._is_running:  # otherwise it ends when its slice has come
            await self.aclose()

    async def stop(self) -> None:
        """Read no more, but keep the view. REQUIRES: the caller asks for no more."""
        slices, self._slices = self._slices, None
        if slices is not None:
            await slices.aclose()

    async def aclose(self) -> None:
        """Read no more."""
        self._opened = None
        await self.stop()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> list[Entry]:
        _ = self.opened
        if self._slices is None:
            raise StopAsyncIteration
        self._is_running = True
        try:
            return await anext(self._slices)
        finally:
            self._is_running = False
            if self._opened is None:
                await self.aclose()
