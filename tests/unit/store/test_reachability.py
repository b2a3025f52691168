"""Outages as they are reported to an operator: since when, for how long, and why."""

from __future__ import annotations

import pytest

from shalekv.errors import ObjectNotFound, StoreBroken, StoreRefused, StoreUnavailable
from shalekv.settings import StoreSettings
from shalekv.store.cas import CasStore
from shalekv.store.reachability import SILENT_AFTER_MS, UNREACHABLE_AFTER_MS, Reachability
from tests.kit.engine.hand_clock import HandClock, hand_runtime
from tests.kit.inline_runtime import InlineClock, inline_runtime
from tests.kit.scripted_store import Fate, ScriptedStore

AFTER_MS = UNREACHABLE_AFTER_MS


def failure(problem: str) -> StoreUnavailable:
    return StoreUnavailable("file:///db", "create", "wal/1", problem)


def test_an_outage_is_reported_after_a_while() -> None:
    """An outage lasts from the beginning of the first failed request, with the last problem, until
    a request is answered.
    """
    clock = HandClock()
    requests = Reachability(clock)
    first = requests.begin()
    clock.advance(10)
    requests.fail(first, failure("disk full"))
    assert requests.trouble() is None
    clock.advance(AFTER_MS - 11)
    assert requests.trouble() is None
    clock.advance(1)
    second = requests.begin()
    requests.fail(second, failure("no route"))
    trouble = requests.trouble()
    assert trouble is not None
    assert trouble.text(clock.monotonic_ms()) == "store unreachable for 5 s: no route"
    requests.succeed()
    assert requests.trouble() is None
    clock.advance(AFTER_MS)
    requests.end(first)
    requests.end(second)
    assert requests.trouble() is None  # unknown, since there are no requests


def test_silence_is_an_outage() -> None:
    """A request without an answer counts as an outage, but not while others are answered."""
    clock = HandClock()
    requests = Reachability(clock)
    silent = requests.begin()
    for _ in range(3):
        clock.advance(SILENT_AFTER_MS - 1)
        assert requests.trouble(0) is None  # a slow answer is no outage
        requests.succeed()
    clock.advance(SILENT_AFTER_MS)
    trouble = requests.trouble()
    assert trouble is not None
    assert trouble.text(clock.monotonic_ms()) == "store unreachable for 10 s: no answer"
    requests.end(silent)
    assert requests.trouble() is None


def test_problems_are_reported_from_the_first_on() -> None:
    """A caller with a shorter threshold than that of an outage gets problems that have lasted only
    milliseconds.
    """
    clock = HandClock()
    requests = Reachability(clock)
    assert requests.trouble(0) is None
    number = requests.begin()
    clock.advance(40)
    assert requests.trouble(0) is None
    requests.fail(number, failure("connection refused"))
    trouble = requests.trouble(0)
    assert trouble is not None
    assert trouble.text(clock.monotonic_ms()) == "store unreachable for 40 ms: connection refused"


async def test_a_claim_reports_the_problem_of_its_create() -> None:
    """The reported problem is that of the create, also when a later read says, truthfully, that
    there is no object.
    """
    store, reported = ScriptedStore(), list[str]()
    store.creates = [Fate.REQUEST_LOST]

    class Watched(InlineClock):
        async def sleep_ms(self, duration_ms: float) -> None:
            await super().sleep_ms(duration_ms)
            trouble = uploads.trouble(0)
            reported.append(trouble.problem if trouble is not None else "")

    cas = CasStore(store, inline_runtime(clock=Watched()), StoreSettings())
    uploads = Reachability(cas.runtime.clock)
    await cas.claim("wal/1", b"x", uploads=uploads)
    assert reported == ["REQUEST_LOST"]
    assert uploads.trouble(0) is None


async def test_a_store_knows_whether_its_reads_are_answered() -> None:
    """Failures and refusals of reads are trouble; a missing object is an answer, and errors of
    writes are not counted for reads.
    """
    clock, inner = HandClock(), ScriptedStore()
    store = CasStore(inner, hand_runtime(clock, 1), StoreSettings(read_attempts=1))
    for fate, kind in ((Fate.FORBIDDEN, StoreRefused), (Fate.REFUSED, StoreUnavailable)):
        inner.read_fates = [fate]
        with pytest.raises(kind):
            await store.head("wal/1")
        clock.advance(AFTER_MS)
        assert store.reachability.trouble() is not None
        with pytest.raises(ObjectNotFound):
            await store.get("wal/1")
        assert store.reachability.trouble() is None
    inner.creates = [Fate.BROKEN]
    with pytest.raises(StoreBroken):
        await store.claim("wal/1", b"")
    clock.advance(AFTER_MS)
    assert store.reachability.trouble() is None
