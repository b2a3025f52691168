"""Errors of the simulation itself.

SimulationError
├── NotSimulated      code used what a simulation does not have: a socket, a thread, a signal
├── Deadlock          nothing is ready, no timer runs, and the main task is not done
├── Livelock          code runs for ever without letting time pass
├── OutOfTime         the run passed its limit of virtual time
├── NodeCrashed       the awaited code ran on a node that has crashed, or has ended
└── UnhandledErrors   callbacks or tasks of nodes failed, and their errors were not retrieved

AssertionError
└── Violation         an invariant does not hold
"""

from __future__ import annotations


class SimulationError(Exception):
    """Raised by the simulation, never by the code that it runs."""


class NotSimulated(SimulationError):
    """Code used I/O, a thread or a signal, which a simulation does not have."""

    def __init__(self, call: str) -> None:
        super().__init__(
            f"{call}: a simulated loop has no sockets, threads, processes or signals; give the "
            "code a clock, a store and workers as arguments"
        )


class Deadlock(SimulationError):
    """Nothing can ever happen again, and the main task is not done."""


class Livelock(SimulationError):
    """Callbacks run on and on at one moment of virtual time."""


class OutOfTime(SimulationError):
    """The run passed its limit of virtual time."""


class NodeCrashed(SimulationError):
    """The awaited code ran on a node that has crashed, or has ended. Its outcome is unknown."""

    def __init__(self, node: str) -> None:
        super().__init__(f"{node} has crashed")


class UnhandledErrors(SimulationError):
    """Errors of callbacks and tasks that were not retrieved; a real process would log them."""


class Violation(AssertionError):
    """An invariant does not hold; the message begins with its number.

    `at_us` is the time of the violation, if the checker knows it: most judge a finished run.
    """

    def __init__(self, problem: str, *, at_us: int | None = None) -> None:
        super().__init__(problem)
        self.at_us = at_us
