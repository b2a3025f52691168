"""Runs the test of a mutant with that planted, and ends as pytest does.

python -m tests.sim.mutants.planted_test "list before manifest"
"""

from __future__ import annotations

import sys

import pytest

from tests.sim.mutants.registry import MUTANTS
from tests.sim.planting import planted


def main() -> int:
    """Run it; without a mutant with ``--without`` in front of the name."""
    *flags, name = sys.argv[1:]
    mutant = MUTANTS[name]
    with planted(() if flags else mutant.patches):
        return int(pytest.main(["-q", "--timeout=15", mutant.test]))


if __name__ == "__main__":
    sys.exit(main())
