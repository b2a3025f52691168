"""Latencies and faults of the object store, as values."""

from __future__ import annotations

import math
from dataclasses import dataclass
from random import Random


@dataclass(frozen=True, slots=True)
class Span:
    """A range of durations. Drawn log-uniformly: a long tail above many short ones."""

    low_ms: float
    high_ms: float

    def __post_init__(self) -> None:
        if not 0 < self.low_ms <= self.high_ms:
            raise ValueError(f"not a range of positive durations: {self}")

    def draw(self, random: Random) -> float:
        return self.low_ms * math.pow(self.high_ms / self.low_ms, random.random())


@dataclass(frozen=True, slots=True)
class Faults:
    """Faults of the store and the network, which the seed draws for each request.

    `lost_request`, `lost_reply`, `late_request` and `refused` are probabilities per request; at
    most one of them happens to it. Reordering needs no field: each request and each reply draws
    a latency of its own, so one sent later may arrive, or be answered, first.
    """

    # How long a request travels to the store, and its reply back.
    request_ms: Span = Span(10.0, 10.0)
    reply_ms: Span = Span(10.0, 10.0)
    # The client gives up after this long: `Unknown` for a create, `StoreUnavailable` otherwise.
    # With `math.inf` it waits for as long as its request is held.
    timeout_ms: float = 5_000.0
    # The share of requests without an answer whose client learns so early (a connection that is
    # reset) and not by its timeout. It may learn so while the request is still under way.
    reset: float = 0.5
    # Never applied, never answered.
    lost_request: float = 0.0
    # Applied, and never answered.
    lost_reply: float = 0.0
    # Applied `late_ms` after the client has given up: possibly long after another writer took
    # over, or after the sender has crashed.
    late_request: float = 0.0
    late_ms: Span = Span(1.0, 120_000.0)
    # Not applied, and refused with a temporary error: `Unknown` for a create, because a client
    # can't tell, `StoreUnavailable` otherwise.
    refused: float = 0.0
    # More requests than this in a second, from all nodes together, are refused likewise.
    throttle_per_s: float = math.inf
    # Slow spells: about every `spell_every_ms`, for `spell_ms`, latencies are multiplied.
    spell_every_ms: float = math.inf
    spell_ms: Span = Span(100.0, 20_000.0)
    spell_factor: float = 20.0
    # How many times as long a list takes as another request.
    list_factor: float = 1.0
    # Names in one reply to a list.
    page_names: int = 1_000

    def __post_init__(self) -> None:
        if self.lost_request + self.lost_reply + self.late_request + self.refused > 1:
            raise ValueError(f"the probabilities of faults add up to more than 1: {self}")

    @classmethod
    def none(cls, *, round_trip_ms: float = 20.0) -> Faults:
        """A quiet store: every request takes `round_trip_ms` and is answered."""
        half = Span(round_trip_ms / 2, round_trip_ms / 2)
        return cls(request_ms=half, reply_ms=half)

    @classmethod
    def rough(cls) -> Faults:
        """Everything goes wrong at times: a few of a hundred requests, and spells."""
        return cls(
            request_ms=Span(1.0, 100.0),
            reply_ms=Span(1.0, 100.0),
            lost_request=0.02,
            lost_reply=0.03,
            late_request=0.02,
            refused=0.03,
            spell_every_ms=60_000.0,
            page_names=7,
        )

    @classmethod
    def swarm(cls, random: Random) -> Faults:
        """Some kinds of faults at a strength of their own, the others not at all.

        Runs that differ in this way find more than runs that are all alike: some bugs show only
        where a certain fault is frequent, or absent.
        """

        def sometimes(strength: float) -> float:
            return strength * random.random() if random.random() < 0.5 else 0.0

        longest_ms = random.choice([2.0, 20.0, 200.0, 2_000.0])
        return cls(
            request_ms=Span(1.0, longest_ms),
            reply_ms=Span(1.0, longest_ms),
            timeout_ms=random.choice([500.0, 5_000.0, 60_000.0]),
            reset=random.random(),
            lost_request=sometimes(0.2),
            lost_reply=sometimes(0.2),
            late_request=sometimes(0.2),
            late_ms=Span(1.0, random.choice([100.0, 10_000.0, 1_000_000.0])),
            refused=sometimes(0.2),
            throttle_per_s=random.choice([math.inf, math.inf, 200.0]),
            spell_every_ms=random.choice([math.inf, 10_000.0, 100_000.0]),
            page_names=random.choice([1, 3, 1_000]),
        )
