"""Check of linearizability of a history: Wing and Gong's search with Lowe's memory. Pure.

An operation can be the next one if no other that is still left had ended before it began. The
search takes one such operation after another, each at a state in which the model allows its reply,
and goes back where none is left to take. A set of operations that was taken before, with the same
state behind it, is not tried again: what comes after depends on these two alone.

Keys that no operation names together are judged apart: linearizability is local (Herlihy and Wing),
so the whole is linearizable if and only if each part is. An operation over several keys ties them
together, and they are judged as one object; nothing is lost by that, atomicity included.

Sources: G. Lowe, Testing for linearizability, 2017; A. Horn and D. Kroening, Faster linearizability
checking via P-compositionality, 2015.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from tests.linearizability.model import Model, State
from tests.linearizability.operations import Call

STEPS_MAX = 2_000_000
SHOWN_CALLS = 60


class Undecided(AssertionError):
    """The search was too long; nothing is known about the history."""


class Violation(AssertionError):
    """A history is not linearizable."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """Result of a search."""

    order: tuple[Call, ...]  # a legal order; of an illegal history the longest that was found
    # calls that could have been next and were not legal; none: linearizable
    stuck: tuple[Call, ...]
    steps: int

    @property
    def is_linearizable(self) -> bool:
        return not self.stuck

    def __str__(self) -> str:
        if self.is_linearizable:
            return "linearizable"
        order = [f"  {call}" for call in self.order]
        hidden = [f"  ... {len(order) - SHOWN_CALLS} more ..."] * (len(order) > SHOWN_CALLS)
        stuck = [f"  {call}" for call in self.stuck]
        lines = ["not linearizable; the longest legal order:", *hidden, *order[-SHOWN_CALLS:]]
        return "\n".join([*lines, "after it, none of these is legal:", *stuck])


def check(history: Sequence[Call]) -> None:
    """Judge each part of a history; raises `Violation` or `Undecided`."""
    for part in partitions(history):
        verdict = judge(part)
        if not verdict.is_linearizable:
            raise Violation(str(verdict))


def partitions(history: Sequence[Call]) -> list[list[Call]]:
    """The history cut by keys; keys that one operation names stay together."""
    leader: dict[bytes, bytes] = {}

    def find(key: bytes) -> bytes:
        while (above := leader.setdefault(key, key)) != key:
            leader[key] = leader[above]
            key = above
        return key

    for call in history:
        first, *others = call.operation.keys
        for key in others:
            leader[find(key)] = find(first)
    parts: dict[bytes, list[Call]] = {}
    for call in history:
        parts.setdefault(find(call.operation.keys[0]), []).append(call)
    return list(parts.values())


def judge(part: Sequence[Call], *, steps_max: int = STEPS_MAX) -> Verdict:
    """Judge whether the operations of some keys, as one object, are linearizable."""
    keys = dict.fromkeys(key for call in part for key in call.operation.keys)
    return _Search(part, Model(keys)).run(steps_max)


class _Step(NamedTuple):
    """An operation that was taken, and what else can be taken instead."""

    node: int
    others: Iterator[tuple[int, State]]


class _Search:
    """The depth-first search over one part.

    Operations and the ends of those that have one are in a linked list, in the order of time. Node
    n < count is the operation n, node count + n its end. Taken operations are removed from the
    list, so that the operations before the first end are those that can be next. Those without an
    end can always be next, and may be left over.
    """

    def __init__(self, part: Sequence[Call], model: Model) -> None:
        # Calls with a reply have the lower numbers.
        self._calls = sorted(part, key=lambda call: (call.reply is None, call.began))
        self._model = model
        self._count = len(self._calls)
        self._head = 2 * self._count
        self._next = [0] * (self._head + 1)
        self._previous = [0] * (self._head + 1)
        self._closed = sum(call.reply is not None for call in self._calls)
        self._left = self._closed  # calls with a reply, all of which must be taken
        self._link_all()
        self._seqs = self._seq_order()
        self._seqs_taken = 0

    def run(self, steps_max: int) -> Verdict:
        """Search until all that must be taken is taken, or nothing is left to try."""
        taken: list[_Step] = []
        done, state = 0, self._model.initial
        seen = {(done, state)}
        candidates = self._candidates(state)
        steps = 0
        best = Verdict((), (), 0)
        while self._left:
            steps += 1
            if steps > steps_max:
                raise Undecided(f"{self._count} operations, {steps_max} steps")
            found = next(candidates, None)
            if found is None:
                if not best.stuck or len(taken) > len(best.order):
                    best = Verdict(self._order(taken), self._pending(), steps)
                if not taken:
                    return replace(best, steps=steps)
                node, candidates = taken.pop()
                self._put_back(node)
                done &= ~(1 << node)
                continue
            node, after = found
            place = (done | 1 << node, after)
            if place in seen:
                continue
            seen.add(place)
            taken.append(_Step(node, candidates))
            self._take(node)
            done, state = place
            candidates = self._candidates(state)
        return Verdict(self._order(taken), (), steps)

    def _candidates(self, state: State) -> Iterator[tuple[int, State]]:
        """Yield each operation that can be next, with each state that it can lead to.

        If one with a reply leaves the state as it is, it is the only candidate: if there is a legal
        order of the rest in which it comes later, there is one in which it comes now, as such a
        reply changes nothing anywhere.
        """
        found: list[tuple[int, State]] = []
        node = self._next[self._head]
        while node < self._count:
            call = self._calls[node]
            rank = self._seqs[node]
            # Numbers rise in the order of commits: of the reported ones, the least comes first.
            if rank is None or rank == self._seqs_taken:
                for after in self._model.step(state, call.operation, call.reply):
                    if after != state:
                        found.append((node, after))
                    elif call.reply is not None:
                        return iter([(node, after)])
            node = self._next[node]
        if len(self._calls) > self._closed:  # without a reply: later, as it need not happen at all
            found.sort(key=lambda each: each[0] >= self._closed)
        return iter(found)

    def _order(self, taken: Sequence[_Step]) -> tuple[Call, ...]:
        return tuple(self._calls[step.node] for step in taken)

    def _pending(self) -> tuple[Call, ...]:
        found = []
        node = self._next[self._head]
        while node < self._count:
            found.append(self._calls[node])
            node = self._next[node]
        return tuple(found)

    def _link_all(self) -> None:
        moments = [(call.began, 0, node) for node, call in enumerate(self._calls)]
        moments += [
            (call.ended, 1, self._count + node)  # at one moment, beginnings come before ends
            for node, call in enumerate(self._calls)
            if call.reply is not None and call.ended is not None
        ]
        before = self._head
        for _, _, node in sorted(moments):
            self._next[before], self._previous[node] = node, before
            before = node
        self._next[before], self._previous[self._head] = self._head, before

    def _seq_order(self) -> list[int | None]:
        """Return the rank of each operation among those with a reported number."""
        reported = [
            (call.reply.seq, node)
            for node, call in enumerate(self._calls)
            if call.reply is not None and call.reply.seq is not None
        ]
        ranks: list[int | None] = [None] * self._count
        for rank, (_, node) in enumerate(sorted(reported)):
            ranks[node] = rank
        return ranks

    def _take(self, node: int) -> None:
        self._unlink(node)
        if self._calls[node].reply is not None:
            self._unlink(self._count + node)
            self._left -= 1
        self._seqs_taken += self._seqs[node] is not None

    def _put_back(self, node: int) -> None:
        """Undo the last `_take`: what was unlinked last is linked first."""
        self._seqs_taken -= self._seqs[node] is not None
        if self._calls[node].reply is not None:
            self._left += 1
            self._link(self._count + node)
        self._link(node)

    def _unlink(self, node: int) -> None:
        before, after = self._previous[node], self._next[node]
        self._next[before], self._previous[after] = after, before

    def _link(self, node: int) -> None:
        before, after = self._previous[node], self._next[node]
        self._next[before], self._previous[after] = node, node
