"""Asserts of the modules that carry out scenarios show the values that they compare."""

from __future__ import annotations

import pytest

pytest.register_assert_rewrite(
    "tests.scenarios.acts",
    "tests.scenarios.expectations",
    "tests.scenarios.jobs",
    "tests.scenarios.objects",
    "tests.scenarios.processes",
    "tests.scenarios.serving",
    "tests.scenarios.stage",
    "tests.scenarios.tables",
    "tests.scenarios.two_phase",
)
