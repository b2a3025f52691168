"""The verdict over all histories of a campaign, by both checkers."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

from tests.linearizability import porcupine
from tests.linearizability.checker import Verdict, judge, partitions
from tests.linearizability.operations import Call
from tests.linearizability.planting import PLANTERS

UNDECIDED_SHARE_MAX = 0.02  # of what Porcupine is asked
PLANTED_PARTS = 150


@dataclass(frozen=True, slots=True)
class Judgement:
    """What became of the histories, cut by keys."""

    parts: Sequence[Sequence[Call]]
    refused: Sequence[Verdict]
    text: str  # what was judged, and how long it took


def judge_all(histories: Sequence[Sequence[Call]]) -> Judgement:
    """Judge every part of every history. Checkers that disagree are an error.

    Without Go our own is alone, and the text says so.
    """
    parts = [part for history in histories for part in partitions(history)]
    began_s = time.perf_counter()
    verdicts = [judge(part) for part in parts]
    text = f"{len(parts)} histories of keys judged: own {time.perf_counter() - began_s:.1f} s, "
    if porcupine.go_is_missing():
        text += "Porcupine not asked, as Go is missing"
    else:
        program = porcupine.build()
        began_s = time.perf_counter()
        theirs = porcupine.judge_all(program, parts)
        for verdict, is_legal in zip(verdicts, theirs, strict=True):
            agrees = is_legal is None or verdict.is_linearizable is is_legal
            assert agrees, f"Porcupine: {is_legal}, own: {verdict}"
        undecided = theirs.count(None)
        assert undecided <= UNDECIDED_SHARE_MAX * len(parts), f"{undecided} of {len(parts)}"
        text += f"Porcupine {time.perf_counter() - began_s:.1f} s, {undecided} given up"
    refused = [verdict for verdict in verdicts if not verdict.is_linearizable]
    return Judgement(parts, refused, text)


def plant_all(seed: int, parts: Sequence[Sequence[Call]]) -> str:
    """Plant each kind of error into some of the parts: all must be refused."""
    random = Random(seed)
    planted: Counter[str] = Counter()
    broken = []
    for part in random.sample(parts, min(len(parts), PLANTED_PARTS)):
        for name, plant in PLANTERS.items():
            found = plant(random, part)
            if found is not None:
                planted[name] += 1
                broken.append(found)
    judgement = judge_all(broken)
    assert len(judgement.refused) == len(judgement.parts), f"seed {seed}: an error was accepted"
    return f"planted and refused: {dict(planted)}"
