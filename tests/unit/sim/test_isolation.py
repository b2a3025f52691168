"""The simulated loop has no outside world."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing

import pytest

from tests.sim.errors import NotSimulated, SimulationError
from tests.sim.loop import SimLoop


@pytest.fixture
def loop() -> Iterator[SimLoop]:
    """A loop with a seed, closed afterwards."""
    with closing(SimLoop(1)) as loop:
        yield loop


OUTSIDE: list[Callable[[SimLoop], object]] = [
    lambda loop: loop.run_in_executor(None, time.time),
    lambda loop: loop.getaddrinfo("localhost", 1),
    lambda loop: loop.create_connection(asyncio.Protocol, "localhost", 1),
    lambda loop: loop.create_server(asyncio.Protocol, "localhost", 1),
    lambda loop: loop.add_reader(0, time.time),
    lambda loop: loop.sock_connect(socket.socket, ("localhost", 1)),  # type: ignore[arg-type]
    lambda loop: loop.subprocess_exec(asyncio.SubprocessProtocol, "true"),
    lambda loop: loop.add_signal_handler(15, time.time),
]


@pytest.mark.parametrize("call", OUTSIDE)
def test_the_outside_world_is_refused(loop: SimLoop, call: Callable[[SimLoop], object]) -> None:
    """Each way out of the simulation raises an error that says what to do."""

    async def main() -> None:
        with pytest.raises(NotSimulated, match="give the code a clock, a store and workers"):
            call(loop)

    loop.run_until_complete(main())


def test_threads_are_refused(loop: SimLoop) -> None:
    """`asyncio.to_thread`, and calls that come from another thread, are refused."""
    errors: list[BaseException] = []

    def call() -> None:
        try:
            loop.call_soon_threadsafe(time.time)
        except NotSimulated as error:
            errors.append(error)

    async def main() -> None:
        with pytest.raises(NotSimulated, match="run_in_executor"):
            await asyncio.to_thread(time.time)
        thread = threading.Thread(target=call)
        thread.start()
        thread.join()

    loop.run_until_complete(main())
    assert len(errors) == 1


def test_the_loop_runs_once_at_a_time(loop: SimLoop) -> None:
    """A loop does not run inside itself, nor after it was closed."""

    async def main() -> None:
        with pytest.raises(SimulationError, match="once at a time"):
            loop.run_forever()

    loop.run_until_complete(main())
    loop.close()
    with pytest.raises(SimulationError, match="once at a time"):
        loop.run_forever()
