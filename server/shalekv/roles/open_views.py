"""Views that are kept for the next page of a scan."""

from __future__ import annotations

import asyncio
from random import Random

from shalekv.engine.view import OpenView
from shalekv.errors import PageExpired
from shalekv.settings import LimitSettings

_ID_BITS = 64
# Who lost the connection with the last messages of a scan asks for them again soon.
ENDED_TTL_MS = 5_000


class OpenViews:
    """At most `scan_view_count_max` views, each for `scan_view_ttl_ms` after its last use."""

    def __init__(self, limits: LimitSettings, random: Random) -> None:
        """Ids are random, so that those of another process are not mistaken for ours."""
        self._limits = limits
        self._random = random
        self._views: dict[int, OpenView] = {}  # that which was used longest ago comes first
        self._expiries: dict[int, asyncio.TimerHandle] = {}

    def __len__(self) -> int:
        return len(self._views)

    def keep(self, view: OpenView, view_id: int | None = None) -> int:
        """Keep a view from now on, under its id if it has one already; returns the id."""
        if view_id is None:
            view_id = self._random.getrandbits(_ID_BITS)
        self._drop(view_id)
        if len(self._views) >= self._limits.scan_view_count_max:
            self._drop(next(iter(self._views)))
        self._views[view_id] = view
        self._expire_after(self._limits.scan_view_ttl_ms, view_id)
        return view_id

    def end(self, view_id: int) -> None:
        """The scan has come to its end: its view is the first to go, and not kept for long."""
        view = self._views.pop(view_id, None)
        if view is not None:
            self._views = {view_id: view} | self._views
            self._expiries.pop(view_id).cancel()
            self._expire_after(min(ENDED_TTL_MS, self._limits.scan_view_ttl_ms), view_id)

    def find(self, view_id: int) -> OpenView:
        """The view with this id. Raises `PageExpired`."""
        found = self._views.get(view_id)
        if found is None:
            raise PageExpired(
                "the view of this page token is gone: the server was started again, or kept it "
                f"for the {self._limits.scan_view_ttl_ms} ms of scan_view_ttl_ms, or had more than "
                f"the {self._limits.scan_view_count_max} of scan_view_count_max to keep. Begin the "
                "scan again"
            )
        return found

    def drop_oldest(self) -> bool:
        """Let go of the view that was used longest ago; whether there was one."""
        for view_id in self._views:
            self._drop(view_id)
            return True
        return False

    def close(self) -> None:
        """Let go of all of them."""
        for view_id in list(self._views):
            self._drop(view_id)

    def _expire_after(self, ttl_ms: int, view_id: int) -> None:
        loop = asyncio.get_running_loop()
        self._expiries[view_id] = loop.call_later(ttl_ms / 1_000, self._drop, view_id)

    def _drop(self, view_id: int) -> None:
        if self._views.pop(view_id, None) is not None:
            self._expiries.pop(view_id).cancel()
