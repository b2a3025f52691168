"""Synthetic histories are accepted; with any kind of error in them they are refused."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from random import Random

import pytest

from tests.linearizability.checker import judge, partitions
from tests.linearizability.operations import Kind
from tests.linearizability.planting import PLANTERS
from tests.linearizability.synthetic import Shape, generate

SHAPES = {
    "untied": Shape(),
    "tied": Shape(tied=True),
    "without numbers": Shape(numbered=False),
    "many unknown": Shape(operations=10, unknown=0.2),
    "long": Shape(operations=100, unknown=0.01),
}
# Enough of each kind of error stands in histories of these shapes.
PLANTED_IN = {
    "stale read": Shape(operations=8),
    "lost write": Shape(operations=8),
    "doubled add": Shape(operations=6),
    "swapped reads": Shape(operations=8),
    "second winner": Shape(operations=6, without=frozenset({Kind.DELETE, Kind.TXN})),
    "torn batch": Shape(operations=8, tied=True),
}
PLANTED = 100
SEEDS_MAX = 5_000


@pytest.mark.parametrize("name", SHAPES)
def test_valid_histories_are_accepted(name: str) -> None:
    """Whatever a database does that is correct, is accepted, and soon."""
    count = 0
    slowest_ms = 0.0
    began_s = time.thread_time()
    for seed in range(100):
        for part in partitions(generate(Random(seed), SHAPES[name])):
            part_began_s = time.thread_time()
            verdict = judge(part)
            slowest_ms = max(slowest_ms, (time.thread_time() - part_began_s) * 1000)
            assert verdict.is_linearizable, f"seed {seed}: {verdict}"
            count += 1
    took_s = time.thread_time() - began_s
    sys.stdout.write(f"{name}: {count} parts, {took_s:.1f} s, slowest {slowest_ms:.1f} ms\n")


@pytest.mark.parametrize("numbered", [True, False])
@pytest.mark.parametrize("name", PLANTERS)
def test_planted_errors_are_refused(name: str, *, numbered: bool) -> None:
    """No history with an error of this kind is accepted, with or without sequence numbers."""
    shape = PLANTED_IN[name]
    if not numbered:  # harder to judge: fewer calls
        shape = Shape(6, 6 if shape.tied else 8, 0.03, shape.tied, numbered, shape.without)
    planted = 0
    for seed in range(SEEDS_MAX):
        random = Random(seed)
        for part in partitions(generate(random, shape)):
            broken = PLANTERS[name](random, part)
            if broken is not None:
                assert not judge(broken).is_linearizable, f"seed {seed}:\n" + _text(broken)
                planted += 1
        if planted >= PLANTED:
            return
    raise AssertionError(f"only {planted} could be planted")


def _text(calls: Sequence[object]) -> str:
    return "\n".join(map(str, calls))
