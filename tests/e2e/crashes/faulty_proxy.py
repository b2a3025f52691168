"""A TCP proxy that cuts connections, delays both directions and drops replies, by a seed.

It knows nothing of what it forwards but when a request begins: with the first bytes that come from
the client after the server has said something, or at the beginning. A request that is delayed is
on its way, whatever becomes of its sender: it reaches the server even if that was killed meanwhile.
"""

from __future__ import annotations

import asyncio
import enum
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from random import Random

CHUNK_BYTES = 64 * 1024
SHORT_MS = (5.0, 300.0)
LONG_MS = (1_500.0, 5_000.0)  # longer than anybody waits for an answer
LONG_SHARE = 0.12  # of the delays
LINGER_S = 10.0  # how long a reply is waited for that nobody takes any more


class Fault(enum.Enum):
    """What happens to one request, or to its reply."""

    REQUEST_DELAYED = "requests delayed"
    REPLY_DELAYED = "replies delayed"
    REQUEST_CUT = "requests cut"
    REPLY_CUT = "replies cut"
    REPLY_DROPPED = "replies dropped"


SHARES: Mapping[Fault, float] = {
    Fault.REQUEST_DELAYED: 0.03,
    Fault.REPLY_DELAYED: 0.03,
    Fault.REQUEST_CUT: 0.01,
    Fault.REPLY_CUT: 0.01,
    Fault.REPLY_DROPPED: 0.01,
}


class FaultyProxy:
    """Forwards connections to one server."""

    def __init__(self, target: str, seed: int, shares: Mapping[Fault, float] = SHARES) -> None:
        """`target` is HOST:PORT; `shares` say how many of the requests meet which fault."""
        self.made: Counter[Fault] = Counter()
        self.listen = ""
        self._host, _, port = target.rpartition(":")
        self._port = int(port)
        self._random = Random(f"{seed}/proxy")
        self._shares = shares
        self._calm = asyncio.Event()
        self._open: dict[asyncio.Task[None], _Connection] = {}

    def calm_down(self) -> None:
        """From now on all is passed on as it comes, and what was delayed goes on its way."""
        self._calm.set()

    @property
    def cuts(self) -> int:
        """The connections that were cut."""
        return sum(
            self.made[each] for each in (Fault.REQUEST_CUT, Fault.REPLY_CUT, Fault.REPLY_DROPPED)
        )

    async def accept(self, near: asyncio.StreamReader, back: asyncio.StreamWriter) -> None:
        """One connection, until it is cut or either side closes it."""
        own = asyncio.current_task()
        assert own is not None
        try:
            far, forth = await asyncio.open_connection(self._host, self._port)
        except OSError:
            back.transport.abort()
            return
        connection = self._open[own] = _Connection(self, near, forth, far, back)
        try:
            await connection.run()
        finally:
            del self._open[own]

    async def close(self) -> None:
        """Cut all connections."""
        self.calm_down()
        ending = dict(self._open)
        for connection in ending.values():
            connection.cut()
        await asyncio.gather(*ending, return_exceptions=True)

    def draw_fault(self) -> Fault | None:
        """What happens to the next request; None: nothing."""
        dice = self._random.random()
        if self._calm.is_set():
            return None
        for fault, share in self._shares.items():
            dice -= share
            if dice < 0:
                self.made[fault] += 1
                return fault
        return None

    def part_of(self, data: bytes) -> bytes:
        """Less than all of it."""
        return data[: self._random.randrange(len(data))]

    async def delay(self) -> None:
        """Wait for as long as a delay lasts, or until all is calm."""
        is_long = self._random.random() < LONG_SHARE
        delay_ms = self._random.uniform(*(LONG_MS if is_long else SHORT_MS))
        with suppress(TimeoutError):
            await asyncio.wait_for(self._calm.wait(), delay_ms / 1_000)


class _Connection:
    """One connection of a client, and the one to the server that belongs to it."""

    def __init__(
        self,
        proxy: FaultyProxy,
        near: asyncio.StreamReader,
        forth: asyncio.StreamWriter,
        far: asyncio.StreamReader,
        back: asyncio.StreamWriter,
    ) -> None:
        self._proxy = proxy
        self._near, self._forth = near, forth
        self._far, self._back = far, back
        self._fault: Fault | None = None
        self._answered = asyncio.Event()  # the server has said something to the last request
        self._answered.set()

    async def run(self) -> None:
        """Until it is cut or closed."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._pass_requests())
            tasks.create_task(self._pass_replies())

    def cut(self) -> None:
        """Break both connections, whatever is on its way."""
        self._forth.transport.abort()
        self._back.transport.abort()

    async def _pass_requests(self) -> None:
        with suppress(ConnectionError):
            while data := await self._near.read(CHUNK_BYTES):
                if self._answered.is_set():
                    self._answered.clear()
                    self._fault = self._proxy.draw_fault()
                    if self._fault is Fault.REQUEST_DELAYED:
                        await self._proxy.delay()
                if self._fault is Fault.REQUEST_CUT:
                    self._forth.write(self._proxy.part_of(data))
                    await self._forth.drain()
                    self.cut()
                    return
                self._forth.write(data)
                await self._forth.drain()
        with suppress(TimeoutError):  # the server does what it was sent, though nobody listens
            await asyncio.wait_for(self._answered.wait(), LINGER_S)
        self._forth.close()

    async def _pass_replies(self) -> None:
        with suppress(ConnectionError):
            while data := await self._far.read(CHUNK_BYTES):
                is_first = not self._answered.is_set()
                self._answered.set()
                if self._fault is Fault.REPLY_DROPPED:
                    await self._proxy.delay()
                    self.cut()
                    return
                if self._fault is Fault.REPLY_CUT:
                    self._back.write(self._proxy.part_of(data))
                    await self._back.drain()
                    self.cut()
                    return
                if is_first and self._fault is Fault.REPLY_DELAYED:
                    await self._proxy.delay()
                if not self._back.is_closing():
                    self._back.write(data)
                    with suppress(ConnectionError):  # the rest of the reply is taken all the same
                        await self._back.drain()
        self._answered.set()
        self._back.close()


@asynccontextmanager
async def faulty_proxy(target: str, seed: int) -> AsyncIterator[FaultyProxy]:
    """A proxy before the server at `target`, on a free port."""
    proxy = FaultyProxy(target, seed)
    server = await asyncio.start_server(proxy.accept, "127.0.0.1", 0)
    host, port = server.sockets[0].getsockname()[:2]
    proxy.listen = f"{host}:{port}"
    try:
        yield proxy
    finally:
        server.close()
        await proxy.close()
