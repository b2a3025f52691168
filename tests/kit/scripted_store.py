"""A store in memory whose replies a test loses, delays or refuses, one by one."""

from __future__ import annotations

import enum
from collections.abc import AsyncIterator
from itertools import count

from shalekv.errors import StoreBroken, StoreRefused, StoreUnavailable
from shalekv.store.api import ObjectInfo
from shalekv.store.memory import MemoryStore
from tests.kit.store import FaultyStore, Lost, Request


class Fate(enum.Enum):
    """Fate of a request."""

    ANSWERED = enum.auto()
    REQUEST_LOST = enum.auto()  # outcome unknown; it was never applied
    REPLY_LOST = enum.auto()  # outcome unknown; it was applied
    LATE = enum.auto()  # outcome unknown; it is applied right before the next create
    REFUSED = enum.auto()  # unavailable; not applied
    FORBIDDEN = enum.auto()  # like a 403
    BROKEN = enum.auto()


class ScriptedStore(FaultyStore):
    """Has a script: the fates of the next creates and reads, in order; then all is answered.

    `collected` are names that are deleted right before they are next read.
    """

    def __init__(self) -> None:
        moments = count(1)
        inner = MemoryStore(lambda: next(moments), name="scripted")
        super().__init__(inner, before=self._before, after=self._after)
        self.creates: list[Fate] = []
        self.read_fates: list[Fate] = []
        self.collected: set[str] = set()
        self._late: list[Request] = []
        self._loses_reply = False

    @property
    def log(self) -> list[str]:
        return [f"{each.operation} {each.name}" for each in self.requests]

    async def list(self, prefix: str, *, start_after: str = "") -> AsyncIterator[ObjectInfo]:
        """Each object that it shows counts as a read."""
        async for info in self.inner.list(prefix, start_after=start_after):
            await self._before(Request(0, "list", info.name))
            yield info

    async def _before(self, request: Request) -> None:
        if request.operation == "create":
            while self._late:
                late = self._late.pop(0)
                await self.inner.create(late.name, late.data)
        elif request.name in self.collected:
            self.collected.remove(request.name)
            await self.inner.delete([request.name])
        script = self.creates if request.operation == "create" else self.read_fates
        fate = script.pop(0) if script and request.operation != "delete" else Fate.ANSWERED
        self._loses_reply = fate is Fate.REPLY_LOST
        if fate is Fate.LATE:
            self._late.append(request)
        if fate in {Fate.REQUEST_LOST, Fate.LATE}:
            raise Lost(fate.name)
        if fate is Fate.FORBIDDEN:
            problem = "the script forbids it"
            raise StoreRefused(self.url, request.operation, request.name, problem, may_pass=True)
        if fate in {Fate.REFUSED, Fate.BROKEN}:
            kind = StoreUnavailable if fate is Fate.REFUSED else StoreBroken
            raise kind(self.url, request.operation, request.name, "the script says so")

    async def _after(self, _request: Request) -> None:
        if self._loses_reply:
            raise Lost(Fate.REPLY_LOST.name)
