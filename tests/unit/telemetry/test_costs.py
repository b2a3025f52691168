"""Who is charged with the requests of a process: sums are exact, and tables are bounded."""

from __future__ import annotations

from collections import Counter
from decimal import Decimal
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shalekv.store.api import RequestCounts, RequestKind
from shalekv.telemetry.activity import CURRENT, Activity
from shalekv.telemetry.costs import (
    ANONYMOUS,
    BACKGROUND,
    FORGET_MS,
    NO_PREFIX,
    ORIGINS_MAX,
    OTHER,
    Charges,
    Costs,
    prefix_of,
)
from shalekv.telemetry.metrics import FAMILIES, Metrics
from shalekv.telemetry.prices import OBJECTS

DIMENSIONS = ("method", "principal", "prefix")


class Process:
    """A process that sends requests, with and without activities, and charges them."""

    def __init__(self) -> None:
        self.sent = RequestCounts()
        self.now_ms = 0.0
        self.costs = Costs(self.sent, OBJECTS["s3"], lambda: self.now_ms)

    def send(self, kind: RequestKind, count: int = 1, activity: Activity | None = None) -> None:
        token = CURRENT.set(activity)
        self.sent.add(kind, count)
        CURRENT.reset(token)

    def call(self, principal: str, key: bytes, reads: int = 1, calls: int = 1) -> None:
        activity = Activity(0)
        self.send(RequestKind.READ, reads, activity)
        self.costs.charge("KV.Get", principal, key, activity.sent, calls)

    def dimensions(self) -> list[list[Charges]]:
        costs = self.costs
        return [[*costs.methods({})], [*costs.principals()], [*costs.prefixes()]]

    def sums(self) -> list[Counter[str]]:
        """What the names of each dimension are charged with, in sum."""
        return [sum((Counter(o.sent) for o in names), Counter()) for names in self.dimensions()]


def charged(origins: list[Charges], name: str) -> int:
    return sum(sum(origin.sent.values()) for origin in origins if origin.name == name)


@given(seed=st.integers(0), steps=st.integers(0, 60))
def test_the_sums_of_each_dimension_are_all_requests(seed: int, steps: int) -> None:
    """At any time, each dimension has all requests but those of activities that go on; the
    background and others never get less.
    """
    random, process = Random(seed), Process()
    going_on: list[Activity] = []
    least = Counter[tuple[int, str, str]]()
    for step in range(steps):
        activity = random.choice([None, Activity(step), *going_on])
        if activity is not None and activity not in going_on:
            going_on.append(activity)
        process.send(random.choice([*RequestKind]), random.randrange(1, 4), activity)
        if going_on and random.random() < 0.5:
            ended = going_on.pop(random.randrange(len(going_on)))
            key = random.choice([b"a/1", b"b/1", b"none"])
            if random.random() < 0.8:
                for _ in range(random.randrange(1, 3)):  # by the second time it is charged already
                    process.costs.charge("KV.Put", random.choice(["", "token:a"]), key, ended.sent)
            elif random.random() < 0.5:
                process.send(RequestKind.READ, 1, ended)  # its task has gone on
            del ended
        del activity
        open_now = sum((Counter(each.sent) for each in going_on), Counter[str]())
        everything = Counter[str](process.sent.by_kind)
        assert process.sums() == [+(everything - open_now)] * len(DIMENSIONS)
        for number, origins in enumerate(process.dimensions()):
            for origin in origins:
                for kind, count in origin.sent.items():
                    assert count >= least[number, origin.name, kind]
                    least[number, origin.name, kind] = count


@given(
    counts=st.lists(st.tuples(st.integers(0, 150), st.sampled_from(RequestKind), st.integers(1, 9)))
)
def test_dollars_add_up_to_the_last_digit(counts: list[tuple[int, RequestKind, int]]) -> None:
    """The dollars of each dimension in metrics are those of all requests, as decimal numbers."""
    process = Process()
    objects = [each for each in counts if not each[1].startswith("record")]  # without a price
    for name, kind, count in objects:
        activity = Activity(0) if name % 3 else None
        process.send(kind, count, activity)
        if activity is not None:
            process.costs.charge(f"m{name}", f"token:{name}", b"p%d/" % name, activity.sent)
    metrics = Metrics()
    process.costs.collect(metrics)
    prices = {"write": "0.000005", "list": "0.000005", "read": "0.0000004", "delete": "0"}
    wanted = sum(Decimal(prices[kind]) * count for _, kind, count in objects)
    for dimension in DIMENSIONS:
        family = FAMILIES[f"{dimension}_cost_dollars"]
        samples = [sample for each, _, sample in metrics if each is family]
        assert sum(Decimal(repr(sample)) for sample in samples) == wanted


def test_those_who_cost_most_stay() -> None:
    """However many names there are, the table is bounded, and keeps who costs a tenth of all."""
    process = Process()
    for number in range(20 * ORIGINS_MAX):
        process.call(f"token:{number}", b"p%d/k" % number)
        if number % 9 == 0:
            process.call("token:greedy", b"greedy/k")
    _, principals, prefixes = process.dimensions()
    assert len(principals) == len(prefixes) == ORIGINS_MAX + len((OTHER, BACKGROUND))
    assert charged(principals, "token:greedy") == charged(prefixes, "greedy/") > 200
    assert charged(principals, OTHER) > 1_000


def test_a_name_without_charges_is_forgotten_after_an_hour() -> None:
    """What was charged to it goes on to count, with the others."""
    process = Process()
    process.call("token:gone", b"gone/1", reads=3, calls=5)
    process.now_ms = FORGET_MS / 2
    process.call("token:here", b"here/1")
    process.now_ms = FORGET_MS + 1.0
    _, principals, prefixes = process.dimensions()
    assert [(each.name, sum(each.sent.values())) for each in principals] == [
        ("token:here", 1),
        (OTHER, 3),
        (BACKGROUND, 0),
    ]
    assert [(each.name, each.calls) for each in prefixes[:2]] == [("here/", 1), (OTHER, 5)]


def test_calls_of_principals_are_counted_where_there_is_space() -> None:
    """Calls without requests count, too; with a full table, for the others."""
    process = Process()
    process.costs.add_calls("token:a", 7)
    process.costs.add_calls("", 2)
    process.call("token:a", b"k")
    principals = {each.name: each for each in process.costs.principals()}
    assert (principals["token:a"].calls, principals[ANONYMOUS].calls) == (7, 2)
    for number in range(ORIGINS_MAX):
        process.call(f"token:{number}", b"k", reads=9)
    process.costs.add_calls("token:unknown", 11)
    assert {each.name: each.calls for each in process.costs.principals()}[OTHER] == 7 + 2 + 11


@pytest.mark.parametrize(
    ("key", "prefix"),
    [
        (b"users/1/name", "users/"),
        (b"user:1/name", "user:"),
        (b"/registry/pods/a", "/registry/"),
        (b"users/", "users/"),
        (b"plain", NO_PREFIX),
        (b"", NO_PREFIX),
        (b"/", NO_PREFIX),
        (b"\xff\\ \n/", r"\xff\x5c \x0a/"),
        (b"p" * 63 + b"/k", "p" * 63 + "/"),
        (b"p" * 64 + b"/k", NO_PREFIX),
    ],
)
def test_prefix_of_a_key(key: bytes, prefix: str) -> None:
    """A prefix ends with the first separator behind the first byte, if that comes soon."""
    assert prefix_of(key) == prefix
