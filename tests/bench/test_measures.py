"""Each measure runs, once and tiny; nothing is said about time. `make bench` measures."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import structlog

from tests.bench.measures import telemetry
from tests.bench.measures.all import MEASURES
from tests.bench.memory import flatness, main
from tests.bench.plan import Measure, Outcome
from tests.bench.report import document, section, short
from tests.bench.running import circumstances, run_one

SHORT = [measure for measure in MEASURES if not measure.is_long]

LEFT_OUT = {
    "client": {"session", "coalesced", "unary"},
    "compaction": {"none"},
    "telemetry": {goal.key for goal in telemetry.MEASURE.goals} - {"metrics_put", "traces_put"},
}


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    structlog.configure(logger_factory=structlog.ReturnLoggerFactory())
    yield
    structlog.reset_defaults()


@pytest.mark.parametrize("measure", SHORT, ids=lambda measure: measure.name)
def test_a_measure_runs(measure: Measure) -> None:
    """Every goal gets a figure, and what is counted and not timed is as promised."""
    outcome = run_one(measure, is_tiny=True)
    assert not outcome.failure, outcome.failure
    left_out = {goal.key for goal in measure.goals} - set(outcome.found.samples)
    assert left_out <= LEFT_OUT.get(measure.name, set())
    assert counted(outcome)
    results = circumstances() | {"measures": [outcome.as_json()]}
    assert all(goal["text"] in section(results["measures"][0]) for goal in _goals(results))
    assert all(goal["text"] in document(results) for goal in _goals(results))
    assert short(results)["figures"]


def _goals(results: dict[str, Any]) -> list[dict[str, Any]]:
    return [goal for measure in results["measures"] for goal in measure["goals"]]


def counted(outcome: Outcome) -> bool:
    """Return whether requests and syncs are as few as they must be, and no fewer than promised."""
    samples = outcome.found.samples
    match outcome.measure.name:
        case "commit":
            assert samples["requests"] == [1, 1]
            assert samples["syncs"] == [2, 2]
        case "late-store":
            assert samples["requests"] == [1]
        case "levels":
            assert max(samples["requests"]) <= 1.05  # a filter in 100 errs
        case "open":
            assert max(samples["requests"]) <= 20
    return True


def test_the_memory_run_runs(capsys: pytest.CaptureFixture[str]) -> None:
    """All loads get the answers that they should, and the verdict is printed."""
    main(0.05, writes=False, is_tiny=True)
    told = capsys.readouterr().out
    assert "memory of the writer" in told
    assert "UNEXPECTED" not in told


def test_what_is_flat() -> None:
    """A curve that grows at first is flat when it does not grow later; a steady one is not."""
    filling = [(float(n), min(300.0, 100.0 + 50 * n)) for n in range(31)]
    leaking = [(float(n), 100.0 + 5 * n) for n in range(31)]
    assert flatness(filling)["is_flat"]
    assert not flatness(leaking)["is_flat"]
