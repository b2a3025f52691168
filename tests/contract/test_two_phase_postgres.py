"""S3 with two-phase compare-and-swap by PostgreSQL keeps the contract of object stores."""

from __future__ import annotations

import pytest

from tests.contract.record_contract import OpenRecords
from tests.contract.two_phase_contract import TwoPhaseContract


class TestTwoPhaseOnPostgres(TwoPhaseContract):
    @pytest.fixture
    def open_records(self, postgres_records: OpenRecords) -> OpenRecords:
        """Connections of their own to one new table."""
        return postgres_records
