"""Runs that the memtable has merged or dropped, and what of them views still keep in memory."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass

from shalekv.read.sorted_runs import Run


@dataclass(slots=True, eq=False)
class LeftRun:
    """A run, and those that it was merged from. It refers to none of them, so that they may go."""

    run: weakref.ref[Run]
    size_bytes: int
    inputs: Sequence[LeftRun]

    @classmethod
    def of(cls, run: Run, inputs: Sequence[LeftRun] = ()) -> LeftRun:
        """One that is still there."""
        return cls(weakref.ref(run), run.size_bytes, inputs)

    def held_bytes(self) -> int:
        """What is in memory because of it: itself, or what is left of its inputs.

        Entries of a run are those of its inputs, so of the two the larger counts.
        """
        inputs_bytes = 0
        held = []
        for each in self.inputs:
            held_bytes = each.held_bytes()
            if held_bytes:
                held.append(each)
                inputs_bytes += held_bytes
        self.inputs = held
        own_bytes = 0 if self.run() is None else self.size_bytes
        return max(own_bytes, inputs_bytes)
