"""A scan that is ended from outside, at whatever moment."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import AsyncGenerator

import pytest

from shalekv.core.entry import Entry
from shalekv.engine.sorted_runs import Run
from shalekv.engine.view import OpenView, View
from shalekv.errors import PageExpired
from shalekv.roles.open_scan import OpenScan
from tests.kit.engine.commits import put, run_of


class Scanning:
    """A scan of a view that nothing else has, with a slice for each of its three runs."""

    def __init__(self) -> None:
        self.may_come = asyncio.Event()
        self.may_come.set()
        view = View(3, 0, tuple(run_of(seq, put(b"%d" % seq)) for seq in range(1, 4)))
        self.run: weakref.ref[Run] = weakref.ref(view.runs[-1])
        opened = OpenView(view, 0)
        self.scan = OpenScan(opened, self._slices(opened))

    async def _slices(self, opened: OpenView) -> AsyncGenerator[list[Entry], None]:
        for number in range(3):
            await self.may_come.wait()
            yield [*opened.view.runs[number].entries]

    async def keys(self) -> list[bytes]:
        """Those of one more slice."""
        return [entry.key for entry in await anext(self.scan)]


async def test_a_scan_that_has_not_begun_can_be_ended() -> None:
    """Its first slice does not come."""
    it = Scanning()
    await it.scan.let_go()
    assert it.run() is None
    with pytest.raises(PageExpired):
        await it.keys()


async def test_a_running_scan_ends_after_its_slice() -> None:
    """The slice that is being read comes, and no more after it, nor what looks like the end."""
    it = Scanning()
    it.may_come.clear()
    reading = asyncio.create_task(it.keys())
    await asyncio.sleep(0)
    await it.scan.let_go()
    it.may_come.set()
    assert await reading == [b"1"]
    assert it.run() is None
    with pytest.raises(PageExpired):
        await it.keys()
