"""Runs the test of a mutant with that planted, and ends as pytest does.

python -m tests.sim.mutants.planted_test "list before manifest"
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from functools import wraps
from inspect import iscoroutinefunction
from typing import Any

import pytest

from tests.sim.mutants.registry import MUTANTS
from tests.sim.planting import planted

WAITS_S = 20  # a test that waits for what the mutant does not do is shown where it waits
TIMEOUT_S = 120  # of a test that hangs for another reason: a busy machine must not count as a catch


class _NotForEver:
    """Ends tests that wait for ever, at the line that does so."""

    def pytest_collection_modifyitems(self, items: Sequence[pytest.Item]) -> None:
        for item in items:
            if isinstance(item, pytest.Function) and iscoroutinefunction(item.obj):
                item.obj = _in_time(item.obj)


def main() -> int:
    """Run it; without a mutant with ``--without`` in front of the name."""
    *flags, name = sys.argv[1:]
    mutant = MUTANTS[name]
    with planted(() if flags else mutant.patches):
        arguments = ["-q", f"--timeout={TIMEOUT_S}", mutant.test]
        return int(pytest.main(arguments, plugins=[_NotForEver()]))


def _in_time(test: Any) -> Any:
    @wraps(test)
    async def bounded(*arguments: Any, **named: Any) -> None:
        async with asyncio.timeout(WAITS_S):
            await test(*arguments, **named)

    return bounded


if __name__ == "__main__":
    sys.exit(main())
