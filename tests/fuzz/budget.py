"""Random tests with a budget of processor time, and how one of them is repeated.

Each attempt has a number and a source of randomness of its own, so that FUZZ_FIRST makes a
run begin with the one that failed. FUZZ_TIMES multiplies all budgets.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from random import Random

import pytest

from tests.kit.seeds import VARIABLE, random_of, run_seed

FIRST = int(os.environ.get("FUZZ_FIRST", "0"))
TIMES = float(os.environ.get("FUZZ_TIMES", "1"))
LEAST = 20  # attempts, however slow the machine is
# The budget of a test, in those of the short one; the long one is marked `soak`.
budgets = pytest.mark.parametrize(
    "times", [1, pytest.param(60, marks=[pytest.mark.soak, pytest.mark.timeout(900)])]
)


def attempts(test: str, budget_s: float) -> Iterator[tuple[int, Random]]:
    """Numbers and randomness of the attempts of a test, until its budget is spent."""
    began_s = time.process_time()
    for number in count(FIRST):
        yield number, random_of(f"{test} {number}")
        is_spent = time.process_time() - began_s >= TIMES * budget_s
        if is_spent and number + 1 - FIRST >= LEAST:
            return


@contextmanager
def replayable(number: int) -> Iterator[None]:
    """Adds to an error of attempt `number` the command that makes it again."""
    try:
        yield
    except BaseException as error:
        test = os.environ.get("PYTEST_CURRENT_TEST", "tests/fuzz").partition(" (")[0]
        error.add_note(
            f"again: {VARIABLE}={run_seed()} FUZZ_FIRST={number} "
            f".venv/bin/python -m pytest -m '' '{test}'"
        )
        raise
