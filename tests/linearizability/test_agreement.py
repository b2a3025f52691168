"""Two checkers that share nothing agree, on histories with and without errors."""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from random import Random

import pytest

from tests.linearizability import porcupine
from tests.linearizability.checker import judge, partitions
from tests.linearizability.operations import Call, Kind
from tests.linearizability.planting import PLANTERS
from tests.linearizability.scrambling import scramble
from tests.linearizability.synthetic import Shape, generate

SHAPES = {
    "untied": Shape(operations=10),
    "tied": Shape(operations=5, tied=True),
    "without numbers": Shape(operations=6, numbered=False),
    "tied without numbers": Shape(clients=4, operations=5, tied=True, numbered=False),
    "many unknown": Shape(operations=6, unknown=0.2),
    "without deletes": Shape(operations=6, without=frozenset({Kind.DELETE, Kind.TXN})),
}
SEEDS = 100
SEEDS_SOAK = 5_000
GIVEN_UP_SHARE_MAX = 0.005  # by Porcupine, on a slow machine


def _histories(shape: Shape, seeds: int) -> Iterator[tuple[str, list[Call]]]:
    """Parts of histories as they are, with a planted error, and scrambled; each with its name."""
    for seed in range(seeds):
        random = Random(seed)
        for part in partitions(generate(random, shape)):
            yield f"valid, seed {seed}", part
            yield f"scrambled, seed {seed}", scramble(random, part)
            for name, plant in PLANTERS.items():
                broken = plant(random, part)
                if broken is not None:
                    yield f"{name}, seed {seed}", broken


def _compare(program: Path, shape: Shape, seeds: int) -> None:
    named = list(_histories(shape, seeds))
    began_s = time.perf_counter()
    ours = [judge(calls).is_linearizable for _, calls in named]
    judged_s = time.perf_counter()
    theirs = porcupine.judge_all(program, [calls for _, calls in named])
    counts: Counter[str] = Counter()
    for (name, calls), our, their in zip(named, ours, theirs, strict=True):
        kind = name.split(",")[0]
        agrees = their is None or our is their
        assert agrees, f"{name}: own {our}, Porcupine {their}\n{_text(calls)}"
        assert our or kind != "valid", f"{name}\n{_text(calls)}"
        assert not our or kind in {"valid", "scrambled"}, f"{name}\n{_text(calls)}"
        counts[kind if kind != "scrambled" else f"scrambled {'legal' if our else 'illegal'}"] += 1
    assert theirs.count(None) <= len(named) * GIVEN_UP_SHARE_MAX
    assert min(counts["scrambled legal"], counts["scrambled illegal"]) >= seeds // 4, counts
    sys.stdout.write(
        f"{len(named)} histories agree: {dict(counts)}; own {judged_s - began_s:.1f} s, "
        f"Porcupine {time.perf_counter() - judged_s:.1f} s, {theirs.count(None)} given up\n"
    )


def _text(calls: Sequence[Call]) -> str:
    return "\n".join(str(call) for call in sorted(calls, key=lambda call: call.began))


@pytest.mark.parametrize("name", SHAPES)
def test_checkers_agree(porcupine_program: Path, name: str) -> None:
    """Our checker and Porcupine give the same verdict on every history."""
    _compare(porcupine_program, SHAPES[name], SEEDS)


@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", SHAPES)
def test_checkers_agree_for_long(porcupine_program: Path, name: str) -> None:
    """As above, on many more histories."""
    _compare(porcupine_program, SHAPES[name], SEEDS_SOAK)
