"""Threads that go one step at a time, in an order that a seed decides, until the power is cut."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from random import Random

# How often the thread that went last goes on: from a fine mixture to some being far ahead.
SAME_AGAIN = (0.4, 0.8, 0.9)
# How many threads end before the others, and right after what: they leave work half done.
KILLED = 0.6
FATAL_CALLS = ("mkdir", "fsync", "link", "link", "link")


class PowerCut(Exception):
    """Ends a program at its next step: it was killed, or the machine is off."""


@dataclass(slots=True, eq=False)
class _Runner:
    program: Callable[[], None]
    fatal_call: str | None  # it is killed after the first of these
    previous_call: str = ""
    turn: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    error: BaseException | None = None
    done: bool = False


class Turnstile:
    """Runs programs that call `step` before whatever others could see of them."""

    def __init__(self, random: Random, steps_to_cut: int) -> None:
        self._random = random
        self._same_again = random.choice(SAME_AGAIN)
        self._steps_left = steps_to_cut
        self._current: _Runner | None = None
        self._back = threading.Semaphore(0)

    def step(self, call: str) -> None:
        """Wait for a turn to make this call; raises `PowerCut` when there is none any more."""
        runner = self._current
        if runner is None:
            return  # before and after the programs, for whoever prepares and inspects
        self._back.release()
        runner.turn.acquire()
        if self._steps_left <= 0 or runner.previous_call == runner.fatal_call:
            raise PowerCut
        runner.previous_call = call
        self._steps_left -= 1

    def run(self, programs: Sequence[Callable[[], None]]) -> None:
        """Run all programs to their end or to the cut; raises what else one of them raised."""
        runners = [self._runner(program) for program in programs]
        threads = [threading.Thread(target=self._run_one, args=(at,)) for at in runners]
        for thread in threads:
            thread.start()
        while alive := [runner for runner in runners if not runner.done]:
            if self._current not in alive or self._random.random() > self._same_again:
                self._current = self._random.choice(alive)
            assert self._current is not None
            self._current.turn.release()
            self._back.acquire()
        self._current = None
        for thread in threads:
            thread.join()
        for runner in runners:
            if runner.error is not None:
                raise runner.error

    def _runner(self, program: Callable[[], None]) -> _Runner:
        killed = self._random.random() < KILLED
        return _Runner(program, self._random.choice(FATAL_CALLS) if killed else None)

    def _run_one(self, runner: _Runner) -> None:
        runner.turn.acquire()
        try:
            runner.program()
        except PowerCut:
            pass
        except BaseException as error:  # noqa: BLE001  (raised again by `run`)
            runner.error = error
        finally:
            runner.done = True
            self._back.release()
