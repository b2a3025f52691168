"""What processes of Spark do once."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from shalekv_spark.worker import settle


@pytest.fixture(autouse=True)
def forgotten() -> Iterator[None]:
    """As in a new process."""
    settle.cache_clear()
    yield
    settle.cache_clear()


@pytest.mark.parametrize("is_reused", [True, False])
def test_only_where_tasks_follow_each_other_imports_are_taken_out_of_sight(
    monkeypatch: pytest.MonkeyPatch, *, is_reused: bool
) -> None:
    """Once, and never in the process of whoever uses the package."""
    frozen: list[bool] = []
    monkeypatch.setattr(gc, "freeze", lambda: frozen.append(True))
    if is_reused:
        monkeypatch.setenv("SPARK_REUSE_WORKER", "1")
    else:
        monkeypatch.delenv("SPARK_REUSE_WORKER", raising=False)
    settle()
    settle()
    assert frozen == [True] * is_reused
